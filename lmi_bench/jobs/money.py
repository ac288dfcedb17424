"""The flags on prices, purchase, availability and limits, as the planner takes them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from lmi_bench.analysis.fleet.availability import Availability, parse_availability
from lmi_bench.analysis.fleet.purchase import Purchase, PurchaseKind
from lmi_bench.analysis.fleet.requirements import Requirements
from lmi_bench.catalog.instances import Instance
from lmi_bench.catalog.prices import Platform, load_price_list, reprice
from lmi_bench.core.errors import InputError


@dataclass(frozen=True, slots=True)
class Money:
    """What the flags say; None and () are what was left out."""

    prices: Path | None = None
    platform: Platform = "sagemaker"
    regions: tuple[str, ...] = ()
    purchase: str = "on-demand"
    commit_discount: float | None = None
    committed: int | None = None
    availability: str = "none"
    min_throughput: float | None = None
    max_usd_per_hour: float | None = None
    max_usd_per_month: float | None = None
    max_usd_per_1m: float | None = None

    def reprice(self, instances: Iterable[Instance]) -> tuple[Instance, ...]:
        """The machines with the prices that count; raises InputError for a faulty list."""
        price_list = None if self.prices is None else load_price_list(self.prices)
        return reprice(instances, platform=self.platform, price_list=price_list)

    def purchase_plan(self) -> Purchase:
        """How the fleet is bought; raises InputError where that cannot be."""
        if self.purchase == "spot" and self.platform == "sagemaker":
            raise InputError(
                "--purchase spot: SageMaker endpoints are not sold as spot capacity; add "
                "--platform ec2, or use savings-plan"
            )
        plan = Purchase(cast("PurchaseKind", self.purchase), self.commit_discount, self.committed)
        if plan.kind != "on-demand" and plan.discount is None and self.prices is None:
            raise InputError(
                f"--purchase {plan.kind}: no rate is known; give --commit-discount D (0 to 1), or "
                "a --prices file with rates"
            )
        return plan

    def availability_wanted(self) -> Availability:
        """What may fail."""
        return parse_availability(self.availability)

    def requirements(self) -> Requirements:
        """The limits on the fleet."""
        return Requirements(
            min_throughput_tokens_per_s=self.min_throughput,
            max_usd_per_hour=self.max_usd_per_hour,
            max_usd_per_month=self.max_usd_per_month,
            max_usd_per_1m_output=self.max_usd_per_1m,
            regions=self.regions,
        )
