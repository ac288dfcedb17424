"""Purchases against tables that were worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmi_bench.analysis.fleet.money import Purchase, best_commitment, commitment_of
from lmi_bench.catalog.instances import find_instance
from lmi_bench.core.errors import InputError

FOUR_HOURS = [1, 1, 2, 4]  # machines needed in each of four hours, at 10 USD an hour


@pytest.mark.parametrize(
    ("committed", "committed_usd", "on_demand_usd", "unused_usd"),
    [
        (0, 0.0, 80.0, 0.0),  # 8 machine hours at 10
        (1, 28.0, 40.0, 0.0),  # 4 hours * 7; hours 3 and 4 need 1 and 3 more
        (2, 56.0, 20.0, 14.0),  # 8 * 7; only hour 4 needs 2 more; idle in hours 1 and 2
        (4, 112.0, 0.0, 56.0),  # 16 * 7; 3 + 3 + 2 idle machine hours at 7
    ],
)
def test_committed_machines_are_paid_for_used_or_not(committed, committed_usd, on_demand_usd, unused_usd):
    cost = commitment_of(committed, FOUR_HOURS, 10.0, discount=0.3)
    assert cost.unused_usd == pytest.approx(unused_usd)
    assert cost.usd_per_day == pytest.approx(committed_usd + on_demand_usd)


def test_a_machine_that_is_needed_for_half_the_hours_does_not_pay_at_30_per_cent_off():
    """Break-even is 70 %: the first machine is needed always, the second half of the time."""
    assert best_commitment(FOUR_HOURS, discount=0.3) == 1
    assert best_commitment(FOUR_HOURS, discount=0.6) == 2


@given(needed=st.lists(st.integers(0, 6), min_size=1, max_size=12), discount=st.floats(0.0, 0.9))
def test_the_best_commitment_costs_no_more_than_any_other(needed, discount):
    def cost(committed):
        return commitment_of(committed, needed, 1.0, discount=discount).usd_per_day

    best = cost(best_commitment(needed, discount=discount))
    assert all(best <= cost(other) + 1e-9 for other in range(8))


def test_a_fleet_beyond_its_commitment_pays_on_demand_for_the_rest():
    """2 committed at 25 % off and 3 on demand: 2 * 6 + 3 * 8 USD."""
    machine = replace(find_instance("ml.g5.2xlarge"), price_usd_per_hour=8.0)
    purchase = Purchase("savings-plan", discount=0.25, committed=2)
    assert purchase.usd_per_hour(machine, 5) == pytest.approx(36.0)
    assert purchase.usd_per_hour(machine, 1) == pytest.approx(12.0)
    assert Purchase("spot", discount=0.5).usd_per_hour(machine, 3) == pytest.approx(12.0)


def test_a_discount_that_is_stated_wins_over_the_rate_of_a_price_list():
    """It is what the answer says: 2 machines at 10 % of 8 USD, or without it at the list's 5."""
    machine = replace(find_instance("ml.g5.2xlarge"), price_usd_per_hour=8.0, rates_usd_per_hour=(("reserved", 5.0),))
    assert Purchase("reserved", discount=0.9).usd_per_hour(machine, 2) == pytest.approx(1.6)
    assert Purchase("reserved", discount=0.0).usd_per_hour(machine, 2) == pytest.approx(16.0)
    assert Purchase("reserved").usd_per_hour(machine, 2) == pytest.approx(10.0)


def test_without_a_rate_or_a_discount_there_is_no_committed_price():
    machine = find_instance("ml.g5.2xlarge")
    assert Purchase("savings-plan").usd_per_hour(machine, 1) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "lease"}, "on-demand, savings-plan"),
        ({"discount": 0.1}, "needs --purchase"),
        ({"kind": "spot", "discount": 0.1, "committed": 2}, "needs --purchase savings-plan"),
    ],
)
def test_a_purchase_that_cannot_be_meant_is_refused(options, message):
    with pytest.raises(InputError, match=message):
        Purchase(**options)
