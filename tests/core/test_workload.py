"""Requests, levels, users and arrivals: the rules that generator and simulator share."""

from __future__ import annotations

import itertools
import math
import statistics

import pytest

from lmi_bench.core.errors import InputError
from lmi_bench.core.load import Load
from lmi_bench.core.workload import ClosedLoop, LevelSpec, PlannedRequest, arrival_times_s


def arrivals(rate_per_s, process="poisson", *, seed=0, num_requests=None, duration_s=None, **of_load):
    load = Load(rate_per_s=rate_per_s, arrivals=process, **of_load)
    return arrival_times_s(load, seed=seed, num_requests=num_requests, duration_s=duration_s)


def test_constant_arrivals_are_one_over_the_rate_apart():
    assert list(arrivals(4.0, "constant", num_requests=4)) == [0.0, 0.25, 0.5, 0.75]


def test_poisson_gaps_have_the_mean_and_the_spread_of_an_exponential():
    """Mean and standard deviation of an exponential both equal 1 / rate; 3 sigma of 20,000."""
    times = list(arrivals(5.0, seed=3, num_requests=20_000))
    gaps = [b - a for a, b in itertools.pairwise([0.0, *times])]
    bound = 3 * 0.2 / math.sqrt(len(gaps))
    assert statistics.fmean(gaps) == pytest.approx(0.2, abs=bound)
    assert statistics.stdev(gaps) == pytest.approx(0.2, abs=2 * bound)


def test_one_seed_gives_one_sequence():
    def draw(seed):
        return list(arrivals(5.0, seed=seed, num_requests=5))

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


def test_arrivals_end_before_the_duration():
    times = list(arrivals(10.0, "constant", duration_s=1.0))
    assert len(times) == 10
    assert times[-1] == pytest.approx(0.9)


def test_users_share_one_supply_and_stop_when_it_is_used_up():
    users = ClosedLoop(concurrency=2, num_requests=3)
    assert [users.next_index(0.0) for _ in range(5)] == [0, 1, 2, None, None]


def test_users_stop_at_the_duration_and_when_told():
    users = ClosedLoop(concurrency=1, num_requests=None, duration_s=2.0)
    assert users.next_index(1.999) == 0
    assert users.next_index(2.0) is None
    told = ClosedLoop(concurrency=1, num_requests=9)
    told.stop()
    assert told.next_index(0.0) is None


@pytest.mark.parametrize(
    "fields",
    [
        {"num_requests": 1},
        {"concurrency": 1, "rate_per_s": 1.0, "num_requests": 1},
        {"concurrency": 0, "num_requests": 1},
        {"rate_per_s": 0.0, "num_requests": 1},
        {"concurrency": 1},
        {"concurrency": 1, "num_requests": 0},
        {"concurrency": 1, "duration_s": 0.0},
    ],
)
def test_a_level_that_makes_no_sense_cannot_exist(fields):
    with pytest.raises(InputError):
        level(**fields)


def level(concurrency=None, rate_per_s=None, **size):
    return LevelSpec(0, Load(concurrency, rate_per_s), **size)


def test_a_level_is_named_by_its_load():
    assert LevelSpec(0, Load(concurrency=8), num_requests=1).load.name == "concurrency 8"
    assert LevelSpec(0, Load(rate_per_s=2.5), num_requests=1).load.name == "2.5 req/s"


def test_a_request_asks_and_gets_at_least_one_token():
    with pytest.raises(InputError, match="request 3"):
        PlannedRequest(3, 0.0, 0, 1)


def _gaps(process, burstiness):
    times = list(arrivals(2.0, process, seed=1, num_requests=40_000, burstiness=burstiness))
    return [b - a for a, b in zip([0.0, *times], times, strict=False)]


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gamma_gaps_have_the_rate_and_the_spread_that_were_asked_for(burstiness):
    """Mean 1 / rate, and a coefficient of variation of burstiness ** -0.5."""
    gaps = _gaps("gamma", burstiness)
    mean = statistics.fmean(gaps)
    assert mean == pytest.approx(0.5, rel=0.03)
    assert statistics.pstdev(gaps) / mean == pytest.approx(burstiness**-0.5, rel=0.03)


def test_a_ramp_sends_half_of_what_a_steady_rate_would():
    """Over a ramp of 100 s at 2 req/s: 100 requests by 100 s, 25 by 50 s, then one each 0.5 s."""
    times = list(arrivals(2.0, "constant", num_requests=300, ramp_s=100.0))
    assert sum(time < 50 for time in times) == 25
    assert sum(time < 100 for time in times) == 100
    assert times[201] - times[200] == pytest.approx(0.5)
    assert times == sorted(times)


def test_without_a_ramp_nothing_changes():
    plain = list(arrivals(2.0, seed=3, num_requests=50))
    ramped = list(arrivals(2.0, seed=3, num_requests=50, ramp_s=0.0))
    assert plain == ramped
