"""`lmi-bench convert`: PyTorch's pickled weights into safetensors."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def convert(
    folder: Annotated[Path, typer.Argument(help="Model folder with pytorch_model*.bin.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="New folder.")],
) -> None:
    """Write a folder of .bin weights anew as safetensors, which is all that the engine reads.

    The pickle is read by torch's restricted unpickler: tensors alone, no code. Both folders'
    weights are hashed and compared.
    """
    from lmi_bench.jobs.convert import run_convert

    run_convert(folder, out)
