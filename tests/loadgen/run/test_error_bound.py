"""The stated bound: whatever the true times were, the true quantile lies within it."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmi_bench.loadgen.http.receive_signals import ReceiveSignals
from lmi_bench.loadgen.run.self_check import gaps, ttfts

LATE = st.floats(0.0, 0.02)


@given(
    st.lists(st.tuples(st.floats(0.01, 1.0), LATE, st.floats(0.0, 1.0)), min_size=1, max_size=60),
    st.sampled_from([0.5, 0.99]),
)
def test_the_true_ttft_quantile_lies_within_the_bound(samples, q):
    """Each reported value is the true one plus a part of what it may be late by."""
    true = [value for value, _, _ in samples]
    reported = [value + late * part for value, late, part in samples]
    bound = ttfts(reported, [late for _, late, _ in samples]).quantile(q)
    truth = float(np.quantile(true, q))
    assert bound.low_s - 1e-12 <= truth <= bound.high_s + 1e-12
    assert abs(bound.reported_s - truth) <= bound.error_s + 1e-12


@given(
    st.lists(st.lists(st.tuples(st.floats(0.021, 0.1), LATE, st.floats(0.0, 1.0)), min_size=1), min_size=1, max_size=8),
    st.sampled_from([0.5, 0.99]),
)
def test_the_true_itl_quantile_lies_within_the_bound(streams, q):
    signals, true_gaps = ReceiveSignals("user"), []
    for stream in streams:
        true = np.cumsum([step for step, _, _ in stream])
        true_gaps.extend(np.diff(true))
        stamps = [t + late * part for t, (_, late, part) in zip(true, stream, strict=True)]
        signals.add_answer(stamps, [late for _, late, _ in stream])
    bound = gaps(signals).quantile(q)
    if not true_gaps:
        assert bound is None
    else:
        truth = float(np.quantile(true_gaps, q))
        assert bound.low_s - 1e-12 <= truth <= bound.high_s + 1e-12


def test_exact_times_have_no_bound_to_state_but_zero():
    bound = ttfts([0.2, 0.3, 0.4], [0.0, 0.0, 0.0]).quantile(0.99)
    assert bound.error_s == 0.0


def test_a_few_unknown_times_leave_the_median_known_and_the_p99_not():
    """Three of a hundred may have been anywhere before: the highest true values may be lower."""
    values = [0.2 + i / 1000 for i in range(100)]
    bounds = [None if i >= 97 else 0.001 for i in range(100)]
    median = ttfts(values, bounds).quantile(0.5)
    assert median.low_s == pytest.approx(np.quantile(values, 0.5) - 0.001 - 0.003, abs=0.0011)
    assert ttfts(values, [None] * 100).quantile(0.99) is None


def test_parts_of_two_receivers_add_up_to_one():
    first, second = ReceiveSignals("kernel"), ReceiveSignals("kernel")
    first.add_answer([1.0, 1.5], [0.1, 0.0])
    second.add_answer([2.0, 2.25, 2.5], [0.0, 0.0, math.inf])
    both = gaps(first + second)
    assert list(both.values_s) == [0.5, 0.25, 0.25]
    assert list(both.high_s) == [0.6, 0.25, 0.25]
    assert list(both.low_s) == [0.5, 0.25, -math.inf]
