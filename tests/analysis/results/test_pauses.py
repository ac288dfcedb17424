"""Pauses of all streams, in levels whose steps are known by construction."""

from __future__ import annotations

import numpy as np
import pytest

from lmi_bench.analysis.results.checks import check_levels
from lmi_bench.analysis.results.columns import columns_of
from lmi_bench.analysis.results.latency import summarise_level
from lmi_bench.analysis.results.pauses import pauses
from lmi_bench.core.exchange import Exchange
from lmi_bench.core.level import Level
from lmi_bench.core.load import Load
from lmi_bench.core.records import LevelRun, RequestRecord
from lmi_bench.core.workload import LevelSpec

PROMPT_S = 0.0001  # of a prompt token


def served(*, stop_at_s=None, prompts=300, users=4, seconds=30.0, stop_s=0.3, together=1, seed=0):
    """Users in lockstep of steps of 20 ms with 5 % noise; a step computes all prompts that wait.

    together  steps whose tokens are sent at once
    """
    rng = np.random.default_rng(seed)
    lengths = np.maximum(1, prompts * rng.lognormal(0, 0.8, 1000)).astype(int)
    waiting, decoding, records = [(0.0, number) for number in range(users)], {}, []
    now_s, step = 0.0, 0
    while waiting or decoding:
        admitted = [each for each in waiting if each[0] <= now_s]
        took_s = 0.02 * np.exp(0.05 * rng.standard_normal()) + PROMPT_S * sum(lengths[n] for _, n in admitted)
        stops = stop_at_s is not None and now_s <= stop_at_s < now_s + took_s
        now_s, step = now_s + took_s + stop_s * stops, step + 1
        waiting = [each for each in waiting if each not in admitted]
        decoding |= {number: (sent_s, []) for sent_s, number in admitted}
        for number, (sent_s, times) in list(decoding.items()):
            times.append(now_s)
            if len(times) == 60 + 20 * (number % 4):
                shown = [times[min(len(times) - 1, n // together * together + together - 1)] for n in range(len(times))]
                exchange = Exchange(sent_s, tuple(shown))
                records.append(RequestRecord(number, sent_s, exchange, input_tokens=int(lengths[number])))
                del decoding[number]
                waiting += [(now_s, max([number, *decoding, *(n for _, n in waiting)]) + 1)] * int(now_s < seconds)
    return records


def level_of(records):
    return summarise_level(LevelRun(LevelSpec(0, Load(concurrency=4), num_requests=1000), 0, tuple(records)))


@pytest.mark.parametrize("prompts", [300, 10_000])
@pytest.mark.parametrize("together", [1, 4])
def test_prefills_and_tokens_that_are_sent_together_are_no_pauses(prompts, together):
    """Prompts of 10,000 tokens stop the others for a second."""
    for seed in range(10):
        assert level_of(served(prompts=prompts, together=together, seed=seed)).pauses is None


@pytest.mark.parametrize("at_s", [3.0, 11.1, 25.0])
def test_a_pause_of_all_streams_is_found_with_its_time_and_length(at_s):
    for seed in range(10):
        found = level_of(served(stop_at_s=at_s, seed=seed)).pauses
        assert found.number == 1
        assert found.at_s == pytest.approx([at_s], abs=0.2)
        assert 310 < found.longest_ms == pytest.approx(1000 * found.total_s)


def test_a_stream_that_stops_alone_is_no_pause():
    """One of four is preempted for a second and computed anew."""
    records = served()
    stopped = next(each for each in records if each.exchange.token_times_s[0] > 10)
    times = np.array(stopped.exchange.token_times_s)
    times[30:] += 1.0
    others = [each for each in records if each is not stopped]
    alone = RequestRecord(stopped.request_id, stopped.sent_s, Exchange(stopped.sent_s, tuple(times.tolist())))
    assert pauses(columns_of([*others, alone]), np.full(len(records), 300.0)) is None


def test_time_without_requests_is_no_pause():
    records = [RequestRecord(n, 3.0 * n, Exchange(3.0 * n, tuple(3.0 * n + 0.02 * np.arange(1, 50)))) for n in range(9)]
    assert pauses(columns_of(records), np.full(9, 10.0)) is None
    assert pauses(columns_of(()), np.zeros(0)) is None


def test_a_pause_is_warned_of_and_the_level_stays_valid():
    level = level_of(served(stop_at_s=11.1))
    assert level.valid
    assert Level.from_json(level.to_json()).pauses == level.pauses
    (warning,) = [text for text in check_levels([level]) if "pauses" in text]
    assert "pauses of all streams: 1, 1.0% of the time" in warning
    assert f"{level.pauses.longest_ms:.0f} ms at most, at 11.1 s" in warning


def test_conversations_are_not_looked_at():
    """Some of their prompts are in a cache, and nobody says how much of each."""
    spec = LevelSpec(0, Load(concurrency=4, sessions=True), num_requests=1000)
    records = tuple(served(stop_at_s=10.0))
    assert level_of(records).pauses is not None
    assert summarise_level(LevelRun(spec, 0, records)).pauses is None
