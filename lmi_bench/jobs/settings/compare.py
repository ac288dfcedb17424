"""What `compare` is asked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lmi_bench.core.option import REQUIRED, option


@dataclass(frozen=True, slots=True)
class CompareSettings:
    """Two runs of one workload."""

    a: Path = option("Run folder to compare with.", value=REQUIRED, argument=True, metavar="RUN_A")
    b: Path = option("Run folder that is judged.", value=REQUIRED, argument=True, metavar="RUN_B")
