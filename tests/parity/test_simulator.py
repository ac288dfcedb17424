"""The simulator against the load generator over the running engine in virtual time.

Same scheduler, two ways to run it: without an event loop, identical steps taken at once; and the
whole asyncio stack, one step at a time. Records must be the same, times within 1e-9 relative.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmi_bench.analysis.level.simulator import simulate_level
from lmi_bench.analysis.model.setup import Speculation
from lmi_bench.analysis.results.latency import summarise_level
from lmi_bench.core.clock import run_virtual
from lmi_bench.core.load import Load
from lmi_bench.core.records import LevelRun
from lmi_bench.core.workload import LevelSpec, PlannedRequest
from lmi_bench.engine.async_engine import AsyncEngine
from lmi_bench.engine.replicas import ReplicaGroup
from lmi_bench.engine.router import RoundRobin
from lmi_bench.engine.scheduling.config import SchedulerConfig
from lmi_bench.engine.scheduling.drafting import ExecutorDrafter
from lmi_bench.engine.scheduling.scheduler import Scheduler
from lmi_bench.engine.simulated import SimulatedExecutor
from lmi_bench.loadgen.run.in_process_target import InProcessTarget
from lmi_bench.loadgen.run.sweep import run_sweep


class StepTimes:
    """Every term of a step's work counts, so that any difference in a step shows in the times."""

    def step_time_s(self, shape):
        return (
            0.0213
            + 1.7e-3 * shape.decode_sequences
            + 3.1e-6 * shape.decode_context_tokens
            + 4.3e-4 * shape.prefill_tokens
            + 1.1e-7 * shape.prefill_context_pairs
            + 1.3e-5 * shape.prefill_context_tokens
            + 5.9e-4 * shape.prefill_sequences
            + 7.3e-5 * shape.copied_tokens
        )


class Constant:
    """Round numbers: ends of steps and arrivals fall on the same instants."""

    def step_time_s(self, shape):
        return 0.125


class Cycling:
    """Requests whose lengths come round again; negative numbers are the warm-up.

    Two thirds of each prompt are one of two texts, for prefix caches; the warm-up's are its own.
    """

    def __init__(self, lengths) -> None:
        self._lengths = lengths

    def request(self, level, number):
        length, output = self._lengths[number % len(self._lengths)]
        alike = 0 if number < 0 else 2 * length // 3
        own = range((number + 10) * 1000 + 9, (number + 10) * 1000 + 9 + length - alike)
        return PlannedRequest(number, 0.0, length, output, prompt_token_ids=[*[1 + number % 2] * alike, *own])


def run_engine(
    spec, lengths, config, step_time, *, seed, spacing_s, replicas=1, router=None, speculation=None, overhead_s=0.0
) -> LevelRun:
    runs = []
    drafter = None if speculation is None else ExecutorDrafter(speculation.draft_tokens)
    acceptance = 0.0 if speculation is None else speculation.acceptance

    async def main():
        engines = [
            AsyncEngine(
                Scheduler(config, drafter=drafter),
                SimulatedExecutor(step_time, block_size=config.block_size, draft_acceptance=acceptance),
            )
            for _ in range(replicas)
        ]
        async with engines[0] if replicas == 1 else ReplicaGroup(engines, router()) as engine:
            await run_sweep(
                [spec],
                InProcessTarget(engine, simulated=True, overhead_s=overhead_s),
                None,
                prompts=Cycling(lengths),
                summarise=summarise_level,
                on_level=lambda run, line: runs.append(run),
                timeout_s=None,
                spacing_s=spacing_s,
                seed=seed,
            )

    run_virtual(main())
    return runs[0]


def same_time(value):
    return None if value is None else pytest.approx(value, rel=1e-9, abs=1e-12)


def assert_same_level(
    spec,
    lengths,
    config,
    step_time,
    *,
    seed=0,
    spacing_s=0.0,
    replicas=1,
    router=RoundRobin,
    speculation=None,
    overhead_s=0.0,
) -> LevelRun:
    """`router` makes one, a new one for each of the two."""
    settings = {"seed": seed, "spacing_s": spacing_s, "replicas": replicas}
    settings |= {"speculation": speculation, "overhead_s": overhead_s}
    ran = run_engine(spec, lengths, config, step_time, **settings, router=router)
    requests = Cycling(lengths)
    simulated = simulate_level(
        spec, lambda number: requests.request(spec, number), config, step_time, **settings, router=router()
    )
    assert simulated.stopped_by == ran.stopped_by
    assert len(simulated.records) == len(ran.records)
    for ours, theirs in zip(simulated.records, ran.records, strict=True):
        for name in ("request_id", "input_tokens", "output_tokens", "status", "error"):
            assert getattr(ours, name) == getattr(theirs, name), name
        for name in ("token_counts", "finish_reason", "replica"):
            assert getattr(ours.exchange, name) == getattr(theirs.exchange, name), name
        assert ours.due_s == same_time(theirs.due_s)
        assert ours.sent_s == same_time(theirs.sent_s)
        assert ours.ended_s == same_time(theirs.ended_s)
        assert list(ours.token_times_s) == same_time(list(theirs.token_times_s))
    assert _order(simulated) == _order(ran)
    return simulated


def _order(run: LevelRun) -> list[tuple[int, int]]:
    """Every token of the level in order of time, those of one instant by request."""
    events = sorted(
        (float(f"{time_s:.9e}"), record.request_id, number)
        for record in run.records
        for number, time_s in enumerate(record.token_times_s)
    )
    return [(request_id, number) for _, request_id, number in events]


lengths = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 40)), min_size=1, max_size=7)

configs = st.builds(
    SchedulerConfig,
    num_blocks=st.sampled_from([30, 60, 1000]),
    block_size=st.sampled_from([4, 16]),
    max_model_len=st.just(100),
    policy=st.sampled_from(["none", "dynamic", "rolling", "rolling", "rolling"]),
    kv_layout=st.sampled_from(["paged", "paged", "contiguous"]),
    batch_size=st.integers(1, 5),
    max_batch_delay_s=st.sampled_from([0.0, 0.1, 0.37]),
    max_rolling_batch_size=st.integers(1, 8),
    max_rolling_batch_prefill_tokens=st.sampled_from([16, 64, 4096]),
    chunked_prefill=st.booleans(),
    prefix_caching=st.booleans(),
    host_blocks=st.sampled_from([0, 0, 6, 400]),
)

closed_loops = st.builds(
    LevelSpec,
    index=st.just(0),
    load=st.builds(Load, concurrency=st.integers(1, 9)),
    num_requests=st.integers(1, 30),
    duration_s=st.sampled_from([None, None, 1.7]),
    warmup_requests=st.sampled_from([0, 0, 3]),
)

open_loops = st.builds(
    LevelSpec,
    index=st.just(0),
    load=st.builds(
        Load, rate_per_s=st.sampled_from([0.3, 2.3, 7.7, 40.0]), arrivals=st.sampled_from(["poisson", "constant"])
    ),
    num_requests=st.integers(1, 30),
    duration_s=st.sampled_from([None, None, 3.1]),
    warmup_requests=st.sampled_from([0, 0, 2]),
)

overheads = st.sampled_from([0.0, 0.0, 0.0537, 0.413])
"""Seconds outside the engine."""


@settings(max_examples=50)
@given(closed_loops, lengths, configs, st.sampled_from([0.0, 0.083]), overheads)
def test_closed_loops_give_the_same_records(spec, lengths, config, spacing_s, outside_s):
    load = {"spacing_s": spacing_s, "overhead_s": outside_s}
    assert_same_level(spec, lengths, config, StepTimes(), **load)


@settings(max_examples=50)
@given(open_loops, lengths, configs, st.integers(0, 5), overheads)
def test_open_loops_give_the_same_records(spec, lengths, config, seed, outside_s):
    assert_same_level(spec, lengths, config, StepTimes(), seed=seed, overhead_s=outside_s)


@settings(max_examples=30)
@given(st.sampled_from([1.0, 2.0, 4.0]), lengths, configs)
def test_what_falls_on_one_instant_happens_in_the_same_order(rate, lengths, config):
    """Arrivals and ends of steps at multiples of an eighth of a second."""
    spec = LevelSpec(index=0, load=Load(rate_per_s=rate, arrivals="constant"), num_requests=25)
    assert_same_level(spec, lengths, config, Constant())
    spec = LevelSpec(index=0, load=Load(concurrency=int(rate)), num_requests=25)
    assert_same_level(spec, lengths, config, Constant())


MIXED = [(20, 70), (70, 20)]


@pytest.mark.parametrize("policy", ["none", "dynamic", "rolling"])
@pytest.mark.parametrize("load", [Load(concurrency=6), Load(rate_per_s=3.0)], ids=str)
def test_each_policy_on_the_mixed_load(policy, load):
    config = SchedulerConfig(num_blocks=60, block_size=4, policy=policy, batch_size=4, max_rolling_batch_size=6)
    spec = LevelSpec(0, load, num_requests=24)
    run = assert_same_level(spec, MIXED, config, StepTimes())
    assert [record.output_tokens for record in run.records] == [70, 20] * 12


def test_a_prefix_cache_that_evicts_gives_the_same_times():
    """Blocks for one request; every other prompt begins alike."""
    config = SchedulerConfig(num_blocks=22, block_size=4, prefix_caching=True)
    spec = LevelSpec(index=0, load=Load(rate_per_s=0.7), num_requests=60)
    run = assert_same_level(spec, [(60, 20), (48, 9)], config, StepTimes())
    hits = [record.exchange.cached_tokens for record in run.records]
    assert 0 < sum(hits) < 29 * (40 + 32)  # of a cache that keeps everything
    run = assert_same_level(spec, [(60, 20), (48, 9)], replace(config, host_blocks=400), StepTimes())
    assert run.engine["host_hit_tokens"] > 0
    assert sum(record.exchange.cached_tokens for record in run.records) == 29 * (40 + 32)


def test_under_preemption():
    """20 blocks of 4 tokens for six users of 90 tokens each: most lose their blocks at times."""
    config = SchedulerConfig(num_blocks=25, block_size=4, max_rolling_batch_size=6)
    spec = LevelSpec(index=0, load=Load(concurrency=6), num_requests=18)
    scheduler_saw = []

    class Watching(StepTimes):
        def step_time_s(self, shape):
            scheduler_saw.append(shape)
            return super().step_time_s(shape)

    assert_same_level(spec, MIXED, config, Watching())
    computed = sum(shape.prefill_tokens for shape in scheduler_saw) / 2
    assert computed > 18 * 45  # prompts were computed again


def test_long_runs_of_steps_at_a_time_far_from_zero():
    """After a warm-up of 1,000 tokens a level's times are differences of large numbers."""
    config = SchedulerConfig(num_blocks=1000)
    spec = LevelSpec(index=0, load=Load(concurrency=3), num_requests=5, warmup_requests=2)
    assert_same_level(spec, [(30, 1000), (10, 333)], config, StepTimes())


def test_what_can_never_fit_is_refused_in_both():
    spec = LevelSpec(index=0, load=Load(concurrency=2), num_requests=12)
    run = assert_same_level(spec, [(4, 3), (4, 4), (4, 3), (90, 40)], SchedulerConfig(num_blocks=8), Constant())
    assert [record.status for record in run.records] == ["ok", "ok", "ok", "refused"] * 3


def test_overload_is_refused_in_both():
    spec = LevelSpec(index=0, load=Load(concurrency=3), num_requests=40)
    config = SchedulerConfig(num_blocks=100, max_concurrent_requests=2)
    run = assert_same_level(spec, [(4, 3)], config, StepTimes())
    assert run.stopped_by == "errors"
    assert {record.status for record in run.records} == {"ok", "overloaded"}


@settings(max_examples=25)
@given(
    closed_loops.filter(lambda spec: not spec.warmup_requests),
    lengths,
    configs.filter(lambda config: config.policy == "rolling"),
    st.integers(1, 4),
    st.sampled_from([0.0, 0.5, 0.9, 1.0]),
)
def test_guesses_hold_alike_in_both(spec, lengths, config, draft_tokens, acceptance):
    """Without a warm-up, whose sequences would shift the ids that the draws are made from."""
    assert_same_level(spec, lengths, config, StepTimes(), speculation=Speculation(draft_tokens, acceptance))
