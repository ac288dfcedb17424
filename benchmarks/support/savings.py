"""How much cheaper an hour of one machine is than of another, with the dates of both prices.

Published figures are true of their day: 2024's posts have ml.g5.12xlarge 79.88 % below
ml.p4d.24xlarge with a savings plan; p4d's price has fallen by a third since.
"""

from __future__ import annotations

from dataclasses import dataclass

from lmi_bench.catalog.instances import Instance
from lmi_bench.core.errors import InputError


@dataclass(frozen=True, slots=True)
class Saving:
    """1 - cheap / dear, and where both prices are from."""

    cheap: Instance
    dear: Instance
    share: float

    def __str__(self) -> str:
        return (
            f"{self.cheap.instance_type} is {self.share:.1%} cheaper an hour than "
            f"{self.dear.instance_type}: {_dated(self.cheap)} against {_dated(self.dear)}"
        )


def saving(cheap: Instance, dear: Instance) -> Saving:
    """The saving by on-demand prices; raises InputError where one of them is not known."""
    for instance in (cheap, dear):
        if not instance.price_usd_per_hour:
            raise InputError(f"no price of {instance.instance_type} is known: give it with --prices")
    assert cheap.price_usd_per_hour
    assert dear.price_usd_per_hour
    return Saving(cheap, dear, 1 - cheap.price_usd_per_hour / dear.price_usd_per_hour)


def _dated(instance: Instance) -> str:
    return f"USD {instance.price_usd_per_hour:,.3f} ({instance.price_region}, {instance.price_date})"
