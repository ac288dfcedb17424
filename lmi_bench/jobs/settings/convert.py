"""What `convert` is asked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lmi_bench.core.option import REQUIRED, option


@dataclass(frozen=True, slots=True)
class ConvertSettings:
    """A model folder and the folder for its copy."""

    folder: Path = option("Model folder with pytorch_model*.bin.", value=REQUIRED, argument=True)
    out: Path = option("Folder to make.", "--out", "-o", value=REQUIRED)
