"""What `compile` is asked."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from lmi_bench.core.option import REQUIRED, option
from lmi_bench.jobs.settings.engine import StepOptions


@dataclass(frozen=True, slots=True)
class CompileSettings:
    """The model, the shapes of its decode steps, and the folder for what is compiled."""

    model: str = option("Demo model or Hugging Face folder.", value=REQUIRED, argument=True)
    out: Path = option(
        "Folder for the compiled steps. Steps of the same kind that it holds are kept.",
        "--out",
        "-o",
        value=REQUIRED,
    )
    shapes: str | None = option(
        "Shapes of the steps as SEQUENCESxTOKENS of context, such as 1x512,8x512.",
        old_names=("--compile-shapes",),
        default="1, 4 and 16 sequences at a quarter and the whole of the model's length",
    )
    steps: StepOptions = field(default_factory=StepOptions)
