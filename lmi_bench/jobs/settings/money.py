"""How a fleet is bought, what may fail, and what it may cost at most."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from lmi_bench.core.option import option
from lmi_bench.jobs.settings import planning
from lmi_bench.jobs.settings.planning import LIMITS, PRICES, PriceSettings


@dataclass(frozen=True, slots=True)
class PurchaseSettings:
    """Prices, the way of buying, and spare machines."""

    GROUP: ClassVar = PRICES

    price_list: PriceSettings = field(default_factory=PriceSettings)
    region: tuple[str, ...] = option(
        "Region whose prices count; repeatable.", value=(), default="all", rare=True
    )
    purchase: str = option(
        "Purchase: on-demand, savings-plan, reserved or spot.", value="on-demand"
    )
    commit_discount: Annotated[float | None, planning.COMMIT_DISCOUNT] = None
    committed: int | None = option(
        "Committed machines, used or not.", default="as many as are needed", rare=True
    )
    availability: str = option(
        "Availability: none, n+1 (one machine may fail) or az:K (one of K zones).",
        value="none",
        group=LIMITS,
    )


@dataclass(frozen=True, slots=True)
class LimitSettings:
    """What a fleet must carry, and what it may cost."""

    GROUP: ClassVar = LIMITS

    min_throughput: float | None = option(
        "Least output tok/s that the fleet must be able to carry."
    )
    max_usd_per_hour: float | None = option("Highest price of the fleet in USD per hour.")
    max_usd_per_month: float | None = option(
        "Highest price of the fleet in USD per month of 730 hours."
    )
    max_usd_per_1m: float | None = option("Highest price of 1M output tokens at the load in USD.")
