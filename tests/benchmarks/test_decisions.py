"""Decisions on published tables, and the rule by hand."""

from __future__ import annotations

import statistics

import pytest

from benchmarks.published_decisions import LIMITS_MS, decisions
from benchmarks.support.decisions import Option, choose, decide
from lmi_bench.analysis.model.builtin_profiles import TGI_2023

CHEAP = Option("cheap", 1.0, 40.0, 1.2, 55.0, log_sd=0.1)
MIDDLE = Option("middle", 2.0, 30.0, 2.0, 33.0, log_sd=0.1)
FAST = Option("fast", 5.0, 10.0, 5.0, 11.0, log_sd=0.1)
ALL = (CHEAP, MIDDLE, FAST)


def test_the_cheapest_that_is_sure_to_keep_the_limit_is_chosen():
    """An 80 % interval of 10 % is a factor of 1.137: 40 becomes 45.5, 30 becomes 34.1."""
    assert choose(ALL, 50.0) is CHEAP
    assert choose(ALL, 45.0) is MIDDLE
    assert choose(ALL, 34.0) is FAST


def test_without_a_sure_one_the_likely_one_is_chosen():
    assert choose((MIDDLE,), 31.0) is MIDDLE
    assert choose(ALL, 9.0) is None


def test_regret_is_the_true_cost_over_the_cheapest_that_keeps_the_limit():
    assert decide(ALL, 45.0).regret == pytest.approx(1.0)
    broken = decide(ALL, 50.0)
    assert not broken.kept
    assert broken.regret is None
    assert decide((MIDDLE, FAST), 32.0).regret == pytest.approx(1.0)
    assert decide((CHEAP, FAST), 60.0).regret == pytest.approx(1.0)


@pytest.fixture(scope="module")
def published():
    return decisions(TGI_2023)


def test_limits_on_the_published_tables_are_kept_at_little_regret(published):
    """Nine limits of ms/token: at least eight kept, median regret 1.05 at most, none above 2."""
    assert len(published) == len(LIMITS_MS) == 9
    assert sum(each.kept for each in published) >= 8
    regrets = [each.regret for each in published if each.regret is not None]
    assert statistics.median(regrets) <= 1.05
    assert max(regrets) <= 2.0


def test_a_looser_limit_never_costs_more(published):
    costs = [each.chosen.predicted_usd for each in published]
    assert costs == sorted(costs, reverse=True)
