"""The uncertainty of a prediction: the 80 % interval of each figure of a load, and withheld ones.

All commands take their intervals here. The variance of a figure's logarithm is

    var = J S J' + s**2 * (error not corrected by measured neighbours + noise) + set-up + transfer

with S the posterior of the parameters and J the derivatives of the figure by them. Set-ups of the
same names differ, and so do models and devices that no cell has (transfer).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Final

from lmi_bench.analysis.fit.discrepancy import ERRORS, observe
from lmi_bench.analysis.fit.fit import SCHEDULER_BATCHES, Fit, derivatives, fit_of_profile
from lmi_bench.analysis.level import cells
from lmi_bench.analysis.level.steady_state import LATENCY_LOAD_LIMIT
from lmi_bench.analysis.model.builtin_profiles import FEW_BITS, has_few
from lmi_bench.analysis.model.measured_level import LENGTH_SPREAD, MEASURED, MeasuredLevel, Metric
from lmi_bench.analysis.model.memory import weight_format
from lmi_bench.analysis.model.profiles import EngineProfile
from lmi_bench.core.json_value import JsonValue, key_of
from lmi_bench.core.load import Load
from lmi_bench.core.units import MS_PER_S, s_to_ms
from lmi_bench.engine.scheduling.config import KvLayout

FIGURE_METRICS: Final[dict[str, Metric]] = {
    "throughput_tokens_per_s": "throughput_tokens_per_s",
    "latency_ms_per_token": "latency_mean_s_per_token",
    "latency_p90_ms_per_token": "latency_p90_s_per_token",
    "tpot_ms": "tpot_mean_s",
    "ttft_ms": "ttft_mean_s",
}
"""The figure under each key of a result."""

Z80: Final = 1.2816
"""Half of an 80 % interval, in standard deviations."""

_CACHE_ERROR = 0.10  # error of a step with a full paged cache: sequences wait and restart
_CACHE_ERROR_OF: dict[Metric, float] = {"tpot_mean_s": 2.0}
_SETTING_ERROR = 0.25
_NEAR_LIMIT = 0.5  # share of the allowed sequences that run on average
_UNSEEN_DEVICE, _UNSEEN_MODEL = 0.10, 0.07
_SHARED_HOST = 0.075  # for each doubling of the copies on a host, slower only: what they share
# beside its processor time, such as a router, is in no step; two copies have given 1.5 to 1.8 times
# one (vllm-metal#451), eight behind one server 4 times (vllm#30084), separate servers near the sum
_UNKNOWN_SHAPE = 0.25  # an architecture that is planned by its sizes
_UNSEEN_KIND = 0.12  # mixtures of experts, latent caches, parallel branches, weights of few bits
_ROUNDING = 1e-9  # a load planned at the limit does not exceed it
_LASTING_REQUESTS = 1 << 20  # requests of one copy: more than fit any cache
_REQUESTS_PER_USER = 10
_OPEN_LOOP_S = 120.0
_MOST_REQUESTS, _LEAST_REQUESTS = 2000, 200
_COPY = attrgetter(  # what copies of one capacity have in common
    "setup.shape.name", "setup.instance.accelerator.name", "setup.tensor_parallel", "setup.dtype"
)
_BRIEF_REQUESTS = 500  # interval widths within 3 % of those by 2,000


@dataclass(frozen=True, slots=True)
class Estimate(JsonValue):
    """A predicted figure with its 80 % interval, in the unit of its metric."""

    value: float = field(metadata=key_of("predicted"))
    low: float
    high: float

    def times(self, factor: float) -> "Estimate":
        """The figure in another unit."""
        return Estimate(self.value * factor, self.low * factor, self.high * factor)

    def in_ms(self) -> "Estimate":
        """A time in seconds as milliseconds."""
        return self.times(MS_PER_S)


@dataclass(frozen=True, slots=True)
class Factor:
    """The correction of a predicted figure and its uncertainty.

    centre    correction by measured neighbours, 1 without any
    down, up  the 80 % interval reaches from centre / down to centre * up
    """

    centre: float
    down: float
    up: float

    def around(self, predicted: float) -> Estimate:
        """The figure with its interval."""
        value = predicted * self.centre
        return Estimate(value, value / self.down, value * self.up)


@dataclass(frozen=True, slots=True)
class Uncertainty:
    """The uncertainty of one load's figures, its capacity, and whether latencies are withheld.

    capacity_tokens_per_s   output tokens each second with every slot busy
    load_share              offered load of an open loop over the capacity
    withheld                why latencies are withheld; None where they are not
    """

    factors: Mapping[Metric, Factor]
    capacity_tokens_per_s: Estimate
    load_share: float | None
    withheld: str | None

    @classmethod
    def of(cls, profile: EngineProfile | Fit, cell: MeasuredLevel, *, spread: bool = False) -> "Uncertainty":
        """The uncertainty of a profile's or a fit's figures at a cell: model, machine and load.

        spread  whether the users of a closed loop are known to start and stay out of step

        Raises InputError where the cell cannot run.
        """
        fit = profile if isinstance(profile, Fit) else fit_of_profile(profile, [cell])
        lasting = _lasting(cell)
        factors = _factors(fit, cell, MEASURED, spread=spread)
        value, step = cells.capacity_tokens_per_s(fit.profile, lasting), _busy_step(fit, lasting)
        return cls(
            factors=factors,
            capacity_tokens_per_s=Estimate(value, value / step.up, value * step.down),
            load_share=None if cell.rate_per_s is None else load_share(fit, lasting),
            withheld=why_withheld(fit, cell),
        )

    def around(self, metric: Metric, predicted: float) -> Estimate | None:
        """A figure in its own unit; None for latencies that are withheld. A stable open loop serves
        exactly what arrives."""
        if metric != "throughput_tokens_per_s":
            return None if self.withheld else self.factors[metric].around(predicted)
        if self.load_share is not None and self.withheld is None:
            return Estimate(predicted, predicted, predicted)
        return self.factors[metric].around(predicted)


def shown_value(metric: Metric, value: float) -> float:
    """A figure in the unit of its key: times in milliseconds."""
    return value if metric == "throughput_tokens_per_s" else s_to_ms(value)


def metric_of(metric: str, statistic: str) -> Metric:
    """The figure of a load whose uncertainty this statistic of a metric has."""
    if metric == "throughput":
        return "throughput_tokens_per_s"
    if metric == "ttft":
        return "ttft_mean_s"
    if metric in ("itl", "tpot"):
        return "tpot_mean_s"
    typical = statistic in ("mean", "p50")
    return "latency_mean_s_per_token" if typical else "latency_p90_s_per_token"


def why_withheld(fit: Fit, cell: MeasuredLevel) -> str | None:
    """Why an open loop's latencies are withheld; None where they are not.

    They are if the load may exceed the capacity, unless that copy was calibrated on at such a load.
    """
    if cell.rate_per_s is None:
        return None
    share = load_share(fit, _lasting(cell))
    if share <= LATENCY_LOAD_LIMIT + _ROUNDING:
        return None
    least = 1 / _busy_step(fit, _lasting(cell)).up
    if share <= max(LATENCY_LOAD_LIMIT, least) + _ROUNDING or any(
        known.rate_per_s is not None and _COPY(known) == _COPY(cell) and load_share(fit, known) > LATENCY_LOAD_LIMIT
        for known in fit.cells
    ):
        return None
    return (
        f"the load is {share:.0%} of the predicted capacity and may exceed it: "
        "a small capacity error is a large latency error"
    )


def _lasting(cell: MeasuredLevel) -> MeasuredLevel:
    """The load with enough requests to be steady, for capacity and latency limits."""
    most = max(cell.num_requests, _LASTING_REQUESTS * cell.replicas)
    return replace(cell, num_requests=most)


def under_load(cell: MeasuredLevel, profile: EngineProfile, load: Load) -> MeasuredLevel:
    """The cell's set-up under a load, with as many requests as predictions take."""
    if load.rate_per_s is None:
        requests = (1 + _REQUESTS_PER_USER) * (load.concurrency or 0)
    else:
        requests = math.ceil(load.rate_per_s * _OPEN_LOOP_S)
        requests = min(_MOST_REQUESTS, max(_LEAST_REQUESTS, requests))
    spread = LENGTH_SPREAD if profile.chunked_prefill else 0.0
    cell = replace(cell, load=load, num_requests=requests, length_spread=spread)
    return replace(cell, start_left_out=load.rate_per_s is None)


def estimates(fit: Fit, cell: MeasuredLevel, metrics: Sequence[Metric]) -> dict[Metric, Estimate]:
    """The cell's figures with intervals. Raises CapacityError where it does not fit."""
    predicted = cells.predict_cell(fit.profile, cell)
    factors = _factors(fit, cell, metrics)
    return {metric: factors[metric].around(predicted.value(metric)) for metric in metrics}


def _factors(fit: Fit, cell: MeasuredLevel, metrics: Sequence[Metric], *, spread: bool = False) -> dict[Metric, Factor]:
    profile, predicted = fit.profile, cells.predict_cell(fit.profile, cell)
    brief = _brief(cell, predicted)
    jacobian = derivatives(profile, brief, fit.names, metrics)
    growth = None if cell.rate_per_s is None else cells.growth_with_step_times(profile, brief)
    tokens_per_s = predicted.throughput_tokens_per_s
    queued = cells.waits_for_slots(profile, cell)
    wanted = [observe(cell, metric, tokens_per_s, growth, queued=queued) for metric in metrics]
    shift, left = fit.corrected(wanted, jacobian)
    full = cell.rate_per_s is None and profile.kv_layout is KvLayout.PAGED
    full = full and cell.concurrency > cell.replicas * cells.slots_for(profile, cell)
    # near a limit on sequences that was found on a coarse grid
    guessed = cell.rate_per_s is not None and profile.max_batch_size in SCHEDULER_BATCHES[:-1]
    guessed &= cells.mean_batch(cell, predicted) > _NEAR_LIMIT * profile.max_batch_size
    transfer = transfer_sd(fit, cell)
    beyond = octaves_beyond(fit, cell)
    errors = ERRORS.get()
    unmeasured = [(0.0, 0.0)] * len(metrics)
    # a prior has no device, and a shipped profile marks: this one is not of the user's levels
    blind = not fit.cells and bool(profile.fitted_cells or not profile.accelerators)
    if blind:
        unmeasured = _unmeasured_sd(profile, cell, predicted, metrics, spread=spread)
    ends = [(0.0, 0.0)] * len(metrics)
    if growth is not None:
        step = _busy_step(fit, brief)
        if load_share(fit, _lasting(cell)) > min(LATENCY_LOAD_LIMIT, 1 / step.up):
            ends = _near_capacity(fit, brief, metrics, step)
    scales = fit.scales.of(wanted)
    factors = {}
    for index, item in enumerate(wanted):
        variance = max(0.0, float(left[index])) + float(scales[index] * item.noise_sd) ** 2
        far = beyond * (errors.ttft_beyond_sd if item.is_ttft else errors.beyond_sd)
        by_load = errors.growth_at(cell, ttft=item.is_ttft)
        variance = by_load**2 * (variance + far**2) + transfer**2
        if guessed and item.metric in ("throughput_tokens_per_s", "ttft_mean_s"):
            variance += _SETTING_ERROR**2
        if full:
            variance += (_CACHE_ERROR * _CACHE_ERROR_OF.get(item.metric, 1.0)) ** 2
        reach = Z80 * errors.widened(item.metric, blind=blind)
        shared = _SHARED_HOST * math.log2(cell.setup.host_copies)
        slower = (shared, 0.0) if item.metric == "throughput_tokens_per_s" else (0.0, shared)
        sides = zip(unmeasured[index], slower, ends[index], strict=True)
        down, up = (
            math.exp(max(reach * math.sqrt(max(0.0, variance + sd**2 + more**2)), end)) for sd, more, end in sides
        )
        factors[item.metric] = Factor(math.exp(float(shift[index])), down, up)
    return factors


def _brief(cell: MeasuredLevel, predicted: cells.CellPrediction) -> MeasuredLevel:
    """The cell with fewer drawn arrivals: derivatives, one simulation each, need no more."""
    if cell.rate_per_s is None or cell.arrivals_s:
        return cell
    enough = cell.replicas * max(_BRIEF_REQUESTS, math.ceil(3 * cells.mean_batch(cell, predicted)))
    return replace(cell, num_requests=min(cell.num_requests, enough))


def transfer_sd(fit: Fit, cell: MeasuredLevel) -> float:
    """The additional uncertainty for a model, device or kind that no cell has, or any engine."""
    setups = [known.setup for known in fit.cells]
    devices = {setup.instance.accelerator.name for setup in setups} or {*fit.profile.accelerators}
    models = {setup.shape.name for setup in setups} or {*fit.profile.models}
    kinds = {_kind(known) for known in fit.cells} or {(*_kind(cell)[:-1], has_few(fit.profile))}
    return math.hypot(
        _UNSEEN_DEVICE * (cell.setup.instance.accelerator.name not in devices),
        _UNSEEN_MODEL * (cell.setup.shape.name not in models),
        _UNSEEN_KIND * (_kind(cell) not in kinds),
        _UNKNOWN_SHAPE * bool(cell.setup.shape.doubt),
        ERRORS.get().engine_sd * (not fit.cells and not fit.profile.engine_named),
    )


def octaves_beyond(fit: Fit, cell: MeasuredLevel) -> float:
    """Doublings of prompt, answer and users of a copy beyond those that were fitted."""
    known = [level.extent for level in fit.cells] or fit.profile.fitted_lengths
    squares = 0.0
    for place, own in enumerate(cell.extent):
        of = [each[place] for each in known if len(each) > place]
        if of:
            squares += math.log2(max(1.0, own / max(of), min(of) / own)) ** 2
    return math.sqrt(squares)


def _kind(cell: MeasuredLevel) -> tuple[bool, ...]:
    """Whether it is a mixture, has a latent cache or parallel branches, or few bits a weight."""
    shape, fmt = cell.setup.shape, weight_format(cell.setup.dtype)
    latent = bool(shape.latent_kv_dim)
    return shape.is_moe, latent, shape.parallel_branches, fmt.nominal_bits < FEW_BITS


def _unmeasured_sd(
    profile: EngineProfile,
    cell: MeasuredLevel,
    predicted: cells.CellPrediction,
    metrics: Sequence[Metric],
    *,
    spread: bool,
) -> list[tuple[float, float]]:
    """Standard deviations of each figure's logarithm that an unmeasured set-up adds: below, above.

    It is not known whether the users of a closed loop are in lock-step, so the interval reaches to
    the figure of the other case, unless `spread` says it.
    """
    other = predicted
    if not spread and cell.rate_per_s is None and cell.concurrency > cell.replicas:
        lengths = 0.0 if cell.length_spread else LENGTH_SPREAD
        other = cells.predict_cell(profile, replace(cell, length_spread=lengths))
    found = []
    known = ERRORS.get()
    for metric in metrics:
        reach = math.log(other.value(metric) / predicted.value(metric)) / Z80
        setup = known.ttft_setup_sd if metric == "ttft_mean_s" else known.setup_sd
        found.append((math.hypot(setup, min(reach, 0.0)), math.hypot(setup, max(reach, 0.0))))
    return found


def _near_capacity(fit: Fit, cell: MeasuredLevel, metrics: Sequence[Metric], step: Factor) -> list[tuple[float, float]]:
    """How far each figure's logarithm reaches down and up if all steps are as fast or slow as the
    interval of a busy step says: a queue grows faster than any derivative tells."""
    base = cells.predict_cell(fit.profile, cell)
    others = [cells.predict_cell(fit.profile, cell, slower=s) for s in (1 / step.down, step.up)]
    found = []
    for metric in metrics:
        moved = [math.log(other.value(metric) / base.value(metric)) for other in others]
        found.append((max(0.0, -min(moved)), max(0.0, *moved)))
    return found


def _busy_step(fit: Fit, cell: MeasuredLevel) -> Factor:
    """The factor of the time per token with every slot busy; the capacity has its interval."""
    users = cells.slots_for(fit.profile, cell) * cell.replicas
    return _closed_loop(fit, cell, users, "tpot_mean_s")


def _closed_loop(fit: Fit, cell: MeasuredLevel, users: int, metric: Metric) -> Factor:
    """The factor of one figure with users that send one request each."""
    level = replace(cell, load=Load(users), arrivals_s=(), num_requests=users)
    return _factors(fit, level, [metric])[metric]


def load_share(fit: Fit, cell: MeasuredLevel) -> float:
    """Offered output tokens over the predicted capacity of an open loop."""
    assert cell.rate_per_s is not None
    return cell.rate_per_s * cell.output_tokens / cells.capacity_tokens_per_s(fit.profile, cell)


@dataclass(frozen=True, slots=True)
class TimeFactors:
    """How much longer the times of one copy may be than predicted: upper ends of 80 % intervals.

    steps    factor of every step with every slot busy; shorter: how much shorter steps may be
    ttft     factor of a single request's time to first token, the least certain part of the model
    """

    steps: float
    shorter: float
    ttft: float

    def of(self, metric: str) -> float:
        """The factor of a latency metric."""
        return self.ttft if metric == "ttft" else self.steps

    def around(self, rate: float) -> Estimate:
        """A rate with its interval."""
        return Estimate(rate, rate / self.steps, rate * self.shorter)

    @classmethod
    def at(cls, fit: Fit, cell: MeasuredLevel) -> "TimeFactors":
        """The factors of a cell's copy. Raises InputError where it cannot run."""
        step = _busy_step(fit, cell)
        ttft = _closed_loop(fit, cell, 1, "ttft_mean_s")
        steps = max(1.0, step.centre * step.up)
        shorter = max(1.0, step.down / step.centre)
        return cls(steps, shorter, max(steps, ttft.centre * ttft.up))
