"""A capacity is believed as predicted until levels are measured; then they cut it off."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmi_bench.analysis.fleet.measured_load import CapacityBelief

capacities = st.tuples(st.floats(0.1, 50.0), st.floats(1.0, 4.0)).map(lambda pair: (pair[0], pair[0] * pair[1]))
levels = st.lists(st.tuples(st.floats(0.05, 200.0), st.sampled_from(("kept", "missed"))), max_size=4)


def test_unmeasured_the_lower_end_is_promised_and_the_prediction_has_even_odds():
    belief = CapacityBelief(4.0, 5.0)
    assert belief.sure_per_s == 4.0
    assert belief.chance(5.0) == pytest.approx(0.5)


def test_a_level_that_kept_its_slos_is_certain_and_one_that_missed_is_out():
    belief = CapacityBelief.after(4.0, 5.0, [(4.6, "kept"), (5.2, "missed")])
    assert belief.chance(4.6) == 1.0
    assert belief.chance(5.2) == 0.0
    assert 4.6 <= belief.sure_per_s < 5.2


def test_between_two_levels_odds_are_those_of_the_cut_off_prediction():
    """P(rate) = 0.85 F(x / sd) + 0.15 F(x / wide), sd = ln(5 / 4) / 1.2816, wide = 3 sd + 0.1."""

    def normal(x):
        return 0.5 * (1 + math.erf(x / math.sqrt(2)))

    sd = math.log(5 / 4) / 1.2815515655446004

    def above(rate):
        x = math.log(5 / rate)
        return 0.85 * normal(x / sd) + 0.15 * normal(x / (3 * sd + 0.1))

    belief = CapacityBelief.after(4.0, 5.0, [(4.0, "kept"), (6.0, "missed")])
    expected = (above(5.0) - above(6.0)) / (above(4.0) - above(6.0))
    assert belief.chance(5.0) == pytest.approx(expected)


def test_of_levels_that_contradict_each_other_the_missed_one_counts():
    belief = CapacityBelief.after(4.0, 5.0, [(4.5, "kept"), (3.0, "missed"), (2.0, "kept")])
    assert (belief.kept_per_s, belief.missed_per_s) == (2.0, 3.0)


def test_where_nothing_is_promised_only_a_measured_level_is():
    assert CapacityBelief(0.0, 0.0).sure_per_s == 0.0
    assert CapacityBelief.after(0.0, 0.0, [(1.5, "kept")]).sure_per_s == 1.5


@given(capacity=capacities, measured=levels, rates=st.tuples(st.floats(0.05, 200), st.floats(1, 9)))
def test_a_higher_rate_never_has_a_better_chance(capacity, measured, rates):
    belief = CapacityBelief.after(*capacity, measured)
    rate, factor = rates
    assert 0.0 <= belief.chance(rate * factor) <= belief.chance(rate) + 1e-9 <= 1.0 + 1e-9


@given(capacity=capacities, measured=levels, rate=st.floats(0.05, 200.0))
def test_a_further_level_that_kept_never_lowers_what_is_promised(capacity, measured, rate):
    before = CapacityBelief.after(*capacity, measured).sure_per_s
    after = CapacityBelief.after(*capacity, [*measured, (rate, "kept")]).sure_per_s
    assert after >= before * (1 - 1e-9)


@given(capacity=capacities, measured=levels, rate=st.floats(0.05, 200.0))
def test_a_further_level_that_missed_never_raises_what_is_promised(capacity, measured, rate):
    before = CapacityBelief.after(*capacity, measured).sure_per_s
    after = CapacityBelief.after(*capacity, [*measured, (rate, "missed")]).sure_per_s
    assert after <= before * (1 + 1e-9)
    assert after < rate


def test_a_level_on_the_line_replaces_the_prediction():
    """On the line at 5: sure up to 5 * exp(-1.2816 * 0.06) = 4.63, though 8 was predicted."""
    belief = CapacityBelief.after(7.0, 8.0, [(5.0, "near")])
    assert belief.sure_per_s == pytest.approx(4.63, abs=0.01)
    assert belief.chance(5.0) == pytest.approx(0.5)
    assert belief.chance(6.0) < 0.1


def test_what_was_decided_counts_more_than_what_was_near():
    """Missed at 4, so the level on the line at 5 was lucky; kept at 6: it was not."""
    missed = CapacityBelief.after(7.0, 8.0, [(4.0, "missed"), (5.0, "near")])
    assert missed.sure_per_s < 4.0
    kept = CapacityBelief.after(7.0, 8.0, [(6.0, "kept"), (5.0, "near")])
    assert kept.sure_per_s >= 6.0


def test_near_and_missed_levels_agree_on_the_capacity():
    """Missed at 8.8, on the line at 7.3: seven machines of 6.25 are enough, six of 7.3 are not."""
    belief = CapacityBelief.after(8.5, 11.6, [(8.8, "missed"), (7.3, "near")])
    assert 6.25 < belief.sure_per_s < 7.3
