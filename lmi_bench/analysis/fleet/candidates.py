"""From a layout and what one copy carries to a fleet: machines, figures with intervals, cost."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lmi_bench.analysis.fit.fit import Fit
from lmi_bench.analysis.fit.uncertainty import (
    Estimate,
    TimeFactors,
    Uncertainty,
    metric_of,
    silence,
    under_load,
)
from lmi_bench.analysis.fleet.answer import Candidate, SloOutlook
from lmi_bench.analysis.fleet.measured_load import CapacityBelief, Verdict
from lmi_bench.analysis.fleet.money import (
    FleetCost,
    blended_as_published,
    usd_per_1m_tokens,
    usd_per_month,
)
from lmi_bench.analysis.fleet.operating_point import (
    CopySimulation,
    Operating,
    Statistics,
)
from lmi_bench.analysis.fleet.request import RecommendRequest
from lmi_bench.analysis.level.cells import MeasuredLevel
from lmi_bench.analysis.level.layouts import CopyPlan, EngineKey, Layout, Workload
from lmi_bench.analysis.level.steady_state import LATENCY_LOAD_LIMIT, SteadyState
from lmi_bench.analysis.model.capacity import memory_plan_for
from lmi_bench.analysis.model.setup import Setup
from lmi_bench.core.units import bytes_to_gib

_SHOWN = tuple(
    (metric, statistic)
    for metric in ("ttft", "itl", "tpot", "e2e", "latency_per_token")
    for statistic in ("p50", "p90")
)


_BELOW = 0.97  # of a rate that was too much


@dataclass(frozen=True, slots=True)
class CopyCapacity:
    """What one copy carries, as far as it is known; layouts of equal speed have the same.

    fit            the profile that it is predicted by
    factors        how much longer its times may be: `steps` is s of the capacity's interval
    rate_per_s     highest rate of a copy within the SLOs as they are held (`held_limits`)
    central_per_s  the same with the SLOs held against the prediction itself
    concurrency    most users waiting at a copy within the SLOs; 0 if none
    measured       rates that a copy was given, each with whether it kept the SLOs
    too_much_per_s rate at which a long simulation did not keep the SLOs
    simulated      the rates are those of simulated levels, not of the closed form
    """

    plan: CopyPlan
    simulation: CopySimulation
    fit: Fit
    factors: TimeFactors
    rate_per_s: float
    central_per_s: float
    concurrency: int
    limited_by: str
    warnings: tuple[str, ...]
    measured: tuple[tuple[float, Verdict], ...] = ()
    too_much_per_s: float = math.inf
    simulated: bool = False

    def belief(self, *, keeps_slos: bool) -> CapacityBelief:
        """What a copy carries: the prediction, cut off by what was measured.

        Where latencies are to be kept, the prediction promises no more than the share of the
        saturated rate up to which they can be foreseen.
        """
        low = self.rate_per_s / self.factors.steps
        if keeps_slos:
            low = min(low, LATENCY_LOAD_LIMIT * self.plan.steady.saturated_rate_per_s)
        low = min(low, _BELOW * self.too_much_per_s)
        median = max(low, min(self.central_per_s, self.too_much_per_s))
        levels = [(rate, verdict == "kept") for rate, verdict in self.measured if verdict != "near"]
        near = [rate for rate, verdict in self.measured if verdict == "near"]
        return CapacityBelief.after(low, median, levels, near_per_s=near)

    def load_limit_per_s(self, *, keeps_slos: bool) -> float:
        """What a copy may be loaded with."""
        return self.belief(keeps_slos=keeps_slos).sure_per_s

    @property
    def kept_per_s(self) -> float:
        """The highest rate that was measured and kept the SLOs; 0 without one."""
        return self.belief(keeps_slos=True).kept_per_s


Planned = tuple[Layout, CopyCapacity]
"""A layout with what a copy of it carries."""


def with_capacity(
    layouts: Sequence[Planned], key: EngineKey, capacity: CopyCapacity
) -> list[Planned]:
    """The layouts, those of this engine with another capacity."""
    return [(each, capacity if each.engine_key == key else known) for each, known in layouts]


def machines_needed(request: RecommendRequest, layout: Layout, copy: CopyCapacity) -> int | None:
    """Machines that carry the load with every copy within its limits; None if no number does.

    Spare machines come on top: `RecommendRequest.availability`.
    """
    per_copy = copy.load_limit_per_s(keeps_slos=bool(request.slos))
    if per_copy <= 0:
        return None
    # users wait one at a time at least; arrivals may keep a copy busy for part of the time only
    if not request.open_loop and copy.concurrency < 1:
        return None
    machines = 1
    if request.rate_per_s is not None:
        machines = math.ceil(request.rate_per_s / (per_copy * layout.copies) - 1e-9)
    elif request.users is not None:
        machines = math.ceil(request.users / (_users_of(request, copy) * layout.copies) - 1e-9)
    least = request.requirements.min_throughput_tokens_per_s
    if least is not None:
        each = layout.copies * per_copy * request.workload.output_tokens
        machines = max(machines, math.ceil(least / each - 1e-9))
    return machines


def _users_of(request: RecommendRequest, copy: CopyCapacity) -> float:
    """Users of a copy: those who wait, and those who think meanwhile."""
    steady = copy.plan.steady
    response_s = steady.latency_s("e2e", "mean", copy.concurrency)
    think_s = request.think_time_s or 0.0
    return copy.concurrency * (response_s + think_s) / response_s


def operating_of(
    request: RecommendRequest, layout: Layout, copy: CopyCapacity, machines: int
) -> Operating:
    """The load of one copy in a fleet of that many machines."""
    steady = copy.plan.steady
    copies = machines * layout.copies
    if request.rate_per_s is not None:
        rate = request.rate_per_s / copies
        return Operating(rate, steady.batch_at(rate))
    batch = float(copy.concurrency)
    if request.users is not None:
        batch = _waiting(request, copy, request.users / copies)
    return Operating(steady.rate_per_s(batch), batch)


def _waiting(request: RecommendRequest, copy: CopyCapacity, users: float) -> float:
    """Users of a copy that wait at once: N R / (R + Z), R at that concurrency."""
    low, high = 0.0, users
    think_s = request.think_time_s or 0.0
    for _ in range(40):
        middle = (low + high) / 2
        response_s = copy.plan.steady.latency_s("e2e", "mean", middle)
        if middle < users * response_s / (response_s + think_s):
            low = middle
        else:
            high = middle
    return max(1.0, high)


def set_up(layout: Layout, workload: Workload) -> MeasuredLevel:
    """What a copy is and is asked, without a load. workload: as the layout's engine serves it."""
    return MeasuredLevel(
        Setup(
            workload.shape,
            layout.instance,
            layout.tensor_parallel,
            workload.dtype,
            kv_dtype=workload.kv_dtype,
            speculation=workload.speculation,
        ),
        input_tokens=workload.input_tokens,
        output_tokens=workload.output_tokens,
        concurrency=0,
        num_requests=0,
    )


def load_of(
    request: RecommendRequest, layout: Layout, copy: CopyCapacity, operating: Operating
) -> MeasuredLevel:
    """The load of one copy, as `predict` would be asked for it."""
    asked = set_up(layout, copy.plan.workload)
    if request.open_loop:
        return under_load(asked, copy.fit.profile, rate_per_s=operating.rate_per_s)
    return under_load(asked, copy.fit.profile, concurrency=max(1, round(operating.batch)))


def build_candidate(
    request: RecommendRequest, layout: Layout, copy: CopyCapacity, machines: int, *, simulate: bool
) -> Candidate:
    """The fleet with its figures; latencies simulated at its own load if `simulate`.

    machines  with the spare ones; latencies are those after the failure that they are for
    """
    serving = request.availability.surviving(machines)
    operating = operating_of(request, layout, copy, serving)
    observed = _simulated(request, copy, operating) if simulate else None
    workload, steady = request.workload, copy.plan.steady
    served_per_s = serving * layout.copies * operating.rate_per_s
    capacity = _capacity(request, copy, machines * layout.copies)
    load = load_of(request, layout, copy, operating)
    silent = silence(copy.fit, load)
    sure = Uncertainty.of(copy.fit, load, spread=True) if simulate and silent is None else None
    output_per_s = served_per_s * workload.output_tokens
    figures: dict[str, Estimate | None] = {
        "throughput_tokens_per_s": _throughput(request, copy, sure, output_per_s),
        "capacity_rate_per_s": capacity,
        "capacity_tokens_per_s": capacity.times(workload.output_tokens),
    }
    withheld: dict[str, str] = {}
    for metric, statistic in _statistics(request):
        key = f"{metric}_{statistic}_ms"
        if silent is not None:
            figures[key] = None
            withheld[key] = silent
        else:
            figures[key] = _latency(request, copy, operating, observed, sure, metric, statistic)
    measured = request.open_loop and operating.rate_per_s <= copy.kept_per_s * (1 + 1e-9)
    blended, blended_reason = _blended(request, layout, steady, operating)
    return Candidate(
        instance=layout.instance.instance_type,
        instances=machines,
        tensor_parallel=layout.tensor_parallel,
        copies=layout.copies,
        accelerator=layout.instance.accelerator.name,
        **_prices(request, layout, copy, machines, served_per_s),
        blended_3to1_as_published=blended,
        blended_reason=blended_reason,
        figures=figures,
        withheld=withheld,
        slos=tuple(_outlooks(request, figures, measured=measured)),
        memory=_memory(request, layout, copy, operating),
        limited_by=copy.limited_by,
        basis="simulated" if observed is not None else "closed form",
        price_provenance=layout.instance.price_provenance,
        profile_provenance=request.profile.provenance,
        warnings=copy.warnings,
        reason="",
        attainment={},
        setting=layout.setting,
        cost=_cost(request, layout, copy, machines, capacity),
    )


def _blended(
    request: RecommendRequest, layout: Layout, steady: SteadyState, operating: Operating
) -> tuple[float | None, str | None]:
    """The posts' blended price of a machine, or why it does not apply."""
    return blended_as_published(
        price_usd_per_hour=layout.instance.price_usd_per_hour,
        concurrency=layout.copies * max(1.0, operating.batch),
        itl_p50_s=steady.latency_s("itl", "p50", operating.batch),
        input_tokens=request.workload.input_tokens,
        output_tokens=request.workload.output_tokens,
        slots=layout.copies * steady.slots,
        ratio=request.blended_ratio,
        discount=request.discount,
    )


def _prices(
    request: RecommendRequest,
    layout: Layout,
    copy: CopyCapacity,
    machines: int,
    served_per_s: float,
) -> dict[str, float | None]:
    """USD of the fleet and of its tokens, at the load and with every slot busy."""
    price = request.fleet_usd_per_hour(layout, machines)
    full_per_s = machines * layout.copies * copy.plan.steady.saturated_rate_per_s
    output, total = request.workload.output_tokens, request.workload.total_tokens
    return {
        "price_usd_per_hour": price,
        "usd_per_month": usd_per_month(price),
        "usd_per_1m_output_tokens": usd_per_1m_tokens(price, served_per_s * output),
        "usd_per_1m_total_tokens": usd_per_1m_tokens(price, served_per_s * total),
        "usd_per_1m_output_tokens_at_saturation": usd_per_1m_tokens(price, full_per_s * output),
        "usd_per_1m_total_tokens_at_saturation": usd_per_1m_tokens(price, full_per_s * total),
    }


def _cost(
    request: RecommendRequest,
    layout: Layout,
    copy: CopyCapacity,
    machines: int,
    capacity: Estimate,
) -> dict[str, Any]:
    """How the price comes about, and what tokens cost at the capacity."""
    needed = machines_needed(request, layout, copy) or 1
    fleet = FleetCost(layout, request.purchase, request.availability, needed, machines)
    tokens_per_s = capacity.value * request.workload.output_tokens
    return {
        **fleet.to_json(),
        "usd_per_1m_output_tokens_at_capacity": usd_per_1m_tokens(fleet.usd_per_hour, tokens_per_s),
    }


def _throughput(
    request: RecommendRequest, copy: CopyCapacity, sure: Uncertainty | None, output_per_s: float
) -> Estimate:
    """Output tokens each second; of arrivals that are served exactly what arrives."""
    if request.open_loop:
        return Estimate(output_per_s, output_per_s, output_per_s)
    if sure is not None:
        return sure.factors["throughput_tokens_per_s"].around(output_per_s)
    factors = copy.factors
    return Estimate(output_per_s, output_per_s / factors.steps, output_per_s * factors.shorter)


def _capacity(request: RecommendRequest, copy: CopyCapacity, copies: int) -> Estimate:
    """Requests each second that the fleet carries within the SLOs. The lower end is what a world
    slower by time_factor carries, and what machines are counted with."""
    factor = copy.factors.steps
    if not request.open_loop:
        rate = copies * copy.plan.steady.rate_per_s(copy.concurrency)
        return Estimate(rate, rate / factor, rate * copy.factors.shorter)
    belief = copy.belief(keeps_slos=False)
    predicted = max(copy.central_per_s, copy.rate_per_s / factor)
    predicted = max(belief.kept_per_s, min(predicted, belief.missed_per_s))
    high = max(belief.kept_per_s, min(predicted * copy.factors.shorter, belief.missed_per_s))
    return Estimate(copies * predicted, copies * belief.sure_per_s, copies * high)


def _simulated(
    request: RecommendRequest, copy: CopyCapacity, operating: Operating
) -> Statistics | None:
    if request.open_loop:
        return copy.simulation.at_rate(operating.rate_per_s)
    return copy.simulation.at_concurrency(max(1, round(operating.batch)))


def _statistics(request: RecommendRequest) -> Iterator[tuple[str, str]]:
    """The statistics to show: the usual ones and those that the SLOs name."""
    named = ((slo.metric, slo.statistic) for slo in request.slos)
    yield from dict.fromkeys((*_SHOWN, *named))


def _latency(
    request: RecommendRequest,
    copy: CopyCapacity,
    operating: Operating,
    observed: Statistics | None,
    sure: Uncertainty | None,
    metric: str,
    statistic: str,
) -> Estimate:
    """A latency in ms with its interval.

    sure  of the load; without it, and of gaps between tokens, of which no profile is fitted, the
          closed form says how a latency grows in a slower world
    """
    steady = copy.plan.steady
    factor = copy.factors.of(metric)

    def closed_s(scale: float) -> float:
        """s times the latency at s times the rate, the rate as far as the slots carry it."""
        batch = operating.batch
        if request.open_loop:
            batch = steady.batch_at(operating.rate_per_s * min(scale, copy.factors.steps))
        return scale * steady.latency_s(metric, statistic, batch)

    central_s = closed_s(1.0)
    if not central_s:  # an answer of one token has no gaps
        return Estimate(0.0, 0.0, 0.0)
    value_s = central_s if observed is None else observed.statistic_s(metric, statistic)
    if sure is not None and metric != "itl":
        return sure.factors[metric_of(metric, statistic)].around(value_s).in_ms()
    scales = (1 / factor, factor)
    ends_s = [value_s * closed_s(scale) / central_s for scale in scales]
    if metric == "itl" and request.open_loop and not 1 / factor <= value_s / central_s <= factor:
        # one of them stands beyond the step between gaps with a prompt and gaps without: the
        # closed form's growth is not the simulation's, and either may be right
        ends_s = [end for scale in scales for end in (scale * value_s, closed_s(scale))]
    return Estimate(value_s, min(value_s, *ends_s), max(value_s, *ends_s)).in_ms()


def _outlooks(
    request: RecommendRequest, figures: dict[str, Estimate | None], *, measured: bool
) -> Iterator[SloOutlook]:
    """How each SLO stands; `measured`: a level at this load or above it has kept them all."""
    for slo in request.slos:
        figure = figures[f"{slo.metric}_{slo.statistic}_ms"]
        if measured or figure is None:
            predicted = None if figure is None else figure.value
            confidence = "measured" if measured else "missed"
            yield SloOutlook(str(slo), predicted, slo.limit_ms, confidence)
            continue
        confidence = "missed"
        if figure.high <= slo.limit_ms:
            confidence = "sure"
        elif figure.value <= slo.limit_ms:
            confidence = "likely"
        yield SloOutlook(str(slo), figure.value, slo.limit_ms, confidence)


def _memory(
    request: RecommendRequest, layout: Layout, copy: CopyCapacity, operating: Operating
) -> dict[str, float]:
    """Where a device's memory goes, in GiB, and how many sequences run of those that could."""
    workload = copy.plan.workload
    plan = memory_plan_for(
        Setup(
            workload.shape,
            layout.instance,
            layout.tensor_parallel,
            workload.dtype,
            kv_dtype=workload.kv_dtype,
        ),
        layout.setting.profile(request.profile),
        input_tokens=workload.input_tokens,
        output_tokens=workload.output_tokens,
    )
    return {
        "device_gib": bytes_to_gib(layout.instance.accelerator.memory_bytes),
        "weights_gib": bytes_to_gib(plan.weight_bytes),
        "kv_cache_gib": bytes_to_gib(plan.kv_budget_bytes),
        "sequences_guaranteed": plan.sequences_guaranteed,
        "sequences_expected": plan.sequences_expected,
        "slots_per_copy": copy.plan.steady.slots,
        "mean_batch_per_copy": operating.batch,
    }
