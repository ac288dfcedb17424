"""The cheapest fleet with prefill and decode in separate pools, beside the recommended one.

Each pair of degrees is sized in closed form for a load that is higher by the upper end of the
steps' interval: as many decode workers as keep the limits between tokens, as many prefill workers
as keep those of the first token. What is left of the last machine goes to the busier pool. The
cheapest size is then simulated with the engine's scheduler; one that misses an SLO gets a machine
more and waits for its turn by price. Whether pools are worth that is seen in closed form alone.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from lmi_bench.analysis.fit import uncertainty
from lmi_bench.analysis.fit.forecast import pool_of
from lmi_bench.analysis.fleet.answer import SloOutlook
from lmi_bench.analysis.fleet.candidates import CopyCapacity, Planned, set_up
from lmi_bench.analysis.fleet.money import usd_per_1m_tokens
from lmi_bench.analysis.fleet.operating_point import Latencies
from lmi_bench.analysis.fleet.request import RecommendRequest
from lmi_bench.analysis.level.cells import pools_of
from lmi_bench.analysis.level.steady_state import LATENCY_LOAD_LIMIT, bisect
from lmi_bench.analysis.level.two_pools import PoolPoint, TwoPools, simulate_pools
from lmi_bench.analysis.model.measured_level import MeasuredLevel
from lmi_bench.analysis.model.setup import ROUTED_S, PrefillPool, pools_bytes_per_s
from lmi_bench.core.errors import InputError
from lmi_bench.core.json_value import JsonValue
from lmi_bench.core.load import Load
from lmi_bench.core.units import HOURS_PER_MONTH, MS_PER_S, SECONDS_PER_HOUR
from lmi_bench.core.workload import LevelSpec

_MOST_WORKERS, _HALVINGS = 4, 40  # times those that the rate needs
_WORTH_TELLING = 0.9  # of the price without pools
_SIMULATED_SIZES, _SIMULATED_REQUESTS = 8, 1000


@dataclass(frozen=True, slots=True)
class PoolsFleet(JsonValue):
    """Machines whose devices are a prefill and a decode pool.

    engine               differences of the engine from the question, for display
    capacity_rate_per_s  requests each second with every slot busy, with its interval
    slo_figures          the simulated figure of each SLO in ms
    ttft_p50_ms, itl_p50_ms, e2e_p50_ms  simulated at the load
    """

    instance: str
    instances: int
    prefill_workers: int
    prefill_tensor_parallel: int
    decode_workers: int
    decode_tensor_parallel: int
    engine: str | None
    price_usd_per_hour: float
    estimated: bool
    usd_per_1m_output_tokens: float | None
    capacity_rate_per_s: uncertainty.Estimate
    ttft_p50_ms: uncertainty.Estimate
    itl_p50_ms: uncertainty.Estimate
    e2e_p50_ms: uncertainty.Estimate
    slos: tuple[SloOutlook, ...]
    slo_figures: tuple[uncertainty.Estimate, ...]

    @property
    def text(self) -> str:
        """The fleet in words: machines and workers."""
        engine = f", {self.engine}" if self.engine else ""
        return (
            f"{self.instances} x {self.instance}, {self.prefill_workers} prefill (TP "
            f"{self.prefill_tensor_parallel}) and {self.decode_workers} decode workers (TP "
            f"{self.decode_tensor_parallel}){engine}"
        )


@dataclass(frozen=True, slots=True)
class _Pair:
    """A decode layout and prefill workers of one degree on the same kind of machine.

    one           a request each second on one worker of each; pools: their closed form
    wanted_per_s  rate to size for; decode_per_s: of one decode worker within the limits
    """

    request: RecommendRequest
    planned: Planned
    one: MeasuredLevel
    pools: TwoPools
    wanted_per_s: float
    decode_per_s: float

    @classmethod
    def of(cls, request: RecommendRequest, planned: Planned, degree: int) -> "_Pair | None":
        """None where no number of workers keeps the limits; raises InputError for a model that
        cannot be split so."""
        layout, copy = planned
        assert request.rate_per_s is not None
        one = set_up(layout, copy.plan.workload)
        worker = one.setup.prefill_worker(degree)
        first = PrefillPool(worker, 1, pools_bytes_per_s(layout.instance))
        one = replace(one, prefill=first, load=Load(rate_per_s=1.0))
        pools, slower = pools_of(copy.fit.profile, one), copy.factors.steps
        limit_s = min(_limit_s(request, "itl"), _limit_s(request, "tpot")) / slower
        steady, batch = pools.decode, float(pools.decode.slots)
        if steady.decode_step_s(1) > limit_s:
            return None
        if steady.decode_step_s(batch) > limit_s:
            batch, _ = bisect(lambda b: steady.decode_step_s(b) <= limit_s, 1.0, batch, _HALVINGS)
        decode_per_s = batch / (max(1, steady.output_tokens - 1) * steady.decode_step_s(batch))
        least_per_s = (request.requirements.min_throughput_tokens_per_s or 0.0) / steady.output_tokens
        wanted_per_s = max(request.rate_per_s, least_per_s) * max(slower, 1 / LATENCY_LOAD_LIMIT)
        return cls(request, planned, one, pools, wanted_per_s, decode_per_s)

    def smallest(self, most_usd_per_hour: float = math.inf) -> "_Size | None":
        """The fewest machines that keep the limits in closed form; None above the price."""
        prefill = math.ceil(self.wanted_per_s / self.pools.prompts_per_s)
        decode = max(1, math.ceil(self.wanted_per_s / self.decode_per_s - 1e-9))
        most = _MOST_WORKERS * (prefill + decode)
        factors, output = self.planned[1].factors, self.pools.decode.output_tokens
        first_s = _limit_s(self.request, "ttft") / factors.ttft
        whole_s = _limit_s(self.request, "e2e")
        whole_s = min(whole_s, output * _limit_s(self.request, "latency_per_token")) / factors.steps
        while prefill + decode <= most:
            size = self.on_machines(prefill, decode)
            if size is None or size.usd_per_hour > most_usd_per_hour:
                return None
            point = self._at(prefill, decode)
            if point is None or point.ttft_s > first_s:
                prefill += 1
            elif point.e2e_s(output) <= whole_s:
                return size
            else:  # the worker that saves more time for its devices
                more = self._at(prefill + 1, decode), self._at(prefill, decode + 1)
                saved = (point.e2e_s(output) - each.e2e_s(output) if each else 0.0 for each in more)
                of_prefill, of_decode = (s / n for s, n in zip(saved, self.degrees, strict=True))
                prefill += of_prefill > of_decode
                decode += of_prefill <= of_decode
        return None

    @property
    def degrees(self) -> tuple[int, int]:
        """Devices of a prefill and of a decode worker."""
        assert self.one.prefill is not None
        return self.one.prefill.setup.tensor_parallel, self.one.setup.tensor_parallel

    def _at(self, prefill: int, decode: int) -> PoolPoint | None:
        pools = replace(self.pools, prefill_workers=prefill, decode_workers=decode)
        return pools.at_rate(self.wanted_per_s)

    def on_machines(self, prefill: int, decode: int, more: int = 0) -> "_Size | None":
        """So many workers and those that fill their last machine and `more`; None without a
        price."""
        request, layout = self.request, self.planned[0]
        degree, per_decode = self.degrees
        devices, used = layout.instance.num_accelerators, prefill * degree + decode * per_decode
        machines = request.availability.machines(math.ceil(used / devices) + more)
        if (usd := request.fleet_usd_per_hour(layout, machines)) is None:
            return None
        spare = request.availability.surviving(machines) * devices - used
        while spare >= min(degree, per_decode):
            busier = prefill * self.pools.prompts_per_s <= decode * self.decode_per_s
            if spare >= degree and (busier or spare < per_decode):
                prefill, spare = prefill + 1, spare - degree
            else:
                decode, spare = decode + 1, spare - per_decode
        return _Size(usd, self, prefill, decode, machines)


@dataclass(frozen=True, slots=True)
class _Size:
    """Workers of both pools on whole machines, at a price for an hour."""

    usd_per_hour: float
    pair: _Pair
    prefill_workers: int
    decode_workers: int
    machines: int

    @property
    def cell(self) -> MeasuredLevel:
        """Both pools at the request's rate."""
        one = self.pair.one
        assert one.prefill is not None
        workers, link = self.prefill_workers, self._link_bytes_per_s
        prefill = replace(one.prefill, workers=workers, link_bytes_per_s=link)
        load = Load(rate_per_s=self.pair.request.rate_per_s)
        return replace(one, prefill=prefill, replicas=self.decode_workers, load=load)

    @property
    def key(self) -> tuple[object, ...]:
        """Sizes with equal keys are equally fast."""
        copy_key, degrees = self.pair.planned[0].copy_key, self.pair.degrees
        workers = self.prefill_workers, self.decode_workers
        return copy_key, degrees, *workers, self._link_bytes_per_s

    @property
    def _link_bytes_per_s(self) -> float:
        degree, per_decode = self.pair.degrees
        devices = self.prefill_workers * degree + self.decode_workers * per_decode
        return pools_bytes_per_s(self.pair.one.setup.instance, devices)


def check_pools(request: RecommendRequest) -> None:
    """Raises InputError for a question that pools do not answer."""
    if request.rate_per_s is None:
        raise InputError("--disaggregate sizes both pools for a rate: add --rate")
    if request.workload.traffic is not None or request.workload.cached_tokens:
        raise InputError("--disaggregate plans without a prefix cache: leave one of them out")


def cheaper_pools(request: RecommendRequest, layouts: Sequence[Planned], usd_per_hour: float) -> str | None:
    """The cheapest pools in closed form well below the price of other fleets, in words.

    None: there are none. usd_per_hour is infinite where no other fleet keeps the limits.
    """
    best, budget_usd = None, min(_WORTH_TELLING * usd_per_hour, _budget_usd(request))
    for pair in _pairs(request, layouts):
        if (size := pair.smallest(budget_usd)) is not None:
            best, budget_usd = size, math.nextafter(size.usd_per_hour, 0)
    if best is None:
        return None
    machine, less = best.pair.planned[0].instance, 1 - best.usd_per_hour / usd_per_hour
    price = f"USD {'~' if machine.is_estimated else ''}{best.usd_per_hour:,.2f} per hour"
    price += f", {less:.0%} less than recommended but less certain" if less < 1 else ""
    return f"{best.machines} x {machine.instance_type} may do for {price}: --disaggregate simulates it"


def _budget_usd(request: RecommendRequest) -> float:
    """The most that an hour of the fleet may cost; infinite without a limit."""
    millions_per_hour = (request.rate_per_s or 0.0) * request.workload.output_tokens * SECONDS_PER_HOUR / 1e6
    limits = request.requirements
    return min(
        limits.max_usd_per_hour or math.inf,
        (limits.max_usd_per_month or math.inf) / HOURS_PER_MONTH,
        (limits.max_usd_per_1m_output or math.inf) * millions_per_hour,
    )


def best_pools(request: RecommendRequest, layouts: Sequence[Planned]) -> PoolsFleet | str:
    """The cheapest pools of these layouts within the limits and the budget, or why there are none.
    Raises InputError."""
    check_pools(request)
    budget_usd, pairs = _budget_usd(request), _pairs(request, layouts)
    open_sizes = [size for pair in pairs if (size := pair.smallest()) is not None]
    if not open_sizes:
        return "no machine with a known price carries the load with its devices in two pools"
    tried = set[tuple[object, ...]]()
    while open_sizes and len(tried) < _SIMULATED_SIZES:
        size = min(open_sizes, key=lambda each: each.usd_per_hour)
        if size.usd_per_hour > budget_usd:
            return f"over the budget: two pools cost at least USD {size.usd_per_hour:,.2f} an hour"
        open_sizes.remove(size)
        if size.key not in tried:
            tried.add(size.key)
            found = _simulated(size)
            if all(outlook.confidence != "missed" for outlook in found.slos):
                return found
            larger = size.pair.on_machines(size.prefill_workers, size.decode_workers, more=1)
            open_sizes += [larger] if larger is not None else []
    return f"none of the {len(tried)} cheapest sizes keeps the SLOs as simulated"


def _pairs(request: RecommendRequest, layouts: Sequence[Planned]) -> Iterator[_Pair]:
    """Every pair of degrees on each machine that holds a worker of both."""
    degrees: dict[str, set[int]] = {}
    for layout, _ in layouts:
        degrees.setdefault(layout.instance.instance_type, set()).add(layout.tensor_parallel)
    for planned in layouts:
        setting, instance = planned[0].setting, planned[0].instance
        if setting.pipeline or setting.hosts or setting.copies:
            continue
        for degree in sorted(degrees[instance.instance_type]):
            try:
                pair = _Pair.of(request, planned, degree)
            except InputError:  # the prefill worker cannot be split so
                continue
            if pair is not None:
                yield pair


def _limit_s(request: RecommendRequest, metric: str) -> float:
    """The strictest limit of a metric in seconds; infinite without one."""
    limits = (slo.limit_ms / MS_PER_S for slo in request.slos if slo.metric == metric)
    return min(limits, default=math.inf)


def _simulated(size: _Size) -> PoolsFleet:
    """The fleet with its latencies simulated at the load."""
    request, (layout, copy) = size.pair.request, size.pair.planned
    cell, output = size.cell, copy.plan.workload.output_tokens
    sure = uncertainty.Uncertainty.of(copy.fit, cell, spread=True)
    observed = _observed(request, cell, copy)

    def figure(metric: str, statistic: str) -> uncertainty.Estimate:
        factor = sure.factors[uncertainty.metric_of(metric, statistic)]
        return factor.around(observed.statistic_s(metric, statistic)).in_ms()

    of_slos = tuple(figure(slo.metric, slo.statistic) for slo in request.slos)
    degree, per_decode = size.pair.degrees
    assert request.rate_per_s is not None
    return PoolsFleet(
        instance=layout.instance.instance_type,
        instances=size.machines,
        prefill_workers=size.prefill_workers,
        prefill_tensor_parallel=degree,
        decode_workers=size.decode_workers,
        decode_tensor_parallel=per_decode,
        engine=layout.setting.describe() or None,
        price_usd_per_hour=size.usd_per_hour,
        estimated=layout.instance.is_estimated,
        usd_per_1m_output_tokens=usd_per_1m_tokens(size.usd_per_hour, request.rate_per_s * output),
        capacity_rate_per_s=sure.capacity_tokens_per_s.times(1 / output),
        ttft_p50_ms=figure("ttft", "p50"),
        itl_p50_ms=figure("itl", "p50"),
        e2e_p50_ms=figure("e2e", "p50"),
        slos=tuple(map(SloOutlook.of, request.slos, of_slos)),
        slo_figures=of_slos,
    )


def _observed(request: RecommendRequest, cell: MeasuredLevel, copy: CopyCapacity) -> Latencies:
    """Latencies of a slice of both pools in the same proportion, without the ramp."""
    profile, workload = copy.fit.profile, copy.plan.workload
    assert cell.prefill is not None
    assert cell.rate_per_s is not None
    parts = math.gcd(cell.prefill.workers, cell.replicas)
    longest = workload.most_tokens
    prefill = pool_of(cell.prefill.setup, cell.prefill.workers // parts, profile, longest, prompts_alone=True)
    decode = pool_of(cell.setup, cell.replicas // parts, profile, longest)
    rate_per_s = cell.rate_per_s / parts
    step_s = copy.plan.steady.decode_step_s(1.0)
    ramp = math.ceil(rate_per_s * workload.output_tokens * step_s)
    load = Load(rate_per_s=rate_per_s)
    if workload.burstiness < 1:
        load = replace(load, arrivals="gamma", burstiness=workload.burstiness)
    run = simulate_pools(
        LevelSpec(0, load, num_requests=ramp + _SIMULATED_REQUESTS),
        workload.requests(request.seed),
        prefill,
        decode,
        cell.prefill.transfer_s,
        seed=request.seed,
        overhead_s=max(ROUTED_S, profile.parameters.request_overhead_s),
        links=cell.prefill.setup.devices,
    )
    return Latencies.of(run.records[ramp:], open_loop=True)
