"""Recorded traffic made from known distributions is recognised again."""

from __future__ import annotations

import random

import pytest

from lmi_bench.core.traces import TraceRequest
from lmi_bench.interchange.traffic_statistics import (
    burstiness,
    hourly_rates_per_s,
    independent_kinds,
    joint_kinds,
    length_correlation,
    peak_rate_per_s,
    shared_prefix,
)


def arrivals(shape, rate, count, seed=3):
    draw, at = random.Random(seed), 0.0
    times = []
    for _ in range(count):
        at += draw.gammavariate(shape, 1 / (rate * shape))
        times.append(at)
    return times


def test_the_fullest_five_minutes_are_found_wherever_they_begin():
    """One request a minute, and 600 in five minutes that begin at no round time: 2 req/s."""
    times = sorted([60.0 * k for k in range(60)] + [777.7 + 0.5 * k for k in range(600)])
    assert peak_rate_per_s(times) == pytest.approx((600 + 5) / 300)


def test_of_a_short_record_the_mean_rate_stands_for_the_peak():
    assert peak_rate_per_s([0.0, 1.0, 2.0, 4.0]) == pytest.approx(3 / 4)


@pytest.mark.parametrize("shape", [0.25, 0.5])
def test_bursts_are_found_again(shape):
    """Gamma gaps of that shape vary 1 / shape times as much as exponential ones."""
    assert burstiness(arrivals(shape, 2.0, 6000)).shape == pytest.approx(shape, rel=0.2)


def test_poisson_arrivals_are_called_poisson():
    assert burstiness(arrivals(1.0, 2.0, 6000)).shape == 1.0


def test_a_rate_that_follows_the_day_is_not_taken_for_bursts():
    """Poisson at 1 req/s for an hour and at 8 for another: gaps differ, not within five minutes."""
    slow = arrivals(1.0, 1.0, 3600)
    fast = [slow[-1] + at for at in arrivals(1.0, 8.0, 28_800, seed=4)]
    assert burstiness(slow + fast).shape == 1.0


def test_stamps_of_whole_seconds_are_read_by_their_counts():
    whole = [float(int(at)) for at in arrivals(0.25, 2.0, 20_000)]
    found = burstiness(whole)
    assert "whole seconds" in found.how
    assert found.shape == pytest.approx(0.25, rel=0.35)
    assert burstiness([float(int(at)) for at in arrivals(1.0, 2.0, 20_000)]).shape == 1.0


def test_too_few_requests_tell_nothing():
    assert burstiness(arrivals(0.2, 1.0, 50)).shape is None


def test_the_days_curve_is_of_the_clock_not_of_the_record():
    """From 22:30 on: 360 requests in the half hour left, 1,800 in the next hour."""
    start = 22.5 * 3600
    times = [k * 5.0 for k in range(360)] + [1800 + 2.0 * k for k in range(1801)]
    rates = hourly_rates_per_s(times, start)
    assert rates[22] == pytest.approx(0.2)
    assert rates[23] == pytest.approx(0.5)
    assert rates[12] is None


def requests(pairs):
    return [TraceRequest(0.0, asked, told) for asked, told in pairs]


def test_kinds_keep_the_means_and_that_long_prompts_have_long_answers():
    draw = random.Random(5)
    pairs = []
    for _ in range(3000):
        asked = int(draw.lognormvariate(6, 0.7)) + 1
        pairs.append((asked, max(1, asked // 4)))
    kinds = joint_kinds(requests(pairs))
    assert sum(kind.share for kind in kinds) == pytest.approx(1.0)
    for place, name in enumerate(("input_tokens", "output_tokens")):
        mean = sum(pair[place] for pair in pairs) / len(pairs)
        assert sum(getattr(k, name) * k.share for k in kinds) == pytest.approx(mean, rel=0.01)
    assert all(k.output_tokens == pytest.approx(k.input_tokens / 4, rel=0.1) for k in kinds)
    assert length_correlation(requests(pairs)) == pytest.approx(1.0, abs=1e-3)


def test_equal_requests_are_one_kind():
    (kind,) = joint_kinds(requests([(622, 250)] * 50))
    assert (kind.input_tokens, kind.output_tokens, kind.share) == (622, 250, 1.0)
    assert length_correlation(requests([(622, 250)] * 50)) is None


def test_separate_distributions_give_every_pair():
    """0.75 and 0.25 by 0.5 and 0.5."""
    kinds = independent_kinds([(10, 0.75), (90, 0.25)], [(5, 0.5), (50, 0.5)])
    assert [(k.input_tokens, k.output_tokens, k.share) for k in kinds] == [
        (10, 5, 0.375),
        (10, 50, 0.375),
        (90, 5, 0.125),
        (90, 50, 0.125),
    ]


def test_the_beginning_of_half_of_the_prompts_is_found_among_others():
    """Three of five begin with `system: x`, two with something else; 2 * 9 of 55 repeat it."""
    prompts = ["system: x1 abc", "system: x2 de", "system: x3 fgh", "hello", "bye there"]
    found = shared_prefix(prompts)
    assert found.common == len("system: x")
    assert found.repeated == pytest.approx(18 / 55)


def test_prompts_with_nothing_in_common_share_nothing():
    found = shared_prefix(["abc", "xyz", "klm"])
    assert (found.common, found.repeated) == (0, 0.0)
