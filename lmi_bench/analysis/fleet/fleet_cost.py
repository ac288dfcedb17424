"""What a fleet costs an hour: machines for the load, spare ones, and how they are bought."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lmi_bench.analysis.fleet.availability import Availability, failure_unit
from lmi_bench.analysis.fleet.purchase import Purchase, break_even_utilisation
from lmi_bench.analysis.level.layouts import Layout


@dataclass(frozen=True, slots=True)
class FleetCost:
    """USD per hour of a fleet, None where a price or a rate is not known.

    needed, machines      that carry the load, and with the spare ones
    availability_usd      of the fleet's price: what the spare machines add
    """

    layout: Layout
    purchase: Purchase
    availability: Availability
    needed: int
    machines: int

    @property
    def usd_per_hour(self) -> float | None:
        """The whole fleet."""
        return self.purchase.usd_per_hour(self.layout.instance, self.machines)

    @property
    def availability_usd_per_hour(self) -> float | None:
        """What the spare machines add."""
        without = self.purchase.usd_per_hour(self.layout.instance, self.needed)
        if self.usd_per_hour is None or without is None:
            return None
        return self.usd_per_hour - without

    def to_json(self) -> dict[str, Any]:
        """As it stands in the file, the machine's price with its component, region and date."""
        instance, layout = self.layout.instance, self.layout
        discount = self.purchase.discount_for(instance)
        unpriced = instance.price_usd_per_hour is None
        return {
            "purchase": self.purchase.describe(),
            "discount": discount,
            "committed_machines": self.purchase.committed,
            "paid_machine_hours_per_hour": self.purchase.machine_hours(instance, self.machines),
            "break_even_utilisation": (
                None if discount is None else break_even_utilisation(discount)
            ),
            "machine_price_usd_per_hour": instance.price_usd_per_hour,
            "price_component": None if unpriced else instance.price_component,
            "price_region": None if unpriced else instance.price_region,
            "price_date": None if unpriced else instance.price_date,
            "availability": self.availability.describe(),
            "machines_for_the_load": self.needed,
            "spare_machines": self.machines - self.needed,
            "availability_usd_per_hour": self.availability_usd_per_hour,
            "failure_unit": failure_unit(
                copies=layout.copies,
                tensor_parallel=layout.tensor_parallel,
                instance_type=instance.instance_type,
            ),
        }


def price_line(cost: Mapping[str, Any]) -> str:
    """Component, region and date of a machine's price, for people."""
    price = cost["machine_price_usd_per_hour"]
    if price is None:
        return "price unknown"
    return (
        f"USD {price:,.3f} a machine and hour ({cost['price_component']}, "
        f"{cost['price_region']}, {cost['price_date']})"
    )
