"""Machines beyond the load, so that it is still carried when one unit fails.

N0 is the smallest pool whose capacity's lower bound holds the load. `n+1` adds a machine; `az:K`
spreads K * ceil(N0 / (K - 1)) machines evenly over K zones, of which any one may fail.
"""

from __future__ import annotations

from dataclasses import dataclass

from lmi_bench.core.errors import InputError


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
