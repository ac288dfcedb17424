"""Limits on a fleet's throughput, cost and region, and the failures that it must survive.

N0 machines carry the load by the lower end of their capacity. `n+1` adds a machine; `az:K` spreads
K * ceil(N0 / (K - 1)) machines evenly over K zones, of which any one may fail.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from lmi_bench.analysis.level.layouts import Rejection
from lmi_bench.catalog.instances import Instance
from lmi_bench.core.errors import InputError

_BUDGETS = (
    ("--max-usd-per-hour", "usd_per_hour", "an hour"),
    ("--max-usd-per-month", "usd_per_month", "a month"),
    ("--max-usd-per-1m", "usd_per_1m_output", "for 1M output"),
)


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
        limits = {flag: getattr(self, f"max_{name}") for flag, name, _ in _BUDGETS}
        limits = {"--min-throughput": self.min_throughput_tokens_per_s, **limits}
        for flag, value in limits.items():
            if value is not None and not value > 0:
                raise InputError(f"{flag} must be above 0, got {value:g}")

    def _budgets(
        self, costs: Mapping[str, float | None]
    ) -> Iterator[tuple[str, float, float | None, str]]:
        """Flag, limit, cost and unit of each limit that is given."""
        for flag, name, unit in _BUDGETS:
            limit = getattr(self, f"max_{name}")
            if limit is not None:
                yield flag, limit, costs[name], unit

    def over_budget(self, costs: Mapping[str, float | None]) -> str | None:
        """The limit that a fleet exceeds, with both numbers; None within all limits.

        costs  usd_per_hour, usd_per_month and usd_per_1m_output; None: not known
        """
        for flag, limit, cost, unit in self._budgets(costs):
            if cost is None:
                return f"no price is known, so {flag} {limit:g} cannot be checked"
            if cost > limit:
                return f"over the budget: USD {cost:,.2f} {unit}, more than {flag} {limit:g}"
        return None

    def excess(self, costs: Mapping[str, float | None]) -> float:
        """Largest cost / limit; infinite where a cost is not known, 0 without limits."""
        return max(
            (
                float("inf") if cost is None else cost / limit
                for _, limit, cost, _ in self._budgets(costs)
            ),
            default=0.0,
        )

    def split_by_region(
        self, instances: Sequence[Instance]
    ) -> tuple[list[Instance], list[Rejection]]:
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

    def __post_init__(self) -> None:
        if self.zones < 1 or self.spare_machines < 0:
            raise InputError("availability needs at least 1 zone and 0 spare machines")

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
    if kind == "az" and zones.isdigit() and int(zones) >= 2:
        return Availability(zones=int(zones))
    raise InputError(
        f"--availability {text}: write none, n+1, or az:K with K zones of at least 2 (az:3)"
    )


def failure_unit(*, copies: int, tensor_parallel: int, instance_type: str) -> str:
    """The unit that fails at once with this layout, for people."""
    if copies == 1:
        return f"one {instance_type}: its copy of the model"
    return f"one {instance_type}: its {copies} copies at TP {tensor_parallel} fail together"
