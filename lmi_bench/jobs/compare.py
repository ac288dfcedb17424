"""Two runs of one workload compared, level by level."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lmi_bench.analysis.results.compare import (
    Difference,
    ScalingEfficiency,
    compare_runs,
    scaling_efficiency,
)
from lmi_bench.core.run_store import load_run
from lmi_bench.jobs.settings.compare import CompareSettings


@dataclass(frozen=True, slots=True)
class Comparison:
    """What differs between run `a` and run `b` by more than chance.

    scaling  where the runs have unlike numbers of copies: what the copies give together
    """

    a: Path
    b: Path
    differences: list[Difference]
    scaling: ScalingEfficiency | None

    def to_json(self) -> dict[str, Any]:
        """As `compare --json` writes it."""
        return {
            "a": str(self.a),
            "b": str(self.b),
            "confidence": 0.95,
            "differences": [asdict(each) for each in self.differences],
            "scaling": None if self.scaling is None else self.scaling.to_json(),
        }


def compare(settings: CompareSettings) -> Comparison:
    """Compare two runs; raises InputError where their workloads differ."""
    first, second = load_run(settings.a), load_run(settings.b)
    return Comparison(
        settings.a, settings.b, compare_runs(first, second), scaling_efficiency(first, second)
    )
