"""What `compare` is asked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from lmi_bench.core.option import Option


@dataclass(frozen=True, slots=True)
class CompareSettings:
    """Two runs of one workload."""

    a: Annotated[Path, Option("Run folder to compare with.", argument=True, metavar="RUN_A")]
    b: Annotated[Path, Option("Run folder that is judged.", argument=True, metavar="RUN_B")]
