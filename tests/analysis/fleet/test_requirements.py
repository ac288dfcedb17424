"""Budgets, throughput, regions, spares and purchases in a recommendation."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest

from lmi_bench.analysis.fleet.money import (
    NO_SPARES,
    ON_DEMAND,
    Availability,
    Purchase,
    Requirements,
    fleet_cost,
    parse_availability,
)
from lmi_bench.analysis.fleet.recommender import recommend
from lmi_bench.analysis.fleet.request import RecommendRequest
from lmi_bench.analysis.level.layouts import Layout, Workload
from lmi_bench.analysis.model.builtin_profiles import TGI_2023
from lmi_bench.analysis.model.engine_setting import AS_STATED, EngineSetting
from lmi_bench.catalog.instances import all_instances, find_instance
from lmi_bench.catalog.models import find_model
from lmi_bench.core.errors import InputError
from lmi_bench.core.load import Load
from lmi_bench.core.slo import parse_slo

LLAMA = Workload(find_model("llama-2-7b"), "float16", 256, 256)
SMALL, LARGE = find_instance("ml.g5.2xlarge"), find_instance("ml.p4d.24xlarge")


@functools.cache
def ask(instances=(SMALL, LARGE), rate_per_s=6.0, **options):
    limits = (parse_slo("latency_per_token_p90<=60ms"),)
    options = {"slos": limits, "load": None if rate_per_s is None else Load(rate_per_s=rate_per_s)} | options
    return recommend(RecommendRequest(LLAMA, TGI_2023, instances=instances, **options))


@pytest.mark.parametrize(
    ("text", "machines", "surviving"),
    [
        # needed: 1, 2, 3, 5
        ("none", (1, 2, 3, 5), (1, 2, 3, 5)),
        ("n+1", (2, 3, 4, 6), (1, 2, 3, 5)),
        ("az:2", (2, 4, 6, 10), (1, 2, 3, 5)),  # 2 * ceil(N0 / 1)
        ("az:3", (3, 3, 6, 9), (2, 2, 4, 6)),  # 3 * ceil(N0 / 2)
    ],
)
def test_machines_for_an_availability(text, machines, surviving):
    wanted = parse_availability(text)
    assert wanted.describe() == text
    assert tuple(wanted.machines(n) for n in (1, 2, 3, 5)) == machines
    assert tuple(wanted.surviving(n) for n in machines) == surviving


@pytest.mark.parametrize("text", ["az:1", "az:", "n+2", "az:-3", ""])
def test_an_unknown_availability_names_the_forms(text):
    with pytest.raises(InputError, match=r"none, n\+1, or az:K"):
        parse_availability(text)


def test_eight_copies_on_one_machine_fail_together():
    layout = Layout(find_instance("ml.p4d.24xlarge"), 1)
    of = {"needed": 1, "machines": 1, "capacity_tokens_per_s": 1.0}
    cost = fleet_cost(layout, ON_DEMAND, NO_SPARES, **of)
    assert cost.failure_unit == "one ml.p4d.24xlarge: its 8 copies at TP 1 fail together"


def test_the_cost_of_spares_is_a_line_of_its_own():
    plain = ask(instances=(SMALL,)).recommended
    spared = ask(instances=(SMALL,), availability=Availability(zones=3)).recommended
    needed = plain.instances
    assert spared.cost.machines_for_the_load == needed
    assert spared.instances == 3 * -(-needed // 2)
    assert spared.cost.spare_machines == spared.instances - needed
    assert spared.price_usd_per_hour == pytest.approx(1.515 * spared.instances)
    assert spared.cost.availability_usd_per_hour == pytest.approx(1.515 * (spared.instances - needed))


def test_latencies_with_a_spare_are_those_after_its_failure():
    """n + 1 machines with one down are the n machines that carry the load."""
    plain = ask(instances=(SMALL,)).recommended
    spared = ask(instances=(SMALL,), availability=Availability(spare_machines=1)).recommended
    assert spared.instances == plain.instances + 1
    assert spared.figures["e2e_p90_ms"] == plain.figures["e2e_p90_ms"]
    assert spared.usd_per_1m_output_tokens > plain.usd_per_1m_output_tokens


def test_a_fleet_carries_the_throughput_that_is_asked_for():
    """6 req/s are 1,536 tok/s; 5,000 tok/s need more machines."""
    least = Requirements(min_throughput_tokens_per_s=5000.0)
    for candidate in ask(requirements=least).candidates:
        assert candidate.figures["capacity_tokens_per_s"].low >= 5000 - 1e-6


def test_a_budget_rejects_with_both_numbers():
    answer = ask(requirements=Requirements(max_usd_per_hour=20.0))
    assert {c.instance for c in answer.candidates} == {"ml.g5.2xlarge"}
    reasons = [r.reason for r in answer.rejected if r.instance_type == "ml.p4d.24xlarge"]
    assert any("USD 25.25 an hour, more than --max-usd-per-hour 20" in r for r in reasons)


def test_a_fleet_over_the_budget_is_named_with_its_engine_s_setting():
    narrow = EngineSetting(kv_dtype="float8")
    answer = ask(requirements=Requirements(max_usd_per_hour=20.0), settings=(AS_STATED, narrow))
    too_dear = [each for each in answer.rejected if "over the budget" in each.reason]
    assert {each.setting for each in too_dear} == {None, "float8 cache"}


def test_a_budget_out_of_reach_names_the_nearest_and_exits_99():
    answer = ask(requirements=Requirements(max_usd_per_month=100.0))
    assert answer.exit_code == 99
    assert answer.recommended is None
    assert answer.nearest.instance == "ml.g5.2xlarge"
    assert answer.nearest.usd_per_month == 730 * answer.nearest.price_usd_per_hour
    assert "nearest to the budget" in answer.nearest.reason


def test_a_price_of_another_region_is_not_used():
    answer = ask(requirements=Requirements(regions=("us-east-1",)))
    assert {c.instance for c in answer.candidates} == {"ml.g5.2xlarge"}
    assert any("us-west-2" in rejection.reason for rejection in answer.rejected)


def test_a_region_without_any_price_is_not_answered_by_what_has_none():
    """What the catalog has no price of at all would else win, however large."""
    with pytest.raises(InputError, match="no price is known in eu-west-1; known are prices of"):
        ask(instances=all_instances(), requirements=Requirements(regions=("eu-west-1",)))


def test_a_commitment_to_more_than_is_needed_is_paid_for():
    """10 machines committed at 40 % off are 10 * 1.515 * 0.6 USD, though fewer are needed."""
    bought = Purchase("savings-plan", discount=0.4, committed=10)
    best = ask(instances=(SMALL,), purchase=bought).recommended
    assert best.instances < 10
    assert best.price_usd_per_hour == pytest.approx(10 * 1.515 * 0.6)
    assert best.cost.break_even_utilisation == pytest.approx(0.6)


def test_an_unpriced_machine_wins_below_the_price_that_is_named():
    unpriced = replace(LARGE, price_usd_per_hour=None)
    answer = ask(instances=(SMALL, unpriced), objective="cost-per-1m", degrees=(1,))
    price = next(c.cost.wins_below_usd_per_machine_hour for c in answer.candidates if c.instance == "ml.p4d.24xlarge")
    for factor, winner in ((0.98, "ml.p4d.24xlarge"), (1.02, "ml.g5.2xlarge")):
        priced = replace(LARGE, price_usd_per_hour=price * factor)
        again = ask(instances=(SMALL, priced), objective="cost-per-1m", degrees=(1,))
        assert again.recommended.instance == winner


@pytest.mark.parametrize("objective", ["cost", "cost-per-hour", "cost-per-1m"])
def test_the_winner_has_the_least_of_what_its_objective_names(objective):
    answer = ask(objective=objective)

    def value(candidate):
        if objective == "cost-per-1m":
            tokens = candidate.figures["capacity_tokens_per_s"].value
            return candidate.price_usd_per_hour / (tokens * 0.0036)
        return candidate.price_usd_per_hour

    assert value(answer.recommended) == pytest.approx(min(map(value, answer.candidates)))
