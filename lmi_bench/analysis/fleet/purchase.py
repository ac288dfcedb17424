"""What machines cost by how they are bought: on demand, committed for a term, or spot.

    cost = sum over hours of committed * price * (1 - d) + max(0, needed - committed) * price

A committed machine is paid for whether or not it is used, so it pays only if it is needed for more
than 1 - d of the hours: its break-even utilisation. Prices in USD per machine and hour.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from lmi_bench.catalog.instances import Instance
from lmi_bench.core.errors import InputError

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
