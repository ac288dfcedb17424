"""What machines cost by how they are bought, what a fleet costs, and what its tokens cost.

    cost = sum over hours of committed * price * (1 - d) + max(0, needed - committed) * price

A committed machine is paid for whether or not it is used, so it pays only if it is needed for more
than 1 - d of the hours: its break-even utilisation. Prices in USD per machine and hour.

Tokens cost what the machines cost in the time that they take:

    usd_per_1m = machines * price_per_hour * 1e6 / (3600 * tokens_per_s)

with output tokens, or input and output tokens, per second of the whole fleet. At the user's load
idle capacity is paid for; at saturation nothing is idle. A price of None stays None throughout.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from lmi_bench.analysis.fleet.requirements import Availability, failure_unit
from lmi_bench.analysis.level.layouts import Layout
from lmi_bench.catalog.instances import Instance
from lmi_bench.core.errors import InputError
from lmi_bench.core.units import HOURS_PER_MONTH, SECONDS_PER_HOUR

PurchaseKind = Literal["on-demand", "savings-plan", "reserved", "spot"]
PURCHASE_KINDS: tuple[str, ...] = get_args(PurchaseKind)
_COMMITTED: tuple[str, ...] = ("savings-plan", "reserved")


@dataclass(frozen=True, slots=True)
class Purchase:
    """How the fleet is bought.

    discount   d off the on-demand price; None: from the price list's rate of each machine
    committed  machines that are committed to; None: as many as are needed
    """

    kind: PurchaseKind = "on-demand"
    discount: float | None = None
    committed: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in PURCHASE_KINDS:
            raise InputError(f"--purchase {self.kind}: use {', '.join(PURCHASE_KINDS)}")
        if self.discount is not None and not 0 <= self.discount < 1:
            raise InputError(
                f"--commit-discount must be at least 0 and below 1, got {self.discount:g}"
            )
        if self.committed is not None and self.committed < 0:
            raise InputError(f"--committed must be 0 or more machines, got {self.committed}")
        if self.kind == "on-demand" and self.discount:
            raise InputError("--commit-discount needs --purchase savings-plan, reserved or spot")
        if self.committed is not None and self.kind not in _COMMITTED:
            raise InputError(f"--committed needs --purchase {' or '.join(_COMMITTED)}")

    def discount_for(self, instance: Instance) -> float | None:
        """d of that machine; None where neither a rate nor a discount is known."""
        if self.kind == "on-demand":
            return 0.0
        rate = dict(instance.rates_usd_per_hour).get(self.kind)
        if rate is not None and instance.price_usd_per_hour:
            return 1 - rate / instance.price_usd_per_hour
        return self.discount

    def machine_hours(self, instance: Instance, machines: int) -> float | None:
        """What an hour of that many machines costs, in on-demand prices of one machine.

        >>> from lmi_bench.catalog.instances import find_instance
        >>> Purchase("reserved", 0.25, 2).machine_hours(find_instance("ml.g5.2xlarge"), 5)
        4.5
        """
        discount = self.discount_for(instance)
        if discount is None:
            return None
        committed = machines if self.committed is None else self.committed
        return committed * (1 - discount) + max(0, machines - committed)

    def usd_per_hour(self, instance: Instance, machines: int) -> float | None:
        """USD for an hour of that many machines; None where a price or a rate is not known."""
        hours = self.machine_hours(instance, machines)
        if hours is None or instance.price_usd_per_hour is None:
            return None
        return hours * instance.price_usd_per_hour

    def describe(self) -> str:
        """The purchase for people."""
        if self.kind == "on-demand":
            return "on demand"
        text: str = self.kind
        if self.discount is not None:
            text += f", {self.discount:.0%} off"
        if self.committed is not None:
            text += f", {self.committed} machine(s) committed, more on demand"
        return text


ON_DEMAND = Purchase()


@dataclass(frozen=True, slots=True)
class HoursCost:
    """What a stretch of hours costs, in USD.

    unused_usd  of the committed part: machines that were paid for and not needed
    """

    committed_usd: float
    on_demand_usd: float
    unused_usd: float

    @property
    def total_usd(self) -> float:
        """Both parts together."""
        return self.committed_usd + self.on_demand_usd


def cost_of_hours(
    needed: Sequence[float], price_usd_per_hour: float, *, discount: float, committed: float
) -> HoursCost:
    """The cost of hours in which `needed` machines run each.

    >>> cost_of_hours([1, 1, 2, 4], 10.0, discount=0.3, committed=2).total_usd
    76.0
    """
    rate = price_usd_per_hour * (1 - discount)
    return HoursCost(
        committed_usd=committed * rate * len(needed),
        on_demand_usd=sum(max(0.0, number - committed) for number in needed) * price_usd_per_hour,
        unused_usd=sum(max(0.0, committed - number) for number in needed) * rate,
    )


def break_even_utilisation(discount: float) -> float:
    """Share of the hours for which a machine must be needed before committing to it pays."""
    return 1 - discount


def best_commitment(needed: Sequence[float], *, discount: float) -> int:
    """Machines to commit to: each that is needed for more than the break-even share of hours."""
    least_share = break_even_utilisation(discount)
    committed = 0
    while sum(number > committed for number in needed) > least_share * len(needed):
        committed += 1
    return committed


_MILLION = 1e6
_SAME_RATIO = 0.01  # how far input / output may be off the ratio that a blended price assumes


def usd_per_1m_tokens(fleet_usd_per_hour: float | None, tokens_per_s: float | None) -> float | None:
    """USD for a million tokens; None without a price or without tokens.

    >>> round(usd_per_1m_tokens(1.515, 486.0), 3)
    0.866
    """
    if fleet_usd_per_hour is None or not tokens_per_s:
        return None
    return fleet_usd_per_hour * _MILLION / (SECONDS_PER_HOUR * tokens_per_s)


def usd_per_month(fleet_usd_per_hour: float | None) -> float | None:
    """USD for a month of 730 hours; None without a price."""
    return None if fleet_usd_per_hour is None else fleet_usd_per_hour * HOURS_PER_MONTH


def blended_as_published(
    *,
    price_usd_per_hour: float | None,
    concurrency: float,
    itl_p50_s: float,
    input_tokens: int,
    output_tokens: int,
    slots: int,
    ratio: float = 3.0,
    discount: float = 0.0,
) -> tuple[float | None, str | None]:
    """The blended price of the optimization-toolkit post, or None and why it does not apply.

    blended = (1 - discount) * price / (throughput * 3600 / 1e6) / (ratio + 1)
    throughput = concurrency / p50 ITL

    It counts `ratio` input tokens for each output token and takes every slot to be decoding, so
    it is right only where input = ratio * output and concurrency <= slots.
    """
    if price_usd_per_hour is None:
        return None, "no price is known"
    if not math.isclose(input_tokens, ratio * output_tokens, rel_tol=_SAME_RATIO):
        return None, (
            f"it assumes {ratio:g} input tokens for each output token; "
            f"this workload has {input_tokens} to {output_tokens}"
        )
    if concurrency > slots:
        return None, f"it assumes that all {concurrency:g} requests decode; {slots} can"
    output_cost = usd_per_1m_tokens((1 - discount) * price_usd_per_hour, concurrency / itl_p50_s)
    assert output_cost is not None
    return output_cost / (ratio + 1), None


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
