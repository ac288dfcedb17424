"""A fleet from a layout and the capacity of one copy: machines, figures with intervals, cost."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from lmi_bench.analysis.fit import uncertainty
from lmi_bench.analysis.fit.fit import Fit
from lmi_bench.analysis.fleet.answer import Candidate, InputPrices, MemoryUse, SloOutlook
from lmi_bench.analysis.fleet.measured_load import CapacityBelief, Verdict
from lmi_bench.analysis.fleet.money import blended_as_published, fleet_cost, usd_per_1m_tokens
from lmi_bench.analysis.fleet.operating_point import CopySimulation, Latencies, Operating
from lmi_bench.analysis.fleet.request import BETWEEN_TOKENS, RecommendRequest
from lmi_bench.analysis.level.layouts import CopyPlan, EngineKey, Layout, Workload
from lmi_bench.analysis.level.steady_state import LATENCY_LOAD_LIMIT, SteadyState, bisect
from lmi_bench.analysis.model.capacity import memory_plan_for
from lmi_bench.analysis.model.measured_level import MeasuredLevel
from lmi_bench.core.load import Load
from lmi_bench.core.units import HOURS_PER_MONTH, SECONDS_PER_HOUR, bytes_to_gib

_SHOWN = tuple(
    (metric, statistic)
    for metric in ("ttft", "itl", "tpot", "e2e", "latency_per_token")
    for statistic in ("p50", "p90")
)
_HALVINGS = 40
_MORE_TOKENS = 256  # of a prompt, to see what one costs
_BELOW = 0.97  # of a rate that was too high


@dataclass(frozen=True, slots=True)
class CopyCapacity:
    """The capacity of one copy; layouts with equally fast copies share it.

    fit             the profile behind the prediction
    factors         interval of its times: `steps` is the factor s of the capacity's interval
    rate_per_s      highest rate within the limits to plan with (`held_slos`)
    central_per_s   highest rate within the SLOs as predicted
    concurrency     largest number of waiting users within the SLOs; 0 if none
    measured        measured rates of a copy, each with its verdict
    too_much_per_s  rate at which a long simulation missed the SLOs
    simulated       the rates come from simulated levels, not from the closed form
    """

    plan: CopyPlan
    simulation: CopySimulation
    fit: Fit
    factors: uncertainty.TimeFactors
    rate_per_s: float
    central_per_s: float
    concurrency: int
    limited_by: str
    warnings: tuple[str, ...]
    measured: tuple[tuple[float, Verdict], ...] = ()
    too_much_per_s: float = math.inf
    simulated: bool = False

    def belief(self, *, keeps_slos: bool) -> CapacityBelief:
        """The capacity with its uncertainty: the prediction, bounded by measurements.

        keeps_slos  plan for no more than the share of the saturated rate up to which latencies can
                    be predicted
        """
        low = self.rate_per_s / self.factors.steps
        if keeps_slos:
            low = min(low, LATENCY_LOAD_LIMIT * self.plan.steady.saturated_rate_per_s)
        low = min(low, _BELOW * self.too_much_per_s)
        median = max(low, min(self.central_per_s, self.too_much_per_s))
        return CapacityBelief.after(low, median, self.measured)

    @property
    def kept_per_s(self) -> float:
        """The highest measured rate that kept the SLOs; 0 without one."""
        return self.belief(keeps_slos=True).kept_per_s


Planned = tuple[Layout, CopyCapacity]
"""A layout with the capacity of one copy."""


class Fleet(NamedTuple):
    """A layout, the capacity of one copy, and the number of machines with the spare ones."""

    layout: Layout
    copy: CopyCapacity
    machines: int


def with_capacity(layouts: Sequence[Planned], key: EngineKey, capacity: CopyCapacity) -> list[Planned]:
    """The layouts, with another capacity for those with this key."""
    return [(each, capacity if each.engine_key == key else known) for each, known in layouts]


def machines_needed(request: RecommendRequest, layout: Layout, copy: CopyCapacity) -> int | None:
    """Machines for the load with every copy within its limits, without spare ones; None if no
    number is enough."""
    per_copy = copy.belief(keeps_slos=bool(request.slos)).sure_per_s
    if per_copy <= 0:
        return None
    # at least one user waits; arrivals may keep a copy busy for only a part of the time
    if not request.open_loop and copy.concurrency < 1:
        return None
    machines = 1
    if request.rate_per_s is not None:
        machines = math.ceil(request.rate_per_s / (per_copy * layout.copies) - 1e-9)
    elif request.users is not None:
        response_s = copy.plan.steady.latency_s("e2e", "mean", copy.concurrency)
        users = copy.concurrency * (response_s + (request.think_time_s or 0.0)) / response_s
        machines = math.ceil(request.users / (users * layout.copies) - 1e-9)
    least = request.requirements.min_throughput_tokens_per_s
    if least is not None:
        each = layout.copies * per_copy * request.workload.output_tokens
        machines = max(machines, math.ceil(least / each - 1e-9))
    return max(1, machines)  # also for less than a request in years


def operating_of(request: RecommendRequest, fleet: Fleet) -> Operating:
    """The load of one copy after the failure that the spare machines are for."""
    layout, copy, machines = fleet
    steady = copy.plan.steady
    copies = request.availability.surviving(machines) * layout.copies
    if request.open_loop:
        rate = copy.belief(keeps_slos=True).sure_per_s
        if request.rate_per_s is not None:
            rate = request.rate_per_s / copies
        return Operating(rate, steady.batch_at(rate))
    batch = float(copy.concurrency)
    if request.users is not None:
        batch = _waiting(request, copy, request.users / copies)
    return Operating(steady.rate_per_s(batch), batch)


def _waiting(request: RecommendRequest, copy: CopyCapacity, users: float) -> float:
    """Waiting users of a copy: N R / (R + Z), with the response time R at that concurrency."""
    think_s = request.think_time_s or 0.0

    def more_wait(waiting: float) -> bool:
        response_s = copy.plan.steady.latency_s("e2e", "mean", waiting)
        return waiting < users * response_s / (response_s + think_s)

    return max(1.0, bisect(more_wait, 0.0, users, _HALVINGS)[1])


def set_up(layout: Layout, workload: Workload) -> MeasuredLevel:
    """One copy and one of its requests. workload: as the layout's setting serves it."""
    return MeasuredLevel(
        layout.setup(workload),
        input_tokens=workload.input_tokens,
        output_tokens=workload.output_tokens,
        load=Load(1),
        num_requests=1,
        cached_tokens=min(workload.cached_tokens, workload.input_tokens - 1),
    )


def build_candidate(request: RecommendRequest, fleet: Fleet, *, simulate: bool, intervals: bool = True) -> Candidate:
    """The fleet with its figures, latencies after the failure that the spare machines are for.

    simulate   latencies are simulated at the fleet's load
    intervals  of simulated latencies are from the profile's parameters, not in closed form
    """
    layout, copy, machines = fleet
    operating = operating_of(request, fleet)
    asked = Load(rate_per_s=operating.rate_per_s) if request.open_loop else Load(max(1, round(operating.batch)))
    observed = copy.simulation.under(asked) if simulate else None
    load = uncertainty.under_load(set_up(layout, copy.plan.workload), copy.fit.profile, asked)
    reason = uncertainty.why_withheld(copy.fit, load)
    sure = None
    if simulate and intervals and reason is None:
        sure = uncertainty.Uncertainty.of(copy.fit, load, spread=True)
    loaded = _LoadedFleet(request, layout, copy, machines, operating, observed, sure)
    rates = loaded.rates()
    latencies = {
        f"{metric}_{statistic}_ms": loaded.latency(metric, statistic) if reason is None else None
        for metric, statistic in (*_SHOWN, *((slo.metric, slo.statistic) for slo in request.slos))
        if metric not in BETWEEN_TOKENS or copy.plan.steady.output_tokens > 1
    }
    measured = request.open_loop and operating.rate_per_s <= copy.kept_per_s * (1 + 1e-9)
    return Candidate(
        instance=layout.instance.instance_type,
        instances=machines,
        tensor_parallel=layout.tensor_parallel,
        copies=layout.copies,
        accelerator=layout.instance.accelerator.name,
        **loaded.prices(),
        figures=rates | latencies,
        withheld=dict.fromkeys(latencies, reason) if reason else {},
        slos=tuple(
            SloOutlook.of(slo, latencies.get(f"{slo.metric}_{slo.statistic}_ms"), measured=measured)
            for slo in request.slos
        ),
        memory=loaded.memory(),
        limited_by=copy.limited_by,
        basis="simulated" if observed is not None else "closed form",
        price_provenance=layout.instance.price_provenance,
        profile_provenance=request.profile.provenance,
        warnings=copy.warnings,
        setting=layout.setting,
        attainment=None,
        cost=fleet_cost(
            layout,
            request.purchase,
            request.availability,
            needed=machines_needed(request, layout, copy) or 1,
            machines=machines,
            capacity_tokens_per_s=rates["capacity_tokens_per_s"].value,
        ),
    )


@dataclass(frozen=True, slots=True)
class _LoadedFleet:
    """A fleet under the request's load.

    observed  simulated latencies, if any
    sure      uncertainty at this load; without it the closed form gives the intervals
    """

    request: RecommendRequest
    layout: Layout
    copy: CopyCapacity
    machines: int
    operating: Operating
    observed: Latencies | None
    sure: uncertainty.Uncertainty | None

    @property
    def _served_per_s(self) -> float:
        serving = self.request.availability.surviving(self.machines)
        return serving * self.layout.copies * self.operating.rate_per_s

    def prices(self) -> dict[str, Any]:
        """USD of the fleet and of its tokens, at the load and with every slot busy."""
        request, layout, steady = self.request, self.layout, self.copy.plan.steady
        price = request.fleet_usd_per_hour(layout, self.machines)
        output, total = request.workload.output_tokens, request.workload.total_tokens
        full_per_s = self.machines * layout.copies * steady.saturated_rate_per_s
        served_per_s = self._served_per_s
        blended, blended_reason = blended_as_published(
            price_usd_per_hour=layout.instance.price_usd_per_hour,
            concurrency=layout.copies * max(1.0, self.operating.batch),
            itl_p50_s=steady.latency_s("itl", "p50", self.operating.batch),
            input_tokens=request.workload.input_tokens,
            output_tokens=output,
            slots=layout.copies * steady.slots,
            ratio=request.blended_ratio,
            discount=request.discount,
        )
        return {
            "price_usd_per_hour": price,
            "usd_per_month": None if price is None else price * HOURS_PER_MONTH,
            "usd_per_1m_output_tokens": usd_per_1m_tokens(price, served_per_s * output),
            "usd_per_1m_total_tokens": usd_per_1m_tokens(price, served_per_s * total),
            "usd_per_1m_output_tokens_at_saturation": usd_per_1m_tokens(price, full_per_s * output),
            "usd_per_1m_total_tokens_at_saturation": usd_per_1m_tokens(price, full_per_s * total),
            "usd_per_1m_input_tokens": self._input_prices(price),
            "blended_3to1_as_published": blended,
            "blended_reason": blended_reason,
        }

    def _input_prices(self, price_usd_per_hour: float | None) -> InputPrices | None:
        """The price of prompt tokens by the seconds that one more takes; None without a cache."""
        steady, copies = self.copy.plan.steady, self.machines * self.layout.copies
        if price_usd_per_hour is None or not self.copy.plan.config.prefix_caching:
            return None
        step, more = steady.decode_shape(steady.slots), _MORE_TOKENS
        longer = replace(step, decode_context_tokens=step.decode_context_tokens + more)
        read_s = steady.model.step_time_s(longer) - steady.model.step_time_s(step)
        read_s *= steady.output_tokens

        def price_of(longer: SteadyState) -> float:
            seconds = longer.prompt_step_s - steady.prompt_step_s + read_s
            return price_usd_per_hour / SECONDS_PER_HOUR / copies * seconds / more * 1e6

        computed = replace(steady, input_tokens=steady.input_tokens + more)
        return InputPrices(
            computed=price_of(computed),
            cached=price_of(replace(computed, cached_tokens=steady.cached_tokens + more)),
            cached_share=steady.cached_tokens / steady.input_tokens,
        )

    def rates(self) -> dict[str, uncertainty.Estimate]:
        """Throughput at the load and capacity of the fleet; an open loop serves its arrivals."""
        capacity, output_tokens = self._capacity(), self.request.workload.output_tokens
        served = self._served_per_s * output_tokens
        throughput = self.copy.factors.around(served)
        if self.request.open_loop:
            throughput = uncertainty.Estimate(served, served, served)
        elif self.sure is not None:
            throughput = self.sure.factors["throughput_tokens_per_s"].around(served)
        return {
            "throughput_tokens_per_s": throughput,
            "capacity_rate_per_s": capacity,
            "capacity_tokens_per_s": capacity.times(output_tokens),
        }

    def _capacity(self) -> uncertainty.Estimate:
        """Requests each second of the fleet within the SLOs; machines are counted with its lower
        end, the capacity if all times are longer by the factor `steps`."""
        copy, copies = self.copy, self.machines * self.layout.copies
        factor = copy.factors.steps
        if not self.request.open_loop:
            return copy.factors.around(copies * copy.plan.steady.rate_per_s(copy.concurrency))
        belief = copy.belief(keeps_slos=False)
        predicted = max(copy.central_per_s, copy.rate_per_s / factor)
        predicted = max(belief.kept_per_s, min(predicted, belief.missed_per_s))
        high = max(belief.kept_per_s, min(predicted * copy.factors.shorter, belief.missed_per_s))
        return uncertainty.Estimate(copies * predicted, copies * belief.sure_per_s, copies * high)

    def latency(self, metric: str, statistic: str) -> uncertainty.Estimate:
        """A latency in ms with its interval.

        No profile is fitted to gaps between tokens: their interval, like all without `sure`, is
        the closed form's growth with slower steps.
        """
        steady, factors = self.copy.plan.steady, self.copy.factors
        open_loop, factor = self.request.open_loop, factors.of(metric)

        def closed_s(scale: float) -> float:
            """s times the latency at s times the rate, at most the rate that the slots carry."""
            batch = self.operating.batch
            if open_loop:
                batch = steady.batch_at(self.operating.rate_per_s * min(scale, factors.steps))
            return scale * steady.latency_s(metric, statistic, batch)

        central_s = closed_s(1.0)
        observed = self.observed
        value_s = central_s if observed is None else observed.statistic_s(metric, statistic)
        if self.sure is not None and metric != "itl":
            return self.sure.factors[uncertainty.metric_of(metric, statistic)].around(value_s).in_ms()
        scales = (1 / factor, factor)
        ends_s = [value_s * closed_s(scale) / central_s for scale in scales]
        if metric == "itl" and open_loop and not 1 / factor <= value_s / central_s <= factor:
            # one of them counts a gap with a prompt, the other without: either may be right
            ends_s = [end for scale in scales for end in (scale * value_s, closed_s(scale))]
        return uncertainty.Estimate(value_s, min(value_s, *ends_s), max(value_s, *ends_s)).in_ms()

    def memory(self) -> MemoryUse:
        """Use of a device's memory, and sequences of a copy."""
        layout, workload = self.layout, self.copy.plan.workload
        plan = memory_plan_for(
            layout.setup(workload),
            layout.setting.profile(self.request.profile),
            input_tokens=workload.input_tokens,
            output_tokens=workload.output_tokens,
        )
        return MemoryUse(
            device_gib=bytes_to_gib(layout.instance.accelerator.memory_bytes),
            weights_gib=bytes_to_gib(plan.weight_bytes),
            kv_cache_gib=bytes_to_gib(plan.kv_budget_bytes),
            sequences_guaranteed=plan.sequences_guaranteed,
            sequences_expected=plan.sequences_expected,
            slots_per_copy=self.copy.plan.steady.slots,
            mean_batch_per_copy=self.operating.batch,
        )
