"""What `optimize` needs to know."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from lmi_bench.core.option import Option


@dataclass(frozen=True, slots=True)
class OptimizeSettings:
    """A recipe of techniques, and what replaces parts of it."""

    recipe: Annotated[
        Path | None,
        Option(
            "Recipe: the variants to try and the data to judge them on.",
            argument=True,
            metavar="[RECIPE.yaml]",
        ),
    ] = None
    model: Annotated[
        str | None,
        Option(
            "Model instead of the recipe's: a demo model or a folder.",
            ("--model", "-m"),
            default="the recipe's",
        ),
    ] = None
    dataset: Annotated[
        Path | None,
        Option("Prompts as JSON lines with `prompt`.", default="the recipe's"),
    ] = None
    text: Annotated[
        Path | None, Option("Text file for the perplexity.", default="the recipe's")
    ] = None
    out: Annotated[
        Path | None, Option("Folder of the job.", ("--out", "-o"), default="below runs/")
    ] = None
