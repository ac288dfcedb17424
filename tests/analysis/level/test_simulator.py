"""What the parity tests cannot show: hand arithmetic, several replicas, speed, what is imported."""

from __future__ import annotations

import random
import subprocess
import sys
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmi_bench.analysis.level.simulator import simulate_level
from lmi_bench.core.errors import InputError
from lmi_bench.core.load import Load
from lmi_bench.core.workload import LevelSpec, PlannedRequest
from lmi_bench.engine.router import LeastOutstanding, RandomChoice, RoundRobin
from lmi_bench.engine.scheduling.config import SchedulerConfig

CONFIG = SchedulerConfig(num_blocks=4000, max_rolling_batch_size=64)


class StepTimes:
    """Prefill 1 s, decode 0.1 s."""

    def step_time_s(self, shape):
        return 1.0 if shape.prefill_sequences else 0.1


class Growing:
    def step_time_s(self, shape):
        return 0.02 + 1e-6 * shape.decode_context_tokens + 1e-4 * shape.prefill_tokens


def same(input_tokens, output_tokens):
    return lambda number: PlannedRequest(number, 0.0, input_tokens, output_tokens)


def test_two_users_by_hand():
    """Both prefill in 1 s; user 0 has its 2 tokens at 1.1 and sends again; the prefill of that
    takes until 2.1, in which user 1 stands still."""
    spec = LevelSpec(index=0, load=Load(concurrency=2), num_requests=3)
    outputs = [2, 4, 1]
    run = simulate_level(spec, lambda i: PlannedRequest(i, 0.0, 10, outputs[i]), CONFIG, StepTimes())
    times = [list(record.token_times_s) for record in run.records]
    assert times[0] == pytest.approx([1.0, 1.1])
    assert times[1] == pytest.approx([1.0, 1.1, 2.2, 2.3])
    assert times[2] == pytest.approx([2.1])
    assert [record.sent_s for record in run.records] == pytest.approx([0.0, 0.0, 1.1])
    assert run.stopped_by is None


def test_a_run_of_equal_steps_is_the_sum_of_its_steps():
    """100 tokens behind a prompt of 50: 0.02 a step and 1e-6 for each of 51, 52, ... tokens."""
    spec = LevelSpec(index=0, load=Load(concurrency=1), num_requests=1)
    run = simulate_level(spec, same(50, 100), CONFIG, Growing())
    total_s = (0.02 + 50e-4) + 99 * 0.02 + 1e-6 * sum(range(51, 150))
    assert run.records[0].token_times_s[-1] == pytest.approx(total_s, rel=1e-12)
    assert len(run.records[0].token_times_s) == 100


def test_an_idle_level_waits_for_its_arrivals():
    spec = LevelSpec(index=0, load=Load(rate_per_s=0.1, arrivals="constant"), num_requests=3)
    run = simulate_level(spec, same(10, 2), CONFIG, StepTimes())
    assert [record.token_times_s[0] for record in run.records] == pytest.approx([1.0, 11.0, 21.0])
    assert [record.due_s for record in run.records] == pytest.approx([0.0, 10.0, 20.0])


def test_a_level_cut_by_its_duration_says_so():
    spec = LevelSpec(index=0, load=Load(concurrency=1), num_requests=100, duration_s=5.0)
    run = simulate_level(spec, same(10, 2), CONFIG, StepTimes())
    assert len(run.records) == 5  # each takes 1.1 s; the fifth is sent at 4.4 s
    assert run.stopped_by == "duration"


class TestReplicas:
    SPEC = LevelSpec(index=0, load=Load(concurrency=4), num_requests=40)

    def test_two_replicas_with_a_slot_each_do_the_work_of_two(self):
        config = SchedulerConfig(num_blocks=100, max_rolling_batch_size=1)
        one = simulate_level(self.SPEC, same(10, 11), config, StepTimes())
        two = simulate_level(self.SPEC, same(10, 11), config, StepTimes(), replicas=2)
        assert one.records[-1].ended_s == pytest.approx(40 * 2.0)
        assert two.records[-1].ended_s == pytest.approx(20 * 2.0)

    def test_each_replica_of_an_open_loop_behaves_as_if_it_were_alone(self):
        """Round robin sends the even requests to one engine and the odd ones to the other."""
        spec = LevelSpec(index=0, load=Load(rate_per_s=3.0, arrivals="constant"), num_requests=60)
        both = simulate_level(spec, same(30, 50), CONFIG, Growing(), replicas=2)
        halved = LevelSpec(index=0, load=Load(rate_per_s=1.5, arrivals="constant"), num_requests=30)
        alone = simulate_level(halved, same(30, 50), CONFIG, Growing())
        for even, odd, single in zip(both.records[::2], both.records[1::2], alone.records, strict=True):
            assert list(even.token_times_s) == pytest.approx(list(single.token_times_s))
            delayed = [time_s + 1 / 3 for time_s in single.token_times_s]
            assert list(odd.token_times_s) == pytest.approx(delayed)

    def test_least_outstanding_beats_chance_under_uneven_lengths(self):
        draw = random.Random(3)
        outputs = [draw.choice([5, 400]) for _ in range(200)]
        spec = LevelSpec(index=0, load=Load(rate_per_s=1.2), num_requests=200)
        config = SchedulerConfig(num_blocks=1000, max_rolling_batch_size=4)

        def mean_first_token_s(router):
            run = simulate_level(
                spec, lambda i: PlannedRequest(i, 0.0, 10, outputs[i]), config, Growing(), replicas=3, router=router
            )
            return sum(r.token_times_s[0] - r.due_s for r in run.records) / 200

        draws = random.Random(4)
        chance_s = mean_first_token_s(RandomChoice(iter(draws.random, None)))
        assert mean_first_token_s(LeastOutstanding()) < 0.7 * chance_s

    @settings(max_examples=100)
    @given(
        st.integers(1, 4),
        st.integers(1, 9),
        st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), min_size=1, max_size=7),
        st.sampled_from([RoundRobin, LeastOutstanding]),
    )
    def test_runs_broken_into_give_what_single_steps_give(self, replicas, concurrency, lengths, router):
        """A scheduler that never sees equal steps ahead makes the simulator take each of them."""
        spec = LevelSpec(index=0, load=Load(concurrency=concurrency), num_requests=25)
        config = SchedulerConfig(num_blocks=60, block_size=4, max_rolling_batch_size=4)

        def run():
            return simulate_level(
                spec,
                lambda i: PlannedRequest(i, 0.0, *lengths[i % len(lengths)]),
                config,
                Growing(),
                replicas=replicas,
                router=router(),
            )

        in_runs = run()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("lmi_bench.engine.scheduling.scheduler.Scheduler.identical_decode_steps", lambda self: 0)
            stepped = run()
        assert in_runs.stopped_by == stepped.stopped_by
        assert len(in_runs.records) == len(stepped.records)
        for ours, theirs in zip(in_runs.records, stepped.records, strict=True):
            assert ours.token_times_s == pytest.approx(theirs.token_times_s, rel=1e-9)
            assert ours.sent_s == pytest.approx(theirs.sent_s, rel=1e-9)
            assert (ours.request_id, ours.status) == (theirs.request_id, theirs.status)

    def test_no_replica_at_all_is_bad_input(self):
        with pytest.raises(InputError, match="at least 1 worker"):
            simulate_level(self.SPEC, same(1, 1), CONFIG, StepTimes(), replicas=0)


def test_64_streams_for_a_minute_take_a_fraction_of_a_second():
    """About 0.1 s on one core of the machine it was written on; the bound leaves room for noise."""
    draw = random.Random(1)
    lengths = [(draw.randint(20, 500), draw.randint(20, 500)) for _ in range(1000)]
    spec = LevelSpec(index=0, load=Load(concurrency=64), duration_s=60.0)
    start_s = time.process_time()
    run = simulate_level(spec, lambda i: PlannedRequest(i, 0.0, *lengths[i % 1000]), CONFIG, Growing())
    assert time.process_time() - start_s < 1.0
    assert run.records[-1].token_times_s[-1] > 60


def test_simulating_loads_neither_asyncio_nor_torch():
    program = "import sys, lmi_bench.analysis.level.simulator; print(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "lmi_bench.analysis.level.simulator" in loaded
    assert not {"asyncio", "torch", "lmi_bench.engine.async_engine"} & loaded


def test_users_that_never_rest_keep_the_engine_busy_to_the_last_step():
    """1,000 requests by 128 users of an engine of 64 slots: no second passes without a step."""

    class Busy(Growing):
        seconds = 0.0

        def step_time_s(self, shape):
            step_s = super().step_time_s(shape)
            self.seconds += step_s
            return step_s

    steps = Busy()
    spec = LevelSpec(index=0, load=Load(concurrency=128), num_requests=1000)
    run = simulate_level(spec, same(50, 20), CONFIG, steps)
    assert len(run.records) == 1000
    wall_s = max(record.token_times_s[-1] for record in run.records)
    assert steps.seconds == pytest.approx(wall_s, rel=1e-9)
