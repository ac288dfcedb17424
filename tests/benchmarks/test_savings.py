"""The posts' saving, then and now, with the dates of the prices."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.support.savings import saving
from lmi_bench.catalog.instances import find_instance
from lmi_bench.core.errors import InputError

G5, P4D = find_instance("ml.g5.12xlarge"), find_instance("ml.p4d.24xlarge")


def test_the_posts_saving_was_81_per_cent_on_demand_and_is_72_by_todays_prices():
    """7.09 / 37.688 = 0.1881 in January 2025; 7.09 / 25.251286 = 0.2808 now."""
    then = replace(P4D, price_usd_per_hour=37.688, price_region="us-east-1", price_date="2025-01")
    assert saving(G5, then).share == pytest.approx(1 - 0.1881, abs=1e-4)
    now = saving(G5, P4D)
    assert now.share == pytest.approx(1 - 0.2808, abs=1e-4)
    for date in (G5.price_date, P4D.price_date):
        assert date in str(now)


def test_a_saving_without_a_price_is_refused():
    with pytest.raises(InputError, match="--prices"):
        saving(G5, find_instance("ml.p5e.48xlarge"))
