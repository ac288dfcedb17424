"""How a fleet is bought, what may fail, and what it may cost at most."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from lmi_bench.core.option import Option
from lmi_bench.jobs.settings import planning
from lmi_bench.jobs.settings.planning import LIMITS, PRICES, PriceSettings


@dataclass(frozen=True, slots=True)
class PurchaseSettings:
    """Prices, the way of buying, and spare machines."""

    GROUP: ClassVar = PRICES

    price_list: PriceSettings = field(default_factory=PriceSettings)
    region: Annotated[
        tuple[str, ...], Option("Region whose prices count; repeatable.", default="all", rare=True)
    ] = ()
    purchase: Annotated[str, Option("Purchase: on-demand, savings-plan, reserved or spot.")] = (
        "on-demand"
    )
    commit_discount: Annotated[float | None, planning.COMMIT_DISCOUNT] = None
    committed: Annotated[
        int | None,
        Option("Committed machines, used or not.", default="as many as are needed", rare=True),
    ] = None
    availability: Annotated[
        str,
        Option(
            "Availability: none, n+1 (one machine may fail) or az:K (one of K zones).", group=LIMITS
        ),
    ] = "none"


@dataclass(frozen=True, slots=True)
class LimitSettings:
    """What a fleet must carry, and what it may cost."""

    GROUP: ClassVar = LIMITS

    min_throughput: Annotated[
        float | None, Option("Least output tok/s that the fleet must be able to carry.")
    ] = None
    max_usd_per_hour: Annotated[
        float | None, Option("Highest price of the fleet in USD per hour.")
    ] = None
    max_usd_per_month: Annotated[
        float | None, Option("Highest price of the fleet in USD per month of 730 hours.")
    ] = None
    max_usd_per_1m: Annotated[
        float | None, Option("Highest price of 1M output tokens at the load in USD.")
    ] = None
