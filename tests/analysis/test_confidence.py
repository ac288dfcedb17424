"""Confidence against accuracy, by hand."""

from __future__ import annotations

import math

import pytest

from lmi_bench.analysis.confidence import calibration, shares


def test_an_overconfident_model_has_a_gap_and_a_calibrated_one_has_none():
    """Ten answers at 0.9, six right: 0.3 too sure. With nine right there is no gap."""
    bins, error = calibration([(0.9, place < 6) for place in range(10)])
    assert (bins[0].low, bins[0].high, bins[0].count) == (0.8, 1.0, 10)
    assert bins[0].overconfidence == pytest.approx(0.3)
    assert error == pytest.approx(0.3)
    assert calibration([(0.9, place < 9) for place in range(10)])[1] == pytest.approx(0.0)


def test_the_error_weighs_bins_by_their_answers():
    """4 of 5 answers have a gap of 0.1, one of 0.5: 0.8 * 0.1 + 0.2 * 0.5."""
    answers = [(0.85, True), (0.85, True), (0.85, True), (0.85, False), (0.5, False)]
    bins, error = calibration(answers)
    assert [each.count for each in bins] == [1, 4]
    assert error == pytest.approx(0.8 * 0.1 + 0.2 * 0.5)


def test_shares_among_choices_are_their_probabilities_over_the_sum():
    assert shares([math.log(0.2), math.log(0.6)]) == pytest.approx([0.25, 0.75])
    assert shares([-1000.0, -1000.0]) == [0.5, 0.5]
