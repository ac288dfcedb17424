"""Where a noisy curve reaches the limit: against lines, steps and least squares."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lmi_bench.analysis.search.slo_curve import DRAWS, SloCurve

LOADS = np.array([4.0, 8.0, 16.0, 32.0, 64.0, 80.0, 100.0])


def line(knee, slope=0.7, loads=LOADS):
    """Log ratios of a power law that reaches the limit at the knee."""
    return slope * np.log(loads / knee)


def crossings(log_ratio, noise, loads=LOADS, **options):
    return SloCurve(np.log(loads), log_ratio, np.full(loads.size, noise)).crossings(**options)


def test_levels_without_noise_give_the_place_of_a_power_law():
    found = np.exp(crossings(line(50.0), 0.0))
    assert np.quantile(found, [0.025, 0.975]) == pytest.approx([50.0, 50.0], rel=0.06)
    assert np.median(found) == pytest.approx(50.0, rel=0.01)


def test_a_straight_curve_is_found_as_surely_as_least_squares_would():
    """The crossing of a fitted line a + b x has the standard error of its height there over b."""
    noise, x = 0.05, np.log(LOADS)
    found = np.concatenate([crossings(line(70.0) + np.random.default_rng(seed).normal(0, noise, 7),
                                      noise, reach=1.0) for seed in range(20)])  # fmt: skip
    at = np.array([1.0, math.log(70.0)])
    design = np.stack([np.ones(7), x], axis=1)
    height = noise * math.sqrt(at @ np.linalg.inv(design.T @ design) @ at)
    least_squares = height / 0.7 * math.sqrt(2)  # of drawn curves about an estimate that errs too
    spread = np.std(found[np.isfinite(found)])
    assert least_squares < spread < 2.5 * least_squares  # a curve may bend, a line may not
    assert np.median(found) == pytest.approx(math.log(70.0), abs=0.05)


def test_a_step_may_lie_anywhere_between_the_levels_around_it():
    loads = np.array([4.0, 16.0, 64.0, 88.0, 92.0, 96.0, 200.0])
    below = np.full(5, -0.5)
    found = np.exp(crossings(np.concatenate([below, [1.3, 1.4]]), 0.02, loads))
    assert np.quantile(found, 0.025) >= 92.0 - 0.1
    assert np.quantile(found, 0.975) <= 96.0 + 0.1
    assert np.median(found) == pytest.approx(94.0, abs=1.0)


def test_noisier_levels_leave_more_open():
    widths = []
    for noise in (0.01, 0.03, 0.1):
        low, high = np.quantile(crossings(line(70.0), noise, reach=1.0), [0.1, 0.9])
        widths.append(high - low)
    assert widths == sorted(widths)
    assert widths[2] > 3 * widths[0]


def test_a_few_requests_above_the_limit_at_a_low_load_do_not_pull_the_boundary_there():
    """Latency does not fall with load: what lies above at 4 users and below at 64 is noise."""
    log_ratio = line(70.0)
    noise = np.full(LOADS.size, 0.03)
    log_ratio[0], noise[0] = 0.1, 0.5
    found = np.exp(SloCurve(np.log(LOADS), log_ratio, noise).crossings(1.0))
    assert np.quantile(found, 0.025) > 60.0


def test_a_curve_that_stays_below_crosses_nowhere_and_one_above_before_all():
    assert np.all(crossings(line(1e6), 0.01) == math.inf)
    assert np.all(crossings(line(0.001), 0.01) == -math.inf)


def test_draws_rise_and_repeat_themselves():
    first, again = (crossings(line(50.0), 0.05) for _ in range(2))
    assert np.array_equal(first, again)
    assert np.all(np.diff(first[np.isfinite(first)]) >= 0)
    assert DRAWS / 10 <= first.size <= DRAWS


def test_draws_do_not_depend_on_the_signs_that_a_processor_gives_eigenvectors(monkeypatch):
    eigh = np.linalg.eigh
    first = crossings(line(50.0), 0.05)

    def flipped(matrix):
        values, vectors = eigh(matrix)
        return values, vectors * np.where(np.arange(len(values)) % 2, -1.0, 1.0)

    monkeypatch.setattr(np.linalg, "eigh", flipped)
    np.testing.assert_allclose(crossings(line(50.0), 0.05), first, rtol=1e-10)


def test_one_level_alone_says_little():
    """Half the slope's prior: 4 users at a third of the limit reach it at 4 * 3 ** (1 / 0.5)."""
    curve = SloCurve(np.array([math.log(4.0)]), np.array([-math.log(3.0)]), np.array([0.02]))
    found = curve.crossings(5.0)
    assert np.median(found) == pytest.approx(math.log(36.0), abs=0.7)
    low, high = found[len(found) // 10], found[9 * len(found) // 10]
    assert high - low > 1.0
