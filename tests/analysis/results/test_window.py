"""Steady window: the plateau of a rate that is known by construction."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lmi_bench.analysis.results.checks import check_levels
from lmi_bench.analysis.results.columns import columns_of
from lmi_bench.analysis.results.latency import summarise_level
from lmi_bench.analysis.results.window import speed_step, steady_window
from lmi_bench.core.exchange import Exchange
from lmi_bench.core.level import Level
from lmi_bench.core.load import Load
from lmi_bench.core.records import LevelRun, RequestRecord
from lmi_bench.core.steadiness import SpeedStep
from lmi_bench.core.workload import LevelSpec


def request(index, times, sent=0.0):
    return RequestRecord(index, sent, Exchange(sent, tuple(float(t) for t in times)))


def steady(records):
    return steady_window(columns_of(records))


def test_a_cold_start_and_a_drain_are_cut_off():
    """10 tok/s for 5 s, 100 tok/s for 20 s, 20 tok/s for 5 s: whole run 71.7, plateau 100."""
    times = np.concatenate([np.arange(0, 5, 0.1), np.arange(5, 25, 0.01), np.arange(25, 30, 0.05)])
    window = steady([request(i, times[i::4]) for i in range(4)])
    assert len(times) / 30 == pytest.approx(71.7, rel=0.01)
    assert window.throughput_tokens_per_s == pytest.approx(100, rel=0.02)
    assert 4.5 <= window.start_s <= 8  # inside the plateau, give or take a bin
    assert 22 <= window.end_s <= 25.5


def test_silence_before_the_first_token_is_not_steady():
    """Sent at 0, the first token only at 10 s: the wait is ramp."""
    window = steady([request(0, np.arange(10, 30, 0.02))])
    assert window.start_s >= 9.5
    assert window.throughput_tokens_per_s == pytest.approx(50, rel=0.02)


def test_a_level_that_is_steady_throughout_keeps_nearly_all_of_it():
    rng = np.random.default_rng(3)
    times = np.cumsum(rng.exponential(0.01, 5000))
    window = steady([request(0, times)])
    assert window.share > 0.6
    assert window.low < 100 < window.high


def test_tokens_are_counted_not_events():
    """Events of three tokens, ten a second: 30 tok/s."""
    times = tuple(np.arange(0.1, 30, 0.1))
    bundled = RequestRecord(0, 0.0, Exchange(0.0, times, (3,) * len(times)))
    assert steady([bundled]).throughput_tokens_per_s == pytest.approx(30, rel=0.02)


def test_the_servers_count_wins_over_the_events_as_it_does_for_the_level():
    """Ten events a second that show one token each, of which the server counted 3 a piece."""
    times = tuple(np.arange(0.1, 30, 0.1))
    record = RequestRecord(0, 0.0, Exchange(0.0, times), output_tokens=3 * len(times))
    assert steady([record]).throughput_tokens_per_s == pytest.approx(30, rel=0.02)


@pytest.mark.parametrize(
    ("records", "reason"),
    [
        ([], "no tokens"),
        ([request(0, range(10))], "needs 80 moments with tokens, has 10"),
        ([RequestRecord(0, 0.0, Exchange(0.0), status="timeout")], "no tokens"),
    ],
)
def test_too_little_to_tell_says_so(records, reason):
    window = steady(records)
    assert window.throughput_tokens_per_s is None
    assert reason in window.reason


@pytest.mark.parametrize("seed", range(5))
def test_the_interval_covers_the_plateau_for_most_seeds(seed):
    """Poisson tokens at 200/s: batch means cover the truth within their stated width."""
    rng = np.random.default_rng(seed)
    times = np.cumsum(rng.exponential(1 / 200, 8000))
    window = steady([request(0, times)])
    assert window.throughput_tokens_per_s == pytest.approx(200, rel=0.06)
    assert (window.high - window.low) / 200 < 0.2


def _records(*, users=4, seconds=40.0, slower=1.0, since_s=20.0, per_user_s=0.002, seed=0):
    """Users in lockstep of a decoding batch of 20 ms and 2 ms a user, 5 % noise a step."""
    rng = np.random.default_rng(seed)
    open_times: list[list[float]] = [[] for _ in range(users)]
    records, now_s = [], 0.0
    while now_s < seconds:
        step_s = (0.02 + per_user_s * users) * np.exp(0.05 * rng.standard_normal())
        now_s += step_s * (slower if now_s >= since_s else 1.0)
        for user, times in enumerate(open_times):
            times.append(now_s)
            if len(times) == 40 + 7 * user:
                records.append(RequestRecord(len(records), times[0], Exchange(times[0], tuple(times))))
                open_times[user] = []
    return tuple(records)


@pytest.mark.parametrize("seed", range(10))
def test_a_steady_level_has_no_step(seed):
    assert speed_step(columns_of(_records(seed=seed))) is None


@pytest.mark.parametrize(("slower", "since_s"), [(1.1, 12.0), (1.3, 30.0), (0.8, 20.0)])
def test_a_step_is_found_with_its_time_and_its_size(slower, since_s):
    for seed in range(5):
        found = speed_step(columns_of(_records(slower=slower, since_s=since_s, seed=seed)))
        assert found is not None
        assert found.at_s == pytest.approx(since_s, abs=2.5)
        assert found.change == pytest.approx(slower - 1, abs=0.03)


@pytest.mark.parametrize(("slower", "is_found"), [(1.0, False), (1.5, True)])
def test_requests_of_two_paces_are_no_step(slower, is_found):
    """Each request of four users goes to one of two replicas, the other half as fast again."""
    found = 0
    for seed in range(30):
        rng = np.random.default_rng(seed)
        free_s, records = [0.0] * 4, []
        for number in range(60):
            user = free_s.index(min(free_s))
            gap_s = 0.02 * (1.5 if rng.random() < 0.5 else 1.0) * (slower if free_s[user] > 20 else 1.0)
            times = free_s[user] + 0.1 + np.cumsum(gap_s * rng.lognormal(0, 0.1, 100))
            records.append(request(number, times.tolist(), sent=free_s[user]))
            free_s[user] = float(times[-1])
        found += speed_step(columns_of(records), seed=seed) is not None
    assert (found > 10) if is_found else (found == 0)


def test_more_streams_are_no_step():
    """An open loop that fills up: the gap grows with the number of streams, not with time."""
    calm, busy = _records(users=2, seconds=20.0), _records(users=8, seconds=20.0)
    later = [RequestRecord(1000 + each.request_id, 20.0, each.exchange.shifted(-20.0)) for each in busy]
    assert speed_step(columns_of((*calm, *later))) is None


@pytest.mark.parametrize(
    ("slower", "requests", "of_the_time", "is_found"),
    [
        (1.5, 60, 1.0, True),  # 75 s
        (1.5, 60, 0.1, False),  # a cold cache in a level of 7.5 s
        (1.5, 6, 1.0, False),  # six requests one after the other
        (1.03, 60, 1.0, False),  # as much as repeats differ
    ],
)
def test_short_levels_and_small_steps_are_not_named(slower, requests, of_the_time, is_found):
    times = of_the_time * np.cumsum(np.repeat([0.02, 0.02 * slower], 1500))
    records = [
        RequestRecord(number, float(part[0]), Exchange(float(part[0]), tuple(part.tolist())))
        for number, part in enumerate(np.split(times, requests))
    ]
    assert isinstance(speed_step(columns_of(records)), SpeedStep) == is_found


def test_a_level_that_is_too_short_to_tell_says_what_it_needs():
    """Ten seconds at least; eight of the middle request's time, here 5 s; and tokens to follow."""
    assert speed_step(columns_of(_records(seconds=1.5))) == "needs 10.3 s, took 1.49 s"
    paired = [request(number, 5.0 * number + np.linspace(0.1, 5, 50), 5.0 * number) for number in range(4)]
    level = summarise_level(LevelRun(LevelSpec(0, Load(concurrency=1), num_requests=4), 0, tuple(paired)))
    assert (level.speed_step, level.speed_unknown) == (None, "needs 40 s, took 20 s")
    assert Level.from_json(level.to_json()).speed_unknown == level.speed_unknown
    rare = [request(number, [2.0 * number + 1, 2.0 * number + 2], 2.0 * number) for number in range(20)]
    assert speed_step(columns_of(rare)) == "needs tokens in 16 of 40 parts of its time, has 0"
    assert speed_step(columns_of(())) is None


def test_a_level_that_was_judged_gives_no_reason():
    spec = LevelSpec(0, Load(concurrency=4), num_requests=1000)
    assert "speed_unknown" not in summarise_level(LevelRun(spec, 0, _records())).to_json()


def test_a_level_that_was_not_steady_is_warned_of():
    spec = LevelSpec(0, Load(concurrency=4), num_requests=1000)
    level = summarise_level(LevelRun(spec, 0, _records(slower=1.3)))
    assert Level.from_json(level.to_json()).speed_step == level.speed_step
    (warning,) = [text for text in check_levels([level]) if "not steady" in text]
    assert "the time between tokens rose by 29% at 20.6 s" in warning


def _answered(factor=1.0, lengths=(512,), seed=0):
    """120 requests of four users, whose TTFT follows the prompt and changes after a half of them."""
    rng, free_s, records = np.random.default_rng(seed), [0.0] * 4, []
    for number in range(120):
        user, tokens = free_s.index(min(free_s)), int(rng.choice(lengths))
        sent_s = free_s[user]
        first_s = sent_s + 2e-4 * tokens * rng.lognormal(0, 0.1) * (factor if number >= 60 else 1.0)
        times_s = first_s + np.cumsum(0.02 * rng.lognormal(0, 0.05, 50))
        free_s[user] = float(times_s[-1])
        records.append(replace(request(number, times_s.tolist(), sent=sent_s), input_tokens=tokens))
    return LevelRun(LevelSpec(0, Load(concurrency=4), num_requests=120), 0, tuple(records))


@pytest.mark.parametrize("lengths", [(512,), (128, 512, 2048)])
@pytest.mark.parametrize("factor", [0.4, 2.0])
def test_a_step_of_the_time_to_first_token_alone_is_found(lengths, factor):
    """A prefix cache that fills, or one that is lost; prompts of one length or of several."""
    run = _answered(factor, lengths)
    level = summarise_level(run)
    assert level.speed_step.of == "ttft"
    assert level.speed_step.at_s == pytest.approx(run.records[60].sent_s, abs=2.0)
    assert level.speed_step.change == pytest.approx(factor - 1, rel=0.25)
    way = "rose" if factor > 1 else "fell"
    (warning,) = [text for text in check_levels([level]) if "not steady" in text]
    assert f"the time to first token {way} by" in warning


@pytest.mark.parametrize("lengths", [(512,), (128, 512, 2048)])
def test_steady_times_to_first_token_have_no_step(lengths):
    assert [summarise_level(_answered(1.0, lengths, seed)).speed_step for seed in range(20)] == [None] * 20


def test_prompts_that_grow_are_no_step():
    """A trace whose second half asks for more; and conversations, whose turns do, are not judged."""
    run = _answered()
    later = [replace(each, input_tokens=512 if each.request_id < 60 else 1024) for each in _answered(2.0).records]
    assert summarise_level(replace(run, records=tuple(later))).speed_step is None
    turns = replace(run.spec, load=replace(run.spec.load, sessions=True))
    assert summarise_level(replace(_answered(2.0), spec=turns)).speed_step is None
