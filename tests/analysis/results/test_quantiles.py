"""Intervals: their order statistics by hand, and their coverage of a known mean."""

from __future__ import annotations

import numpy as np

from lmi_bench.analysis.results.quantiles import central_interval


def test_the_middle_ninety_percent_of_a_hundred_draws_are_their_own_order_statistics():
    """Of 1..100 the 5 % quantile is 5 and the 95 % quantile 95: never a value in between."""
    draws = np.arange(1.0, 101.0)
    assert central_interval(draws, 0.90) == (5.0, 95.0)


def test_one_draw_is_its_own_interval():
    assert central_interval(np.array([32.0])) == (32.0, 32.0)


def test_the_bootstrap_interval_of_a_mean_covers_it_about_as_often_as_it_says():
    """90 % intervals over 200 data sets of 60 values: 180 covers expected, 165 is 3.5 sd below."""
    rng = np.random.default_rng(11)
    covered = 0
    for _ in range(200):
        values = rng.exponential(1.0, 60)
        means = values[rng.integers(0, 60, size=(400, 60))].mean(axis=1)
        low, high = central_interval(means)
        covered += low <= 1.0 <= high
    assert covered >= 165
