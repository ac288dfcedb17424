"""What a percentile over a whole level hides: requests that miss one SLO or another, bad minutes.

The planned load is simulated for fifteen minutes. Joint attainment is the share of requests that
meet all SLOs at once; the worst window is the SLO's own statistic over the five minutes in which it
is highest. Times in seconds.

A short simulation that finds the SLOs kept may have been lucky. Where fifteen minutes of a fleet's
load do not keep them, its copies carry less than was thought.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lmi_bench.analysis.fleet.answer import Candidate
from lmi_bench.analysis.fleet.candidates import CopyCapacity, operating_of
from lmi_bench.analysis.fleet.operating_point import Operating, Statistics
from lmi_bench.analysis.fleet.ranking import Fleet
from lmi_bench.analysis.fleet.request import RecommendRequest, Routing
from lmi_bench.analysis.level.layouts import CopyPlan, EngineKey
from lmi_bench.analysis.level.steady_state import QUANTILES
from lmi_bench.analysis.results.latency import request_latency, samples_needed
from lmi_bench.analysis.results.slo_results import goodput
from lmi_bench.core.load import Load
from lmi_bench.core.records import RequestRecord
from lmi_bench.core.slo import Slo
from lmi_bench.core.units import s_to_ms
from lmi_bench.core.workload import LevelSpec
from lmi_bench.engine.router import make_router

WINDOW_S = 300.0
_WINDOW_STEP_S = 60.0
_LOOK_S = 3 * WINDOW_S
_MOST_REQUESTS = 6000
_MOST_REPLICAS = 4


@dataclass(frozen=True, slots=True)
class Attainment:
    """How the SLOs hold request by request and window by window.

    joint_share     share of requests that meet every SLO, 0 to 1; None without SLOs
    whole_ms        of each SLO's statistic, over all requests; None where there are too few
    worst_ms        of each SLO's statistic: its highest value over five minutes; None where no
                    five minutes hold enough requests
    reason          why nothing could be looked at, or ""
    """

    joint_share: float | None = None
    whole_ms: Mapping[str, float | None] = field(default_factory=dict)
    worst_ms: Mapping[str, float | None] = field(default_factory=dict)
    requests: int = 0
    minutes: float = 0.0
    routing: str = "random"
    reason: str = ""

    def to_json(self) -> dict[str, Any]:
        """As it stands in the file."""
        return {
            "joint_attainment": self.joint_share,
            "fifteen_minutes_ms": dict(self.whole_ms),
            "worst_5_minutes_ms": dict(self.worst_ms),
            "requests": self.requests,
            "minutes": self.minutes,
            "routing": self.routing,
            "reason": self.reason or None,
        }


def attainment(
    records: Sequence[RequestRecord], slos: Sequence[Slo], *, open_loop: bool, routing: str = ""
) -> Attainment:
    """Joint attainment and worst windows of the settled records of a level."""
    if not records:
        return Attainment(reason="no request was simulated", routing=routing)
    last_s = max(record.due_s for record in records)
    first_s = min(record.due_s for record in records)
    return Attainment(
        joint_share=goodput(records, slos, open_loop=open_loop).share if slos else None,
        whole_ms={str(slo): _statistic_ms(records, slo, open_loop=open_loop) for slo in slos},
        worst_ms={str(slo): _worst_ms(records, slo, open_loop=open_loop) for slo in slos},
        requests=len(records),
        minutes=(last_s - first_s) / 60,
        routing=routing,
    )


def keeps(found: Attainment, slos: Sequence[Slo]) -> bool:
    """Whether no SLO's statistic is above its limit over all that was looked at."""
    values = [(found.whole_ms.get(str(slo)), slo.limit_ms) for slo in slos]
    return all(value is None or value <= limit for value, limit in values)


def _statistic_ms(records: Sequence[RequestRecord], slo: Slo, *, open_loop: bool) -> float | None:
    """The SLO's statistic of the completed requests, in ms; None where they are too few for it."""
    quantile = QUANTILES.get(slo.statistic)
    done = [record for record in records if record.ok]
    if len(done) < (1 if quantile is None else samples_needed(quantile)):
        return None
    latencies = [request_latency(record, open_loop=open_loop) for record in done]
    return s_to_ms(Statistics(latencies).statistic_s(slo.metric, slo.statistic))


def _worst_ms(records: Sequence[RequestRecord], slo: Slo, *, open_loop: bool) -> float | None:
    values = (_statistic_ms(window, slo, open_loop=open_loop) for window in _windows(records))
    return max((value for value in values if value is not None), default=None)


def _windows(records: Sequence[RequestRecord]) -> Iterator[list[RequestRecord]]:
    """The requests due in each whole window of five minutes, a minute apart."""
    start_s = min(record.due_s for record in records)
    end_s = max(record.due_s for record in records)
    while start_s + WINDOW_S <= end_s + 1.0:
        yield [r for r in records if start_s <= r.due_s < start_s + WINDOW_S]
        start_s += _WINDOW_STEP_S


def look_long(
    plan: CopyPlan,
    operating: Operating,
    slos: Sequence[Slo],
    *,
    copies: int,
    routing: Routing = "random",
    seed: int = 0,
) -> Attainment:
    """Simulate the planned load of one copy, or of several behind a router, for fifteen minutes.

    copies  of the fleet; under random routing one of them stands for all, since a share of a
            Poisson stream is one
    """
    steady = plan.steady
    replicas = 1 if routing == "random" or not steady.open_loop else min(copies, _MOST_REPLICAS)
    rate_per_s = operating.rate_per_s * replicas
    ramp = math.ceil(operating.batch * replicas)
    wanted = math.ceil(rate_per_s * _LOOK_S) + ramp
    if wanted > _MOST_REQUESTS:
        return Attainment(
            routing=routing,
            reason=f"fifteen minutes hold {wanted:,} requests, more than {_MOST_REQUESTS:,}",
        )

    if steady.open_loop:
        spec = LevelSpec(0, Load(rate_per_s=rate_per_s), num_requests=wanted)
        router = make_router(routing, seed)
        level = plan.simulate(spec, seed=seed, replicas=replicas, router=router)
        settled = level.records[ramp:]
    else:
        users = max(1, round(operating.batch))
        spec = LevelSpec(0, Load(concurrency=users), num_requests=max(wanted, 3 * users))
        spacing_s = steady.cycle_s(users) / users
        level = plan.simulate(spec, seed=seed, spacing_s=spacing_s)
        settled = level.records[users : len(level.records) - users]
    return attainment(settled, slos, open_loop=steady.open_loop, routing=routing)


class LongLook:
    """Simulates planned loads for fifteen minutes, layouts of equal speed and load once."""

    def __init__(self, request: RecommendRequest) -> None:
        self._request = request
        self._seen: dict[tuple[EngineKey, float], Attainment] = {}

    def at(self, candidate: Candidate, fleets: Sequence[Fleet]) -> Attainment:
        """What becomes of the candidate's load. fleets: those that the candidates are of."""
        layout, copy, machines = fleet_of(candidate, fleets)
        serving = self._request.availability.surviving(machines)
        operating = operating_of(self._request, layout, copy, serving)
        key = (layout.engine_key, round(operating.rate_per_s, 9))
        if key not in self._seen:
            self._seen[key] = look_long(
                copy.plan,
                operating,
                self._request.slos,
                copies=serving * layout.copies,
                routing=self._request.routing,
                seed=self._request.seed,
            )
        return self._seen[key]

    def overloaded(
        self, candidate: Candidate, fleets: Sequence[Fleet]
    ) -> tuple[EngineKey, CopyCapacity] | None:
        """The copy with its rate noted as too much for it; None where the SLOs are kept.

        What was measured counts more than a simulation.
        """
        layout, copy, machines = fleet_of(candidate, fleets)
        serving = self._request.availability.surviving(machines)
        rate_per_s = operating_of(self._request, layout, copy, serving).rate_per_s
        if not self._request.open_loop or rate_per_s <= copy.kept_per_s * (1 + 1e-9):
            return None
        if keeps(self.at(candidate, fleets), self._request.slos):
            return None
        too_much_per_s = min(copy.too_much_per_s, rate_per_s)
        return layout.engine_key, replace(copy, too_much_per_s=too_much_per_s)


def fleet_of(candidate: Candidate, fleets: Sequence[Fleet]) -> Fleet:
    """The fleet that a candidate was built from."""
    return next(
        fleet
        for fleet in fleets
        if (fleet[0].instance.instance_type, fleet[0].tensor_parallel, fleet[0].setting)
        == (candidate.instance, candidate.tensor_parallel, candidate.setting)
    )
