"""Purchase, availability and limits of a fleet, its cost, and the cost of its tokens.

    cost = sum over hours of committed * price * (1 - d) + max(0, needed - committed) * price

A committed machine is paid for in every hour, so committing pays only above its break-even
utilisation, 1 - d of the hours. Prices in USD per machine and hour.

    usd_per_1m = machines * price_per_hour * 1e6 / (3600 * tokens_per_s)

with the output tokens, or all tokens, of the whole fleet. At the user's load idle capacity is paid
for too. A price of None gives a cost of None.

N0 machines carry the load by the lower end of their capacity. An availability of `n+1` adds a
machine; `az:K` spreads K * ceil(N0 / (K - 1)) machines evenly over K zones, one of which may fail.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from lmi_bench.analysis.level.layouts import Layout, Rejection
from lmi_bench.catalog.instances import Instance
from lmi_bench.core.errors import InputError
from lmi_bench.core.json_value import OPTIONAL, JsonValue
from lmi_bench.core.units import SECONDS_PER_HOUR

PurchaseKind = Literal["on-demand", "savings-plan", "reserved", "spot"]
PURCHASE_KINDS: tuple[str, ...] = get_args(PurchaseKind)
_COMMITTED: tuple[str, ...] = ("savings-plan", "reserved")


@dataclass(frozen=True, slots=True)
class Purchase:
    """The purchase of a fleet.

    discount   d off the on-demand price; None: from the price list's rate of each machine
    committed  committed machines; None: as many as are needed
    """

    kind: PurchaseKind = "on-demand"
    discount: float | None = None
    committed: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in PURCHASE_KINDS:
            raise InputError(f"--purchase {self.kind}: use {', '.join(PURCHASE_KINDS)}")
        if self.kind == "on-demand" and self.discount:
            raise InputError("--commit-discount needs --purchase savings-plan, reserved or spot")
        if self.committed is not None and self.kind not in _COMMITTED:
            raise InputError(f"--committed needs --purchase {' or '.join(_COMMITTED)}")

    def discount_for(self, instance: Instance) -> float | None:
        """d of that machine: as stated, else by its rate; None without either."""
        if self.kind == "on-demand" or self.discount is not None:
            return self.discount or 0.0
        rate = dict(instance.rates_usd_per_hour).get(self.kind)
        if rate is None or not instance.price_usd_per_hour:
            return None
        return 1 - rate / instance.price_usd_per_hour

    def machine_hours(self, instance: Instance, machines: int) -> float | None:
        """Cost of an hour of that many machines, in on-demand prices of one machine.

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
        """USD for an hour of that many machines; None without a price or rate."""
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
class Commitment:
    """Committed machines over a day, and its cost; unused_usd: of those while not needed."""

    machines: int
    usd_per_day: float
    unused_usd: float


def commitment_of(machines: int, needed: Sequence[float], price_usd: float, *, discount: float) -> Commitment:
    """A commitment over a day of equal steps with `needed` machines each.

    price_usd  of a machine for a step, on demand

    >>> commitment_of(2, [1, 1, 2, 4], 10.0, discount=0.3).usd_per_day
    76.0
    """
    rate = price_usd * (1 - discount)
    on_demand = sum(max(0.0, number - machines) for number in needed)
    unused = sum(max(0.0, machines - number) for number in needed)
    total_usd = machines * rate * len(needed) + on_demand * price_usd
    return Commitment(machines, total_usd, unused * rate)


def best_commitment(needed: Sequence[float], *, discount: float) -> int:
    """Machines that are needed for more than the break-even share of the hours, 1 - d."""
    falling, hours = sorted(needed, reverse=True), math.floor((1 - discount) * len(needed))
    return math.ceil(falling[hours]) if hours < len(needed) else 0


@dataclass(frozen=True, slots=True)
class Requirements:
    """Limits on the whole fleet; None is no limit.

    min_throughput_tokens_per_s  output tokens each second that the fleet must be able to carry
    max_usd_per_1m_output        at the user's load
    regions                      of the prices that count; empty: any
    """

    min_throughput_tokens_per_s: float | None = None
    max_usd_per_hour: float | None = None
    max_usd_per_month: float | None = None
    max_usd_per_1m_output: float | None = None
    regions: tuple[str, ...] = ()

    def split_by_region(self, instances: Sequence[Instance]) -> tuple[list[Instance], list[Rejection]]:
        """Machines with a price of these regions or without a price, and the others."""
        kept, rejected = [], []
        for instance in instances:
            priced = instance.price_usd_per_hour is not None
            if not self.regions or not priced or instance.price_region in self.regions:
                kept.append(instance)
                continue
            reason = (
                f"its price is of {instance.price_region or 'no stated region'}, not of "
                f"{' or '.join(self.regions)}: give that price with --prices"
            )
            rejected.append(Rejection(instance.instance_type, None, None, reason))
        if rejected and all(instance.price_usd_per_hour is None for instance in kept):
            known = sorted({each.price_region for each in instances if each.price_region})
            raise InputError(
                f"no price is known in {' or '.join(self.regions)}; known are prices of "
                f"{', '.join(known)}: give yours with --prices, or leave --region out"
            )
        return kept, rejected


NO_REQUIREMENTS = Requirements()


@dataclass(frozen=True, slots=True)
class Availability:
    """The failure to survive: none, one machine, or one of `zones` zones."""

    spare_machines: int = 0
    zones: int = 1

    def machines(self, needed: int) -> int:
        """Machines to rent so that `needed` of them survive the failure.

        >>> [Availability(zones=3).machines(n) for n in (1, 2, 3, 5)]
        [3, 3, 6, 9]
        """
        if self.zones > 1:
            return self.zones * -(-needed // (self.zones - 1))
        return needed + self.spare_machines

    def surviving(self, machines: int) -> int:
        """Machines that are left after the failure."""
        if self.zones > 1:
            return machines - machines // self.zones
        return machines - self.spare_machines

    def describe(self) -> str:
        """The requirement as on the command line."""
        if self.zones > 1:
            return f"az:{self.zones}"
        return "n+1" if self.spare_machines else "none"


NO_SPARES = Availability()


def parse_availability(text: str) -> Availability:
    """Read `none`, `n+1` or `az:K`; raises InputError with the forms.

    >>> parse_availability("az:3")
    Availability(spare_machines=0, zones=3)
    """
    wanted = text.strip().lower()
    if wanted == "none":
        return NO_SPARES
    if wanted == "n+1":
        return Availability(spare_machines=1)
    kind, _, zones = wanted.partition(":")
    if kind == "az" and zones.isdecimal() and int(zones) >= 2:
        return Availability(zones=int(zones))
    raise InputError(f"--availability {text}: write none, n+1, or az:K with K zones of at least 2 (az:3)")


_SAME_RATIO = 0.01  # tolerance for the input / output ratio of a blended price


def usd_per_1m_tokens(fleet_usd_per_hour: float | None, tokens_per_s: float | None) -> float | None:
    """USD for a million tokens; None without a price or without tokens.

    >>> round(usd_per_1m_tokens(1.515, 486.0), 3)
    0.866
    """
    if fleet_usd_per_hour is None or not tokens_per_s:
        return None
    return fleet_usd_per_hour * 1e6 / (SECONDS_PER_HOUR * tokens_per_s)


def usd_text(usd: float, *, estimated: bool, digits: int = 2) -> str:
    """A price for people, with `~` if it is an estimate.

    >>> usd_text(72.7904, estimated=True), usd_text(63.296, estimated=False)
    ('~72.79', '63.30')
    """
    return f"{'~' if estimated else ''}{usd:,.{digits}f}"


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
    """The blended price of the optimization-toolkit post, or None; and what to know of it.

    blended = (1 - discount) * price / (throughput * 3600 / 1e6) / (ratio + 1)
    throughput = concurrency / p50 ITL

    The ratio is a convention, applied to any workload. Valid only where all requests decode
    (concurrency <= slots).
    """
    if price_usd_per_hour is None:
        return None, "no price is known"
    if concurrency > slots:
        return None, f"it assumes that all {concurrency:g} requests decode; {slots} can"
    if itl_p50_s <= 0:
        return None, "answers of one token have no gap between tokens"
    note = None
    if not math.isclose(input_tokens, ratio * output_tokens, rel_tol=_SAME_RATIO):
        note = (
            f"a convention of {ratio:g} input tokens for each output token; "
            f"this workload has {input_tokens} to {output_tokens}"
        )
    output_cost = usd_per_1m_tokens((1 - discount) * price_usd_per_hour, concurrency / itl_p50_s)
    assert output_cost is not None
    return output_cost / (ratio + 1), note


@dataclass(frozen=True, slots=True)
class Cost(JsonValue):
    """Parts of a fleet's price and of its tokens' cost; None without a price or rate.

    discount                       d off the on-demand price
    paid_machine_hours_per_hour    in on-demand prices of one machine
    machine_price_usd_per_hour     on demand, with component, region and date of its source
    machines_for_the_load          without the spare ones
    availability_usd_per_hour      price of the spare machines
    failure_unit                   what fails at once
    wins_below_usd_per_machine_hour  price of an unpriced machine at which its fleet is the best
    machine_price_range_usd_per_hour  of an estimated price; None: it is stated
    """

    purchase: str
    discount: float | None
    committed_machines: int | None
    paid_machine_hours_per_hour: float | None
    break_even_utilisation: float | None
    machine_price_usd_per_hour: float | None
    price_component: str | None
    price_region: str | None
    price_date: str | None
    availability: str
    machines_for_the_load: int
    spare_machines: int
    availability_usd_per_hour: float | None
    failure_unit: str
    usd_per_1m_output_tokens_at_capacity: float | None
    wins_below_usd_per_machine_hour: float | None = field(default=None, metadata=OPTIONAL)
    machine_price_range_usd_per_hour: tuple[float, float] | None = field(default=None, metadata=OPTIONAL)

    def describe_price(self) -> str:
        """A machine's price with its component, region and date, for people."""
        if self.machine_price_usd_per_hour is None:
            return "price unknown"
        between = self.machine_price_range_usd_per_hour
        shown = "" if between is None else f"; estimated, {between[0]:,.2f} to {between[1]:,.2f}"
        price = usd_text(self.machine_price_usd_per_hour, estimated=between is not None, digits=3)
        return f"USD {price} a machine and hour ({self.price_component}, {self.price_region}, {self.price_date}{shown})"


def fleet_cost(
    layout: Layout,
    purchase: Purchase,
    availability: Availability,
    *,
    needed: int,
    machines: int,
    capacity_tokens_per_s: float,
) -> Cost:
    """The cost of `machines`, of which `needed` carry the load."""
    instance = layout.instance
    discount = purchase.discount_for(instance)
    usd_per_hour = purchase.usd_per_hour(instance, machines)
    without_spares = purchase.usd_per_hour(instance, needed)
    priced = instance.price_usd_per_hour is not None
    fails = "its copy of the model"
    if layout.copies > 1:
        fails = f"its {layout.copies} copies at TP {layout.tensor_parallel} fail together"
    return Cost(
        purchase=purchase.describe(),
        discount=discount,
        committed_machines=purchase.committed,
        paid_machine_hours_per_hour=purchase.machine_hours(instance, machines),
        break_even_utilisation=None if discount is None else 1 - discount,
        machine_price_usd_per_hour=instance.price_usd_per_hour,
        price_component=instance.price_component if priced else None,
        price_region=instance.price_region if priced else None,
        price_date=instance.price_date if priced else None,
        machine_price_range_usd_per_hour=instance.price_range_usd_per_hour,
        availability=availability.describe(),
        machines_for_the_load=needed,
        spare_machines=machines - needed,
        availability_usd_per_hour=(
            None if usd_per_hour is None or without_spares is None else usd_per_hour - without_spares
        ),
        failure_unit=f"one {instance.instance_type}: {fails}",
        usd_per_1m_output_tokens_at_capacity=usd_per_1m_tokens(usd_per_hour, capacity_tokens_per_s),
    )
