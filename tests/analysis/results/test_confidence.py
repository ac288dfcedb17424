"""Scores of given answers, and how far they can be believed: by hand."""

from __future__ import annotations

import math

import pytest

from lmi_bench.analysis.results.confidence import calibration_table, shares


def test_shares_are_the_probabilities_of_one_of_the_answers():
    """0.2 and 0.05 of all texts: 80 % and 20 % of these two."""
    assert shares([math.log(0.2), math.log(0.05)]) == pytest.approx([0.8, 0.2])


def test_shares_of_long_answers_do_not_vanish():
    """exp(-2000) is 0 in floating point; the ratio is not."""
    assert shares([-2000.0, -2000.0 + math.log(3)]) == pytest.approx([0.25, 0.75])


def test_an_overconfident_model_is_shown_by_how_much():
    """Ten answers at 0.95, of which 6 are right; four at 0.55, of which 2 are: the rows are off
    by 0.35 and 0.05, the expected error is (10 * 0.35 + 4 * 0.05) / 14."""
    results = [(0.95, n < 6) for n in range(10)] + [(0.55, n < 2) for n in range(4)]
    table = calibration_table(results)
    assert [(row.low_frac, row.count, row.right_frac) for row in table.rows] == [(0.5, 4, 0.5), (0.9, 10, 0.6)]
    assert (table.right, table.count) == (8, 14)
    assert table.expected_error == pytest.approx((10 * 0.35 + 4 * 0.05) / 14)


@pytest.mark.parametrize(("value", "low"), [(0.0, 0.0), (0.1, 0.0), (0.1001, 0.1), (1.0, 0.9)])
def test_a_row_holds_what_is_above_its_lower_end(value, low):
    assert calibration_table([(value, True)]).rows[0].low_frac == pytest.approx(low)
