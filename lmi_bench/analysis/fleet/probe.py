"""A level that is worth measuring before buying, as a value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lmi_bench.analysis.level.layouts import Layout


@dataclass(frozen=True, slots=True)
class Probe:
    """A level to measure: one copy at `rate_per_s`.

    machines             of the fleet that it decides on, spare ones left out
    chance               that the SLOs are kept, 0 to 1
    saves_usd_per_hour   against the recommended fleet if they are; 0: it confirms that fleet
    """

    layout: Layout
    rate_per_s: float
    machines: int
    chance: float
    saves_usd_per_hour: float

    def to_json(self) -> dict[str, Any]:
        """As it stands in the file."""
        return {
            "instance": self.layout.instance.instance_type,
            "tensor_parallel": self.layout.tensor_parallel,
            "rate_per_s": self.rate_per_s,
            "machines": self.machines,
            "chance": self.chance,
            "saves_usd_per_hour": self.saves_usd_per_hour,
        }
