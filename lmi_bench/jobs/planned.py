"""Planning settings as the planner takes them: prices, purchase, limits, drafts, engine settings.

Every function raises InputError that names the option which cannot be used.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from lmi_bench.catalog.instances import Instance
from lmi_bench.catalog.prices import Platform, load_price_list, reprice
from lmi_bench.jobs.settings.planning import PriceSettings


def repriced(instances: Iterable[Instance], settings: PriceSettings) -> tuple[Instance, ...]:
    """The machines with the prices that count: the user's list before the platform's."""
    price_list = None if settings.prices is None else load_price_list(settings.prices)
    platform = cast("Platform", settings.platform)
    return reprice(instances, platform=platform, price_list=price_list)
