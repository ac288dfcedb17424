"""What a fleet must reach or may cost beside its SLOs, and which regions its price must be of."""

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
