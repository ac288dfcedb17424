"""Winners by load: staircases that can be compared by hand, and the planner's own."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmi_bench.analysis.fit.uncertainty import Estimate
from lmi_bench.analysis.fleet.ranking import frontier
from lmi_bench.analysis.fleet.recommender import recommend
from lmi_bench.analysis.fleet.request import RecommendRequest
from lmi_bench.analysis.fleet.vary import Stairs, compare_stairs, parse_range, vary_rate
from lmi_bench.analysis.level.layouts import Layout, Workload
from lmi_bench.analysis.model.builtin_profiles import TGI_2023
from lmi_bench.catalog.instances import find_instance
from lmi_bench.catalog.models import find_model
from lmi_bench.core.errors import InputError
from lmi_bench.core.load import Load
from lmi_bench.core.slo import parse_slo

SMALL = Layout(find_instance("ml.g5.2xlarge"), 1)
LARGE = Layout(find_instance("ml.p4d.24xlarge"), 1)


def stairs(layout, unit, price, high):
    machines = tuple(range(1, int(np.ceil(high / unit - 1e-9)) + 1))
    figure = Estimate(1.2 * unit, unit, 1.4 * unit)
    return Stairs(layout, figure, machines, tuple(price * n for n in machines))


def test_cheap_ones_win_until_one_big_machine_costs_less():
    """Small: 1 req/s for 2 USD. Large: 10 req/s for 9 USD.

    Up to 4 req/s small ones cost 2, 4, 6, 8 USD; the fifth would cost 10, so one large machine
    carries 4 to 10. Beyond that, a large one with small ones is not a fleet: 18 USD buys two large
    ones or nine small ones, and more than ten small ones cost 22. So large wins to 20.
    """
    found = compare_stairs([stairs(SMALL, 1.0, 2.0, 20.0), stairs(LARGE, 10.0, 9.0, 20.0)], 0.5, 20.0)
    assert [(each.instance, each.to_per_s) for each in found.intervals] == [
        ("ml.g5.2xlarge", 4.0),
        ("ml.p4d.24xlarge", 20.0),
    ]
    first, second = found.intervals
    assert (first.fewest_machines, first.most_machines) == (1, 4)
    assert (first.least_usd_per_hour, first.most_usd_per_hour) == (2.0, 8.0)
    assert (second.fewest_machines, second.most_machines) == (1, 2)
    assert found.crossovers == (Estimate(pytest.approx(4.8), 4.0, pytest.approx(5.6)),)
    assert first.to_per_s == second.from_per_s == 4.0


def winner_at(found, rate):
    return next(each for each in found.intervals if each.from_per_s < rate <= each.to_per_s)


@settings(max_examples=60)
@given(
    units=st.lists(st.floats(0.5, 9.0), min_size=1, max_size=3),
    prices=st.lists(st.floats(0.5, 20.0), min_size=3, max_size=3),
    share=st.floats(0.01, 1.0),
)
def test_at_every_load_the_winner_costs_no_more_than_any_fleet(units, prices, share):
    high = 20.0
    layouts = (SMALL, LARGE, Layout(find_instance("ml.g5.12xlarge"), 4))
    table = [stairs(layout, unit, price, high) for layout, unit, price in zip(layouts, units, prices, strict=False)]
    rate = 0.1 + share * (high - 0.1)
    winner = winner_at(compare_stairs(table, 0.1, high), rate)
    costs = {
        each.layout.instance.instance_type: price * np.ceil(rate / each.unit.low - 1e-9)
        for each, price in zip(table, prices, strict=False)
    }
    assert costs[winner.instance] == pytest.approx(min(costs.values()))


def test_the_winner_of_a_load_is_what_is_recommended_for_it():
    workload = Workload(find_model("llama-2-7b"), "float16", 256, 256)
    request = RecommendRequest(
        workload,
        TGI_2023,
        load=Load(rate_per_s=2.0),
        slos=(parse_slo("latency_per_token_p90<=60ms"),),
        instances=(SMALL.instance, LARGE.instance),
    )
    found = vary_rate(request, 1.0, 60.0)
    assert len(found.intervals) >= 2
    assert found.intervals[0].from_per_s == 1.0
    assert found.intervals[-1].to_per_s == 60.0
    winner = winner_at(found, 2.0)
    best = recommend(request).recommended
    assert (best.instance, best.tensor_parallel) == (winner.instance, winner.tensor_parallel)
    assert winner.fewest_machines <= best.instances <= winner.most_machines


def test_a_range_is_two_rates():
    assert parse_range("rate=1..50") == (1.0, 50.0)


@pytest.mark.parametrize("text", ["rate=5", "rate=5..1", "load=1..2", "rate=0..2", "rate=a..b"])
def test_a_range_that_is_not_understood_names_the_form(text):
    with pytest.raises(InputError, match=r"rate=A\.\.B"):
        parse_range(text)


def test_without_a_staircase_there_is_no_winner():
    with pytest.raises(InputError, match="no priced layout"):
        compare_stairs([], 1.0, 2.0)


def test_a_fleet_that_is_worse_in_both_is_not_on_the_frontier():
    """Nor one as dear and slower, or as fast and dearer; of equal ones the first stays."""

    def fleet(cost, latency):
        figures = {"latency_per_token_p90_ms": Estimate(latency, latency, latency)}
        return SimpleNamespace(usd_per_1m_output_tokens=cost, figures=figures)

    points = [(2.0, 3.0), (1.0, 9.0), (3.0, 3.5), (3.0, 3.0), (4.0, 1.0), (2.0, 5.0), (1.0, 9.0)]
    fleets = [fleet(*point) for point in points]
    found = frontier(SimpleNamespace(objective="cost"), fleets)
    assert [id(each) for each in found] == [id(fleets[place]) for place in (1, 0, 4)]
