"""What the recommendation says of its runner-up."""

from __future__ import annotations

from dataclasses import replace

from lmi_bench.analysis.fleet.recommender import recommend
from lmi_bench.analysis.fleet.request import RecommendRequest
from lmi_bench.analysis.level.layouts import Workload
from lmi_bench.analysis.model.builtin_profiles import TGI_2023
from lmi_bench.catalog.instances import find_instance
from lmi_bench.catalog.models import find_model

WORKLOAD = Workload(find_model("llama-2-7b"), "float16", 256, 256)


def reason(a10g_price):
    """One A10G against one p4d of 8 copies at its catalog price, both full."""
    small = replace(find_instance("ml.g5.2xlarge"), price_usd_per_hour=a10g_price)
    instances = (small, find_instance("ml.p4d.24xlarge"))
    return recommend(RecommendRequest(WORKLOAD, TGI_2023, instances=instances)).recommended.reason


def test_costs_within_each_others_intervals_are_called_a_tie():
    """p4d full costs about 0.50 USD for 1M tokens; an A10G at 490 tok/s does at 0.88 USD/h."""
    assert "a tie" in reason(0.88)


def test_a_clear_winner_is_not_called_a_tie():
    assert "a tie" not in reason(8.8)
