"""What several copies of a model give together, against as many times what one gives alone.

Below 1 it shows what the copies share: the router's uneven hands, a host's cores and memory
bandwidth, its network. The throughput of each side is that of its best level, since n copies reach
theirs at about n times the load.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lmi_bench.core.level import Level
from lmi_bench.core.run_store import Run


@dataclass(frozen=True, slots=True)
class ScalingEfficiency:
    """few, many           copies of the two runs
    few_tokens_per_s, many_tokens_per_s   output tokens a second of each one's best level
    edge                  a best level is the highest that was run: more load may give more
    """

    few: int
    many: int
    few_tokens_per_s: float
    many_tokens_per_s: float
    edge: bool

    @property
    def efficiency_frac(self) -> float:
        """(many / few copies' throughput) / (many / few): 1 where copies do not disturb."""
        return (self.many_tokens_per_s / self.many) / (self.few_tokens_per_s / self.few)

    def to_dict(self) -> dict[str, Any]:
        """The value as JSON holds it."""
        return {
            **{name: getattr(self, name) for name in self.__slots__},
            "efficiency_frac": self.efficiency_frac,
        }


def scaling_efficiency(a: Run, b: Run) -> ScalingEfficiency | None:
    """None where both runs have as many copies, or the number of one is not known."""
    sides = []
    for run in (a, b):
        copies = copies_of(run.manifest)
        best = _best_level(run.levels)
        if copies is None or best is None:
            return None
        sides.append((copies, *best))
    (few, few_best, few_edge), (many, many_best, many_edge) = sorted(sides)
    if few == many:
        return None
    return ScalingEfficiency(few, many, few_best, many_best, few_edge or many_edge)


def copies_of(manifest: Mapping[str, Any]) -> int | None:
    """Copies behind the target: of the bundled engine, or instances of a SageMaker endpoint."""
    target = manifest.get("target")
    if not isinstance(target, Mapping):
        return None
    if target.get("kind") in ("engine", "simulated"):
        return int(target.get("replicas") or 1)
    instances = target.get("instances")
    return int(instances) if instances else None


def _best_level(levels: Sequence[Level]) -> tuple[float, bool] | None:
    """Highest throughput, and whether no higher load was run."""
    usable = [
        (line.load.value, line.throughput_tokens_per_s)
        for line in levels
        if line.valid and line.throughput_tokens_per_s
    ]
    if not usable:
        return None
    load, best = max(usable, key=lambda level: level[1])
    return best, load == max(each for each, _ in usable)
