"""Steps in the speed of a level: injected ones are found where they are, a steady one has none."""

from __future__ import annotations

import numpy as np
import pytest

from lmi_bench.analysis.results.checks import check_levels
from lmi_bench.analysis.results.columns import columns_of
from lmi_bench.analysis.results.latency import summarise_level
from lmi_bench.analysis.results.speed_step import speed_step
from lmi_bench.core.exchange import Exchange
from lmi_bench.core.level import Level
from lmi_bench.core.load import Load
from lmi_bench.core.records import LevelRun, RequestRecord
from lmi_bench.core.workload import LevelSpec


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
                records.append(
                    RequestRecord(len(records), times[0], Exchange(times[0], tuple(times)))
                )
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


def test_more_streams_are_no_step():
    """An open loop that fills up: the gap grows with the number of streams, not with time."""
    calm, busy = _records(users=2, seconds=20.0), _records(users=8, seconds=20.0)
    later = [
        RequestRecord(1000 + each.request_id, 20.0, each.exchange.shifted(-20.0)) for each in busy
    ]
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
    assert (speed_step(columns_of(records)) is not None) == is_found


def test_too_few_tokens_say_nothing():
    assert speed_step(columns_of(_records(seconds=0.5))) is None
    assert speed_step(columns_of(())) is None


def test_a_level_that_was_not_steady_is_warned_of():
    spec = LevelSpec(0, Load(concurrency=4), num_requests=1000)
    level = summarise_level(LevelRun(spec, 0, _records(slower=1.3)))
    assert Level.from_json(level.to_json()).speed_step == level.speed_step
    (warning,) = [text for text in check_levels([level]) if "not steady" in text]
    assert "the time between tokens rose by 29% at 20.6 s" in warning
