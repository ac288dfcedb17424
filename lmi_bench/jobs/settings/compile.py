"""What `compile` is asked."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from lmi_bench.core.option import Option
from lmi_bench.jobs.settings.engine import StepOptions


@dataclass(frozen=True, slots=True)
class CompileSettings:
    """The model, the shapes of its decode steps, and the folder for what is compiled."""

    model: Annotated[str, Option("Demo model or Hugging Face folder.", argument=True)]
    out: Annotated[
        Path,
        Option(
            "Folder for the compiled steps. Steps of the same kind that it holds are kept.",
            ("--out", "-o"),
        ),
    ]
    shapes: Annotated[
        str | None,
        Option(
            "Shapes of the steps as SEQUENCESxTOKENS of context, such as 1x512,8x512.",
            old_names=("--compile-shapes",),
            default="1, 4 and 16 sequences at a quarter and the whole of the model's length",
        ),
    ] = None
    steps: StepOptions = field(default_factory=StepOptions)
