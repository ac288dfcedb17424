"""What `optimize` needs to know."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lmi_bench.core.option import option


@dataclass(frozen=True, slots=True)
class OptimizeSettings:
    """A recipe of techniques, and what replaces parts of it."""

    recipe: Path | None = option(
        "Recipe: the variants to try and the data to judge them on.",
        argument=True,
        metavar="[RECIPE.yaml]",
    )
    model: str | None = option(
        "Model instead of the recipe's: a demo model or a folder.",
        "--model",
        "-m",
        default="the recipe's",
    )
    dataset: Path | None = option("Prompts as JSON lines with `prompt`.", default="the recipe's")
    text: Path | None = option("Text file for the perplexity.", default="the recipe's")
    out: Path | None = option("Folder of the job.", "--out", "-o", default="below runs/")
