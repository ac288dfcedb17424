"""What `convert` is asked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from lmi_bench.core.option import Option


@dataclass(frozen=True, slots=True)
class ConvertSettings:
    """A model folder and the folder for its copy."""

    folder: Annotated[Path, Option("Model folder with pytorch_model*.bin.", argument=True)]
    out: Annotated[Path, Option("Folder to make.", ("--out", "-o"))]
