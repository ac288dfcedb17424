"""Splitting and merging: the parts hold the whole plan, and percentiles are those of the whole."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmi_bench.analysis.results.latency import summarise_level
from lmi_bench.core.exchange import Exchange
from lmi_bench.core.load import Load
from lmi_bench.core.records import RequestRecord
from lmi_bench.core.workload import LevelSpec
from lmi_bench.loadgen.http.receive_signals import ReceiveSignals
from lmi_bench.loadgen.run.level_parts import LevelPart, Share, merge_parts
from lmi_bench.loadgen.run.self_check import LoopWatch

SPEC = LevelSpec(0, Load(concurrency=8), num_requests=400)


@given(st.integers(1, 40), st.integers(0, 200), st.integers(1, 8))
def test_shares_of_a_closed_loop_hold_each_request_and_user_once(users, more, workers):
    spec = LevelSpec(0, Load(concurrency=users), num_requests=users + more)
    shares = [Share(i, workers) for i in range(min(workers, users))]
    shares = [Share(i, len(shares)) for i in range(len(shares))]
    numbers = [list(share.numbers(spec)) for share in shares]
    assert sorted(n for part in numbers for n in part) == list(range(users + more))
    assert sum(share.users(spec) for share in shares) == users
    for share, part in zip(shares, numbers, strict=True):
        assert part == sorted(part)
        assert len(part) == share.num_requests(spec)
        assert {n % users % len(shares) for n in part} <= {share.index}  # user i to worker i mod W


@given(st.integers(1, 100), st.integers(1, 8))
def test_shares_of_an_open_loop_take_every_nth_request(requests, workers):
    spec = LevelSpec(0, Load(rate_per_s=5.0), num_requests=requests)
    for index in range(workers):
        numbers = list(Share(index, workers).numbers(spec))
        assert numbers == list(range(index, requests, workers))


def _records():
    draw = random.Random(3)
    records = []
    for i in range(400):
        sent_s = 0.01 * i
        times = [sent_s + draw.uniform(0.1, 0.4)]
        for _ in range(15):
            times.append(times[-1] + draw.lognormvariate(-4, 0.5))
        records.append(RequestRecord(i, sent_s, Exchange(sent_s, tuple(times), ttft_bound_s=draw.uniform(0, 1e-3))))
    return records


def _line(records, workers):
    parts = []
    for index in range(workers):
        own = [records[n] for n in Share(index, workers).numbers(SPEC)]
        signals = ReceiveSignals("kernel")
        for record in own:
            late = [record.exchange.ttft_bound_s * 1.0] * len(record.token_times_s)
            signals.add_answer(record.token_times_s, late)
            signals.delays_s.extend(late)
        parts.append(LevelPart(tuple(own), signals, LoopWatch(), None))
    run = merge_parts(SPEC, 1, parts, max_error_share=0.5)
    assert [record.request_id for record in run.records] == list(range(400))
    return summarise_level(run)


@pytest.mark.parametrize("workers", [2, 4])
def test_one_two_and_four_workers_give_equal_counts_and_equal_percentiles(workers):
    records = _records()
    whole, merged = _line(records, 1), _line(records, workers)
    assert (merged.generator.workers, whole.generator.workers) == (workers, 1)
    assert replace(merged, generator=replace(merged.generator, workers=1)) == whole


def test_a_stop_of_one_part_stops_the_level():
    parts = [
        LevelPart((), ReceiveSignals(), LoopWatch(), None),
        LevelPart((), ReceiveSignals(), LoopWatch(), "timeout"),
    ]
    assert merge_parts(SPEC, 1, parts, max_error_share=None).stopped_by == "timeout"


@pytest.mark.parametrize("verdict", ["decided", "known"])
@pytest.mark.parametrize("order", [1, -1])
def test_a_failure_is_told_before_a_verdict_that_another_worker_reached(verdict, order):
    parts = [LevelPart((), ReceiveSignals(), LoopWatch(), why) for why in (verdict, "timeout")]
    assert merge_parts(SPEC, 1, parts[::order], max_error_share=None).stopped_by == "timeout"
