"""Predicts a level of equal requests (a cell), a closed loop of users or an open one."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from lmi_bench.analysis.level.fast import CopyLimits, trace_closed_loop
from lmi_bench.analysis.level.layouts import slots_of
from lmi_bench.analysis.level.queueing import follow
from lmi_bench.analysis.level.steady_state import SteadyState
from lmi_bench.analysis.level.two_pools import TwoPools
from lmi_bench.analysis.model import capacity
from lmi_bench.analysis.model.measured_level import MEASURED, MeasuredLevel, Metric
from lmi_bench.analysis.model.profiles import EngineProfile, ProfileKey, as_set
from lmi_bench.analysis.model.setup import ROUTED_S, Setup
from lmi_bench.analysis.model.speculation import PricedSteps
from lmi_bench.analysis.results.quantiles import counted_quantile
from lmi_bench.core.errors import InputError
from lmi_bench.engine.scheduling.config import SchedulerConfig

_NEARLY = 0.9  # the number of slots is known to about 10 %
_SEED = 20
_SLOWER_STEP = 0.05  # small against the model's error, large against a simulation's jumps


@dataclass(frozen=True, slots=True)
class CellPrediction:
    """The predicted figures of the whole cell; of a cell of medians TTFT and TPOT are medians.

    tpot_mean_s  of answers of one token, which have none: the step that a later one would take
    """

    throughput_tokens_per_s: float
    latency_p90_s_per_token: float
    latency_mean_s_per_token: float
    ttft_mean_s: float
    tpot_mean_s: float
    peak_sequences: int

    def value(self, metric: Metric) -> float:
        """One figure."""
        return float(getattr(self, metric))


def profile_of(profile: EngineProfile, cell: MeasuredLevel) -> EngineProfile:
    """The profile with its scheduler settings for the cell's model and machine."""
    setup = cell.setup
    if profile.defaults:
        cache_tokens = _cache_tokens(setup, _memory_of(profile))
        profile = as_set(profile, setup.shape, setup.instance.accelerator, cache_tokens)
    return capacity.in_groups(profile, setup.parallelism, prompts_alone=cell.output_tokens == 1)


def slots_for(profile: EngineProfile, cell: MeasuredLevel) -> int:
    """Sequences that one copy lets run together. Raises CapacityError where none fits."""
    if cell.max_sequences is not None:
        return cell.max_sequences
    return _slots(cell.setup, cell.input_tokens, cell.output_tokens, _memory_of(profile))


def _memory_of(profile: EngineProfile) -> ProfileKey:
    """Equal for all profiles with the same number of slots."""
    memory: tuple[object, ...] = (
        *(profile.memory_share, profile.reserve_bytes, profile.kv_layout),
        *(profile.reserves_activations, profile.cache_tokens, profile.reserve_bytes_per_token),
    )
    limits = (profile.max_batch_size, profile.block_size, profile.defaults)
    return ProfileKey((*memory, *limits, profile.max_prefill_tokens), profile)


@lru_cache(maxsize=4096)
def _cache_tokens(setup: Setup, memory: ProfileKey) -> float:
    """Tokens that the cache of one copy holds; 0 where the weights do not fit."""
    plan = capacity.memory_plan_for(setup, memory.profile, input_tokens=1, output_tokens=1)
    return max(0.0, plan.kv_budget_bytes) / capacity.kv_bytes_of(setup, setup.shape.max_positions)


@lru_cache(maxsize=4096)
def _slots(setup: Setup, input_tokens: int, output_tokens: int, memory: ProfileKey) -> int:
    config = capacity.scheduler_config_for(setup, memory.profile, input_tokens + output_tokens)
    return slots_of(config, input_tokens, output_tokens)


def predict_cell(
    profile: EngineProfile, cell: MeasuredLevel, *, smooth: bool = False, slower: float = 1.0
) -> CellPrediction:
    """The profile's prediction of the cell, with its users spread evenly over the copies.

    smooth  take the steps of a closed loop from equal requests: the figures are then smooth in the
            parameters, and throughput and time per token nearly the same
    slower  factor on the time of each step of an open loop
    """
    if cell.prefill is not None:
        return _pooled(profile, cell, slower)
    model = capacity.planned_model_for(cell.setup, profile)
    profile = profile_of(profile, cell)
    slots = slots_for(profile, cell)
    if cell.rate_per_s is not None:
        parts = [_open_loop(profile, cell, model, slower)]
    else:
        parts = _closed_loops(profile, cell, model, slots, smooth=smooth)
    columns = [(part.count, part.e2e_s, part.ttft_s, part.tokens) for part in parts]
    weights, e2e_s, ttft_s, tokens = map(np.concatenate, zip(*columns, strict=True))
    throughput = float(weights.sum()) * cell.output_tokens / max(part.wall_s for part in parts)
    if cell.start_left_out and cell.num_requests >= 2 * cell.concurrency:
        counted = ~np.concatenate([part.at_start for part in parts])
        weights, e2e_s, ttft_s = weights[counted], e2e_s[counted], ttft_s[counted]
        tokens = tokens[counted]
    mean_e2e_s = float(np.average(e2e_s, weights=weights))
    if (cell.poll_steps or cell.gather_steps) and cell.concurrency > cell.replicas:
        mean_tpot_s = (mean_e2e_s - np.average(ttft_s, weights=weights)) / cell.output_tokens
        wait_s = _wait_to_join_s(cell, float(mean_tpot_s), mean_e2e_s)
        e2e_s, ttft_s = e2e_s + wait_s, ttft_s + wait_s
        throughput *= mean_e2e_s / (mean_e2e_s + wait_s)
        mean_e2e_s += wait_s
    shown_ttft_s = float(np.average(ttft_s, weights=weights))
    if cell.medians:
        shown_ttft_s = counted_quantile(ttft_s, weights, 0.5)
    if cell.output_tokens == 1:
        users = cell.concurrency if cell.rate_per_s is None else 1
        tpot_s = _steady(model, cell).decode_step_s(min(slots, users // cell.replicas))
    elif cell.medians:
        tpot_s = counted_quantile((e2e_s - ttft_s) / np.maximum(1, tokens - 1), weights, 0.5)
    else:
        tpot_s = (mean_e2e_s - shown_ttft_s) / (cell.output_tokens - 1)
    if cell.throughput_by_latency and cell.rate_per_s is None:
        throughput = cell.concurrency * cell.output_tokens / mean_e2e_s
    return CellPrediction(
        throughput_tokens_per_s=throughput,
        latency_p90_s_per_token=counted_quantile(e2e_s, weights, 0.9) / cell.output_tokens,
        latency_mean_s_per_token=mean_e2e_s / cell.output_tokens,
        ttft_mean_s=shown_ttft_s,
        tpot_mean_s=tpot_s,
        peak_sequences=slots,
    )


def _wait_to_join_s(cell: MeasuredLevel, tpot_s: float, e2e_s: float) -> float:
    """Mean wait of a prompt for a busy engine's next look, or for the prompts that it gathers.

    Of those that come in the time t since the first, which waits as long, the others wait t / 2.
    """
    users, drafts = cell.concurrency / cell.replicas, cell.setup.speculation
    step_s = tpot_s * (1.0 if drafts is None else drafts.tokens_per_step)
    rate = users / e2e_s
    gathered_s = min(cell.gather_steps * step_s, (cell.gather_prompts - 1) / rate)
    more = rate * gathered_s
    looks_s = (1 - 1 / users) * cell.poll_steps / 2 * step_s  # an idle engine looks at once
    return looks_s + gathered_s * (1 + more / 2) / (1 + more)


def _closed_loops(
    profile: EngineProfile, cell: MeasuredLevel, model: PricedSteps, slots: int, *, smooth: bool
) -> list["_Answers"]:
    """The requests of each copy with its share of the users."""
    limits = CopyLimits(
        cell.input_tokens,
        cell.output_tokens,
        slots,
        profile.max_prefill_tokens,
        profile.chunked_prefill,
        cell.cached_tokens,
        0 if profile.chunked_prefill else profile.max_waiting_tokens,
        profile.waiting_served_ratio,
    )
    overhead_s = profile.parameters.request_overhead_s
    parts = []
    each, more = divmod(cell.concurrency, cell.replicas)
    for index in range(min(cell.replicas, cell.concurrency)):
        users = each + (index < more)  # as even as whole users allow
        requests = max(1, round(cell.num_requests * users / cell.concurrency))
        if cell.length_spread and not smooth:
            parts.append(_followed(profile, cell, model, users, requests))
        else:
            parts.append(_traced(model, limits, overhead_s, users, requests))
    return parts


def pools_of(profile: EngineProfile, cell: MeasuredLevel) -> TwoPools:
    """The two pools of a cell that has them."""
    pool = cell.prefill
    assert pool is not None
    prompts = replace(cell, setup=pool.setup, prefill=None, output_tokens=1)
    worker = profile_of(profile, prompts)
    return TwoPools(
        _steady(capacity.planned_model_for(prompts.setup, profile), prompts, slots_for(profile, prompts)),
        _steady(capacity.planned_model_for(cell.setup, profile), cell, slots_for(profile, cell)),
        prefill_workers=pool.workers,
        decode_workers=cell.replicas,
        step_tokens=worker.max_prefill_tokens,
        transfer_s=pool.transfer_s(cell.input_tokens),
        overhead_s=max(ROUTED_S, profile.parameters.request_overhead_s),
        links=pool.setup.devices,
    )


def _pooled(profile: EngineProfile, cell: MeasuredLevel, slower: float) -> CellPrediction:
    """A cell of two pools, in closed form: mean and median are not told apart."""
    pools, output, number = pools_of(profile, cell), cell.output_tokens, cell.num_requests
    if cell.rate_per_s is None:
        point = pools.with_users(cell.concurrency)
        e2e_s = point.e2e_s(output)
        # users start one behind the other and end so: that part of a cycle is not fully used
        behind_s = min(e2e_s, cell.concurrency / pools.prompts_per_s)
        wall_s = number / point.rate_per_s + behind_s
    else:
        found = pools.at_rate(cell.rate_per_s * slower)
        point = found or pools.most
        if found is None:  # the queue grows until the last request is sent
            late_s = number / 2 * (1 / point.rate_per_s - 1 / cell.rate_per_s)
            point = replace(point, ttft_s=point.ttft_s + late_s)
        e2e_s = point.e2e_s(output)
        wall_s = number / min(cell.rate_per_s, point.rate_per_s) + e2e_s
    return CellPrediction(
        throughput_tokens_per_s=number * output / wall_s,
        latency_p90_s_per_token=e2e_s / output,
        latency_mean_s_per_token=e2e_s / output,
        ttft_mean_s=point.ttft_s,
        tpot_mean_s=point.tpot_s,
        peak_sequences=pools.decode.slots,
    )


def can_run(profile: EngineProfile, cell: MeasuredLevel) -> bool:
    """Whether the model with the cell's load fits on the machine."""
    try:
        predict_cell(profile, cell, smooth=True)
    except InputError:
        return False
    return True


def growth_with_step_times(profile: EngineProfile, cell: MeasuredLevel) -> dict[Metric, float]:
    """d ln(figure) / d ln(time of every step) of an open loop.

    Above 1 for latencies: a longer decode meets more sequences, which make its steps longer.
    """
    base = predict_cell(profile, cell)
    other = predict_cell(profile, cell, slower=1 + _SLOWER_STEP)
    return {
        metric: math.log(other.value(metric) / base.value(metric)) / math.log1p(_SLOWER_STEP) for metric in MEASURED
    }


def waits_for_slots(profile: EngineProfile, cell: MeasuredLevel) -> bool:
    """Whether a closed loop has more users, or nearly so, than the cache lets run at once."""
    if cell.rate_per_s is not None or cell.max_sequences is not None:
        return False
    try:
        slots = slots_for(profile, cell)
    except InputError:
        return False  # the prediction of the cell reports the reason
    if slots >= profile_of(profile, cell).max_batch_size:
        return False  # a setting, known exactly
    return cell.concurrency > _NEARLY * cell.replicas * slots


@dataclass(frozen=True, slots=True, eq=False)
class _Answers:
    """Answers of one copy or several, or groups of `count`; shape (groups,).

    tokens    output tokens of each
    at_start  whether they are the first answers of a closed loop's users
    wall_s    first send to last token
    """

    count: NDArray[np.float64]
    ttft_s: NDArray[np.float64]
    e2e_s: NDArray[np.float64]
    tokens: NDArray[np.float64]
    at_start: NDArray[np.bool_]
    wall_s: float


def _scheduler(profile: EngineProfile, cell: MeasuredLevel) -> SchedulerConfig:
    total = cell.input_tokens + cell.output_tokens
    most = cell.max_sequences
    if most is None:
        return capacity.scheduler_config_for(cell.setup, profile, total)
    room = most * (total + profile.block_size)
    return capacity.scheduler_with(replace(profile, max_batch_size=most), room, total)


def even_arrivals(rate_per_s: float, num_requests: int) -> NDArray[np.float64]:
    """Poisson arrivals, scaled so that the last one is at num_requests / rate as in generators."""
    gaps = np.random.default_rng(_SEED).exponential(size=num_requests)
    times = np.cumsum(gaps)
    return np.asarray(times * (num_requests / rate_per_s / times[-1]), dtype=np.float64)


def _open_loop(profile: EngineProfile, cell: MeasuredLevel, model: PricedSteps, slower: float) -> _Answers:
    """One copy's share of an open loop, counted for all copies."""
    assert cell.rate_per_s is not None
    sent_s: Sequence[float] | NDArray[np.float64] = cell.arrivals_s
    if not cell.arrivals_s or cell.replicas > 1:
        number = max(1, round(cell.num_requests / cell.replicas))
        sent_s = even_arrivals(cell.rate_per_s / cell.replicas, number)
    run = _followed(profile, cell, model, sent_s, len(sent_s), slower)
    return replace(run, count=run.count * cell.replicas)


def _followed(
    profile: EngineProfile,
    cell: MeasuredLevel,
    model: PricedSteps,
    load: Sequence[float] | NDArray[np.float64] | int,
    number: int,
    slower: float = 1.0,
) -> _Answers:
    """One copy under times of sending or users, event by event."""
    spread = cell.length_spread
    drawn = np.random.default_rng(_SEED + 2).uniform(1 - spread, 1 + spread, size=number)
    outputs = np.maximum(1, np.round(drawn * cell.output_tokens)).astype(int).tolist()
    run = follow(
        model,
        _scheduler(profile, cell),
        load,
        [(cell.input_tokens, output, cell.cached_tokens) for output in outputs],
        overhead_s=profile.parameters.request_overhead_s,
        slower=slower,
    )
    at_start = np.arange(number) < (load if isinstance(load, int) else 0)
    tokens = np.array(outputs, dtype=np.float64)
    return _Answers(np.ones(number), run.ttft_s, run.e2e_s, tokens, at_start, run.wall_s)


def _traced(model: PricedSteps, limits: CopyLimits, overhead_s: float, users: int, requests: int) -> _Answers:
    """One copy's users, by the steps of a closed loop."""
    trace = trace_closed_loop(limits, users, requests)
    at_s = np.concatenate([[0.0], np.cumsum(model.step_times_s(trace.columns))])
    sent_s = at_s[trace.sent + 1]
    return _Answers(
        trace.count.astype(np.float64),
        at_s[trace.first + 1] - sent_s + overhead_s,
        at_s[trace.end + 1] - sent_s + overhead_s,
        np.full(len(sent_s), float(limits.output_tokens)),
        trace.sent < 0,
        float(at_s[-1]) + overhead_s * requests / users,
    )


def mean_batch(cell: MeasuredLevel, predicted: CellPrediction) -> float:
    """Mean number of sequences that run together on one copy, by Little's law."""
    answered_per_s = predicted.throughput_tokens_per_s / cell.output_tokens / cell.replicas
    served_s = predicted.tpot_mean_s * cell.output_tokens
    return max(1.0, min(float(predicted.peak_sequences), answered_per_s * served_s))


def capacity_tokens_per_s(profile: EngineProfile, cell: MeasuredLevel) -> float:
    """Output tokens each second of all copies with every slot busy, in closed form."""
    if cell.prefill is not None:
        return pools_of(profile, cell).most.rate_per_s * cell.output_tokens
    slots = min(slots_for(profile, cell), math.ceil(cell.num_requests / cell.replicas))
    settings = profile_of(profile, cell)
    joins_late = settings.max_waiting_tokens and not settings.chunked_prefill
    steady = replace(
        _steady(capacity.planned_model_for(cell.setup, profile), cell, slots),
        join_steps=settings.max_waiting_tokens - 1 if joins_late else 0,
        step_tokens=max(settings.max_prefill_tokens, cell.input_tokens + cell.output_tokens),
    )
    return cell.replicas * steady.saturated_rate_per_s * cell.output_tokens


def _steady(model: PricedSteps, cell: MeasuredLevel, slots: int = 1) -> SteadyState:
    return SteadyState(
        model,
        cell.input_tokens,
        cell.output_tokens,
        slots,
        open_loop=cell.rate_per_s is not None,
        cached_tokens=cell.cached_tokens,
    )


def regime_of(profile: EngineProfile, cell: MeasuredLevel, predicted: CellPrediction) -> str:
    """What limits the cell: kv_memory, batch_limit, pool_link, or the step's part that binds."""
    if cell.prefill is not None:
        pools, rate_per_s = pools_of(profile, cell), cell.rate_per_s
        point = pools.at_rate(rate_per_s) if rate_per_s else pools.with_users(cell.concurrency)
        return pools.binding(point or pools.most)
    users = cell.concurrency / cell.replicas
    waiting = users > predicted.peak_sequences
    if cell.rate_per_s is not None:
        offered = cell.rate_per_s * cell.output_tokens
        waiting = offered > capacity_tokens_per_s(profile, cell)
        waiting = waiting and cell.num_requests / cell.replicas > predicted.peak_sequences
    if waiting and predicted.peak_sequences >= profile_of(profile, cell).max_batch_size:
        return "batch_limit"
    if waiting:
        return "kv_memory"
    rows = math.ceil(mean_batch(cell, predicted))
    return _steady(capacity.planned_model_for(cell.setup, profile), cell).binding(rows)
