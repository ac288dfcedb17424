"""Two constants of an all-reduce: recovered where they are known."""

from __future__ import annotations

import math

import pytest

from lmi_bench.analysis.model.collectives import fit_all_reduce

SIZES = [2**n for n in range(10, 25, 2)]


def test_the_constants_of_exact_times_are_found():
    fit = fit_all_reduce(SIZES, [5e-6 + size / 3e9 for size in SIZES])
    assert fit.latency_s == pytest.approx(5e-6, rel=1e-6)
    assert fit.bytes_per_s == pytest.approx(3e9, rel=1e-6)
    assert fit.worst_error_frac < 1e-6


def test_errors_count_relative_to_the_time():
    """One size takes a tenth longer: no other may be off by more, however small its time."""
    times_s = [5e-6 + size / 3e9 for size in SIZES]
    times_s[-1] *= 1.1
    fit = fit_all_reduce(SIZES, times_s)
    assert fit.worst_error_frac < 0.1
    assert fit.latency_s + SIZES[0] / fit.bytes_per_s == pytest.approx(times_s[0], rel=0.05)


def test_times_that_do_not_grow_have_no_rate_and_none_is_negative():
    fit = fit_all_reduce(SIZES, [1e-3 - size * 1e-12 for size in SIZES])
    assert fit.bytes_per_s == math.inf
    assert fit.latency_s == pytest.approx(1e-3, rel=0.02)
