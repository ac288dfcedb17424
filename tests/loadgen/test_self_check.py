"""The generator's judgement of itself: who is to blame, and only when there is blame."""

from __future__ import annotations

import asyncio
import time

import pytest

from lmi_bench.clock import run_virtual
from lmi_bench.loadgen.self_check import LoopWatch, ReceiveSignals, check_level
from lmi_bench.records import RequestRecord
from lmi_bench.workload import LevelSpec

CLOSED = LevelSpec(0, concurrency=4, num_requests=20)
OPEN = LevelSpec(0, rate_per_s=10.0, arrivals="constant", num_requests=20)


def _records(delay_s: float, *, latency_s: float = 1.0, stretch: float = 1.0):
    return [
        RequestRecord(i, 0.1 * i, 0.1 * i * stretch + delay_s, (0.1 * i * stretch + latency_s,))
        for i in range(20)
    ]


def test_a_prompt_generator_is_valid():
    check = check_level(CLOSED, _records(0.001), LoopWatch(), ReceiveSignals())
    assert check.valid
    assert check.reason is None
    assert check.dispatch_delay_max_s == pytest.approx(0.001)


def test_a_late_generator_blames_itself_and_says_what_to_do():
    check = check_level(CLOSED, _records(0.2), LoopWatch(), ReceiveSignals())
    assert not check.valid
    assert check.reason.startswith("client: requests left 200.0 ms late")
    assert "idle core" in check.reason


def test_delay_is_judged_beside_the_latency():
    """20 ms late is nothing beside a second and a lot beside 0.1 s."""
    long = check_level(CLOSED, _records(0.02), LoopWatch(), ReceiveSignals())
    short = check_level(CLOSED, _records(0.02, latency_s=0.1), LoopWatch(), ReceiveSignals())
    assert (long.valid, short.valid) == (True, False)


def test_a_rate_that_was_not_reached_is_named():
    """Sends 1.2 times as far apart as planned: 8.33 of 10 requests a second."""
    records = _records(0.0, latency_s=60.0, stretch=1.2)
    check = check_level(OPEN, records, LoopWatch(), ReceiveSignals())
    assert not check.valid
    assert "8.333 req/s sent of the 10 asked for" in check.reason


def test_tokens_read_together_by_a_late_reader_are_held_against_it():
    late = ReceiveSignals("kernel", delay_p99_s=0.03, merged_share=0.1)
    together = ReceiveSignals("kernel", delay_p99_s=0.0001, merged_share=0.5)
    assert "gaps are unknown" in check_level(CLOSED, _records(0.0), LoopWatch(), late).reason
    assert check_level(CLOSED, _records(0.0), LoopWatch(), together).valid


def test_a_blocked_loop_shows_in_the_lag_and_the_share():
    """Four turns of 50 ms of arithmetic each, over however long a busy machine makes them."""

    async def main():
        watch = LoopWatch()
        start_s = time.perf_counter()
        with watch.watching():
            for _ in range(4):
                await asyncio.sleep(0.02)
                end_s = time.thread_time() + 0.05
                while time.thread_time() < end_s:
                    pass
        return watch, time.perf_counter() - start_s

    watch, wall_s = asyncio.run(main())
    assert max(watch.lags_s) >= 0.03
    assert 0.8 * 0.2 / wall_s < watch.cpu_share <= 1.1


def test_virtual_time_has_no_lag():
    async def main():
        watch = LoopWatch()
        with watch.watching():
            await asyncio.sleep(3600)
        return watch

    assert run_virtual(main()).lags_s == []


def test_a_level_without_records_is_no_division_by_zero():
    assert check_level(CLOSED, [], LoopWatch(), ReceiveSignals()).valid
