"""What a fleet must reach, may cost and must survive beside its SLOs.

Availability adds machines beyond the load, so that it is still carried when one unit fails. N0 is
the smallest pool whose capacity's lower bound holds the load. `n+1` adds a machine; `az:K` spreads
K * ceil(N0 / (K - 1)) machines evenly over K zones, of which any one may fail.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lmi_bench.analysis.level.layouts import Rejection
from lmi_bench.catalog.instances import Instance
from lmi_bench.core.errors import InputError


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

    def __post_init__(self) -> None:
        for flag, value in (
            ("--min-throughput", self.min_throughput_tokens_per_s),
            ("--max-usd-per-hour", self.max_usd_per_hour),
            ("--max-usd-per-month", self.max_usd_per_month),
            ("--max-usd-per-1m", self.max_usd_per_1m_output),
        ):
            if value is not None and not value > 0:
                raise InputError(f"{flag} must be above 0, got {value:g}")

    def over_budget(
        self,
        *,
        usd_per_hour: float | None,
        usd_per_month: float | None,
        usd_per_1m_output: float | None,
    ) -> str | None:
        """Which limit a fleet breaks, with both numbers; None if it keeps them all."""
        for flag, limit, cost, unit in (
            ("--max-usd-per-hour", self.max_usd_per_hour, usd_per_hour, "an hour"),
            ("--max-usd-per-month", self.max_usd_per_month, usd_per_month, "a month"),
            ("--max-usd-per-1m", self.max_usd_per_1m_output, usd_per_1m_output, "for 1M output"),
        ):
            if limit is None:
                continue
            if cost is None:
                return f"no price is known, so {flag} {limit:g} cannot be checked"
            if cost > limit:
                return f"over the budget: USD {cost:,.2f} {unit}, more than {flag} {limit:g}"
        return None

    def excess(
        self,
        *,
        usd_per_hour: float | None,
        usd_per_month: float | None,
        usd_per_1m_output: float | None,
    ) -> float:
        """Largest cost / limit; infinite where a cost is not known, 0 without limits."""
        pairs = (
            (self.max_usd_per_hour, usd_per_hour),
            (self.max_usd_per_month, usd_per_month),
            (self.max_usd_per_1m_output, usd_per_1m_output),
        )
        return max(
            (
                float("inf") if cost is None else cost / limit
                for limit, cost in pairs
                if limit is not None
            ),
            default=0.0,
        )

    def split_by_region(
        self, instances: Sequence[Instance]
    ) -> tuple[list[Instance], list[Rejection]]:
        """Machines that may be chosen, and those whose price is of another region.

        A machine without a price stays: nothing says where it is not sold.
        """
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
    """What may fail: nothing, one machine, or one of `zones` zones."""

    spare_machines: int = 0
    zones: int = 1

    def __post_init__(self) -> None:
        if self.zones < 1 or self.spare_machines < 0:
            raise InputError("availability needs at least 1 zone and 0 spare machines")

    def machines(self, needed: int) -> int:
        """Machines to rent where `needed` of them must be up.

        >>> [Availability(zones=3).machines(n) for n in (1, 2, 3, 5)]
        [3, 3, 6, 9]
        """
        if self.zones > 1:
            return self.zones * -(-needed // (self.zones - 1))
        return needed + self.spare_machines

    def surviving(self, machines: int) -> int:
        """Machines that are up after the failure that is provided for."""
        if self.zones > 1:
            return machines - machines // self.zones
        return machines - self.spare_machines

    def describe(self) -> str:
        """The requirement as it is written on the command line."""
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
    if kind == "az" and zones.isdigit() and int(zones) >= 2:
        return Availability(zones=int(zones))
    raise InputError(
        f"--availability {text}: write none, n+1, or az:K with K zones of at least 2 (az:3)"
    )


def failure_unit(*, copies: int, tensor_parallel: int, instance_type: str) -> str:
    """What fails at once with this layout, for people."""
    if copies == 1:
        return f"one {instance_type}: its copy of the model"
    return f"one {instance_type}: its {copies} copies at TP {tensor_parallel} fail together"
