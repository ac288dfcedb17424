"""A recommendation's request: workload, load, limits and objective."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal, get_args

from lmi_bench.analysis.fleet import money
from lmi_bench.analysis.fleet.measured_load import MeasuredLoad
from lmi_bench.analysis.level.layouts import Layout, Workload
from lmi_bench.analysis.model.engine_setting import AS_STATED, SPLITTING_ENGINES, EngineSetting
from lmi_bench.analysis.model.profiles import EngineProfile
from lmi_bench.catalog.instances import Instance
from lmi_bench.catalog.prices import reprice
from lmi_bench.core.errors import InputError
from lmi_bench.core.load import Load
from lmi_bench.core.slo import Slo

Objective = Literal["cost", "cost-per-hour", "cost-per-1m", "latency", "throughput"]
Routing = Literal["random", "round-robin", "least-outstanding", "prefix-affine"]

BETWEEN_TOKENS = ("itl", "tpot")
"""Metrics that an answer of one token has not."""
MORE_HOSTS: Final = (2, 4)  # that a copy spans where no machine holds one
LONE_REQUEST = Load(1, think_time_s=0.0)
"""One request at a time on each copy: the load of the least latency."""


@dataclass(frozen=True, slots=True)
class RecommendRequest:
    """A question to the planner.

    load                 of the whole fleet: random arrivals, or users with a pause between answer
                         and next request; None: one machine, at the highest rate of random
                         arrivals that keeps the SLOs and 80 % of saturation; saturated without SLOs
    instances            machines to choose from; the catalog's with endpoints unless given
    degrees              tensor-parallel degrees to consider; None: powers of two
    settings             of the engine to choose from, beside machines and degrees
    engine_version       of the server, if it is not the profile's
    objective            cost: of a token at this load; cost-per-hour: of the fleet; cost-per-1m: of
                         a token at saturation; latency; throughput
    simulated_copies     best layouts whose capacity and latencies at the load are simulated
    simulate_long        simulate the best fleets for fifteen minutes (`attainment`), with `routing`
    blended_ratio, discount   of the blended price as published
    measured             measured levels of random arrivals at one copy
    calibrated           the profile was fitted to the user's own levels
    """

    workload: Workload
    profile: EngineProfile
    load: Load | None = None
    slos: tuple[Slo, ...] = ()
    objective: Objective = "cost"
    instances: tuple[Instance, ...] = field(default_factory=reprice)
    degrees: Sequence[int] | None = None
    engine_version: str | None = None
    blended_ratio: float = 3.0
    discount: float = 0.0
    seed: int = 0
    purchase: money.Purchase = money.ON_DEMAND
    availability: money.Availability = money.NO_SPARES
    requirements: money.Requirements = money.NO_REQUIREMENTS
    routing: Routing = "random"
    simulate_long: bool = False
    simulated_copies: int = 12
    measured: tuple[MeasuredLoad, ...] = ()
    calibrated: bool = False
    settings: tuple[EngineSetting, ...] = (AS_STATED,)

    def __post_init__(self) -> None:
        if self.routing not in get_args(Routing):
            raise InputError(f"--router {self.routing}: use {', '.join(get_args(Routing))}")
        between = [str(slo) for slo in self.slos if slo.metric in BETWEEN_TOKENS]
        if between and self.workload.output_tokens == 1:
            raise InputError(f"{between[0]}: answers of one token have no time between tokens; leave this limit out")
        if not 0 <= self.discount < 1:
            raise InputError(f"the discount must be at least 0 and below 1, got {self.discount:g}")

    @property
    def rate_per_s(self) -> float | None:
        """Requests each second; None without a stated rate."""
        return None if self.load is None else self.load.rate_per_s

    @property
    def users(self) -> int | None:
        """Users of the fleet, waiting and thinking; None without."""
        return None if self.load is None else self.load.concurrency

    @property
    def think_time_s(self) -> float | None:
        """Seconds between an answer and the user's next request."""
        return None if self.load is None else self.load.think_time_s

    @property
    def open_loop(self) -> bool:
        """Whether requests arrive at a rate, independent of answers; so they do at a capacity."""
        return self.rate_per_s is not None or (self.users is None and bool(self.slos))

    def over_hosts(self) -> Iterator["RecommendRequest"]:
        """The question for copies that span machines, fewer first; none if the engine cannot."""
        for hosts in MORE_HOSTS if self.profile.name.lower() in SPLITTING_ENGINES else ():
            yield replace(self, settings=tuple(replace(each, hosts=hosts) for each in self.settings))

    def fleet_usd_per_hour(self, layout: Layout, machines: int) -> float | None:
        """USD for an hour of that many machines by the purchase; None: not known."""
        return self.purchase.usd_per_hour(layout.instance, machines)

    def describe_load(self) -> str:
        """The load for people."""
        load, burstiness = self.load, self.workload.burstiness
        if load == LONE_REQUEST:
            return "one request at a time on each copy"
        if load is not None and load.is_open and burstiness < 1:
            load = replace(load, arrivals="gamma", burstiness=burstiness)
        if load is not None:
            return load.description
        if self.slos:
            return "one machine at its highest Poisson rate, at most 80 % of saturation"
        return "one machine at saturation"
