"""The generator's judgement of itself: who is to blame, and only when there is blame."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest

from lmi_bench.core.clock import run_virtual
from lmi_bench.core.exchange import Exchange
from lmi_bench.core.load import Load
from lmi_bench.core.records import RequestRecord
from lmi_bench.core.workload import LevelSpec
from lmi_bench.loadgen.http.receive_signals import ReceiveSignals
from lmi_bench.loadgen.run.self_check import LoopWatch, check_level

CLOSED = LevelSpec(0, Load(concurrency=4), num_requests=20)
OPEN = LevelSpec(0, Load(rate_per_s=10.0, arrivals="constant"), num_requests=20)


def _records(delay_s: float, *, latency_s: float = 1.0, stretch: float = 1.0):
    return [
        RequestRecord(i, 0.1 * i, Exchange(0.1 * i * stretch + delay_s, (0.1 * i * stretch + latency_s,)))
        for i in range(20)
    ]


def _changed(record: RequestRecord, **changes) -> RequestRecord:
    return replace(record, exchange=replace(record.exchange, **changes))


def test_a_prompt_generator_is_valid():
    check = check_level(CLOSED, _records(0.001), LoopWatch(), ReceiveSignals())
    assert check.valid
    assert check.reason is None
    assert check.dispatch_delay_max_s == pytest.approx(0.001)


def test_a_level_with_the_answers_of_another_model_is_invalid():
    signals = ReceiveSignals(models={"": "m"}, other_model="'m-int4', the run's first of 'm'")
    check = check_level(CLOSED, _records(0.001), LoopWatch(), signals)
    assert not check.valid
    assert check.reason.startswith("server: answers came of the model 'm-int4', the run's first")


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


def _signals(streams, timestamps="kernel"):
    """Streams as lists of (time, by how much it may be too late)."""
    signals = ReceiveSignals(timestamps)
    for stream in streams:
        times, late = zip(*stream, strict=True)
        signals.add_answer(times, late)
        signals.delays_s.extend(late)
    return signals


def _judged(answers, hidden, late_s):
    """The check of a level with a TTFT of 100 ms, but for `hidden` answers whose first token was
    read `late_s` later, together with the second."""
    records, streams = [], []
    for number in range(answers):
        late = late_s if number < hidden else 0.0
        start_s = 0.1 * number
        first_s = start_s + 0.1 + late
        second_s = first_s if late else first_s + 0.02
        times = (first_s, second_s)
        records.append(RequestRecord(number, start_s, Exchange(start_s, times, ttft_bound_s=late)))
        streams.append([(first_s, late), (second_s, 0.0)])
    return check_level(CLOSED, records, LoopWatch(), _signals(streams))


def test_first_tokens_that_a_late_read_hid_are_held_against_the_generator():
    """Three of thirty came with the second token, up to 2 ms before."""
    check = _judged(30, 3, 0.002)
    assert check.unsure_first_share == pytest.approx(0.1)
    assert check.unsure_share == pytest.approx(3 / 60)
    assert check.reason.startswith("client: generator-limited: 10.0% of the first tokens")


def test_one_hidden_first_token_of_twenty_is_judged_by_what_it_may_have_done():
    """20 ms late of 120: the mean of 101 ms may be 1 ms too long, the p50 is exact, and the p99,
    nearly the largest of so few, is 0.81 * 20 ms of 116 (14 %) too long at most."""
    check = _judged(20, 1, 0.02)
    assert check.valid
    assert check.ttft_error_bound_frac == pytest.approx(16.2 / 116.2)
    assert check.unsure_first_share == pytest.approx(0.05)


def test_a_bound_that_is_really_large_is_never_passed_however_few_the_requests():
    """60 ms late of 160: 0.81 * 60 of 148.6 ms."""
    check = _judged(20, 1, 0.06)
    assert check.reason.startswith("client: generator-limited: TTFT p99 may be 48.6 ms (33%) too")


def test_a_p99_that_the_requests_support_is_held_to_the_narrow_limit():
    """Four of 300, 15 ms late: the p99 is interpolated 0.01 from the 4th largest to the 3rd, so
    all of 115 ms, of which 15 (13 %) may be the reader's; of 20 requests that would pass."""
    few = [(0.1, 0.0)] * 296 + [(0.115, 0.015)] * 4
    records = [RequestRecord(i, 0.0, Exchange(0.0, (t, t + 0.1), ttft_bound_s=b)) for i, (t, b) in enumerate(few)]
    check = check_level(CLOSED, records, LoopWatch(), ReceiveSignals("kernel"))
    assert "TTFT p99 may be 15.0 ms (13%)" in check.reason


def test_tokens_that_the_server_sent_at_once_are_its_own():
    """Read 50 us after the last look: that is how far apart they can be."""
    together = _signals([[(1.0, 50e-6), (1.0, 0.0), (1.1, 0.0)]] * 10)
    check = check_level(CLOSED, _records(0.0), LoopWatch(), together)
    assert check.valid
    assert check.unsure_share == 0.0


def test_user_time_with_a_wide_bound_makes_a_level_the_generators_own():
    """TTFT of 1 s, each up to 60 ms too long: 6 %."""
    records = [_changed(record, ttft_bound_s=0.06) for record in _records(0.0)]
    check = check_level(CLOSED, records, LoopWatch(), ReceiveSignals("user"))
    assert check.ttft_error_bound_ms == pytest.approx(60)
    assert check.ttft_error_bound_frac == pytest.approx(0.06)
    assert "60.0 ms (6%) too long by user time" in check.reason


def test_a_bound_that_is_not_known_is_none_and_not_held_against_anyone():
    check = check_level(CLOSED, _records(0.0), LoopWatch(), ReceiveSignals("user"))
    assert check.ttft_error_bound_ms is None
    assert check.itl_error_bound_ms is None
    assert check.valid


def test_in_virtual_time_the_bound_is_zero():
    watch = LoopWatch()
    watch.virtual = True
    check = check_level(CLOSED, _records(0.0), watch, ReceiveSignals())
    assert check.ttft_error_bound_ms == 0.0


def test_a_slow_accept_is_the_servers_fault():
    records = [_changed(record, connect_s=0.2) for record in _records(0.2)]
    check = check_level(CLOSED, records, LoopWatch(), ReceiveSignals())
    assert check.reason.startswith("server: requests left 200.0 ms late")


def test_a_plan_that_cannot_reach_its_load_says_so():
    spec = LevelSpec(0, Load(concurrency=32), num_requests=20)
    check = check_level(spec, _records(0.0), LoopWatch(), ReceiveSignals())
    assert check.reason.startswith("plan: 20 requests cannot keep 32 users busy")


def test_the_load_that_was_reached_stands_beside_the_one_asked_for():
    """Two users, one of whom rests for half of the time: one and a half in flight."""
    busy = [RequestRecord(i, float(i), Exchange(float(i), (i + 1.0,))) for i in range(5)]
    lazy = [RequestRecord(5 + i, float(i), Exchange(float(i), (i + 0.5,))) for i in range(5)]
    spec = LevelSpec(0, Load(concurrency=2), num_requests=10)
    check = check_level(spec, [*busy, *lazy], LoopWatch(), ReceiveSignals())
    assert check.asked_load == 2.0
    assert check.achieved_load == pytest.approx(1.5)


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


def test_the_late_share_is_of_the_last_second_and_unknown_before_one_is_over():
    watch = LoopWatch([0.01] * 99)
    assert watch.late_frac() == 0.0
    watch.lags_s.append(0.01)  # 100 beats of 10 ms, each as late again
    assert watch.late_frac() == pytest.approx(0.5)
    watch.lags_s.extend([0.0] * 100)
    assert watch.late_frac() == 0.0
