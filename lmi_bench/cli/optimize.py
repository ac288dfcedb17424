"""`lmi-bench optimize`: techniques applied in combination, then judged on the user's data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lmi_bench.core.errors import InputError


def optimize(
    recipe: Annotated[
        Path | None, typer.Argument(metavar="[RECIPE.yaml]", help="What to try, and on what data.")
    ] = None,
    listed: Annotated[
        bool, typer.Option("--list", help="Print the techniques and where each one works, and end.")
    ] = False,
    plan: Annotated[
        bool,
        typer.Option(
            "--plan",
            help="Print what memory each variant needs and the cheapest machine for it, and end; "
            "--model may be a catalog name then.",
        ),
    ] = False,
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="Instead of the recipe's: a demo model or a folder."),
    ] = None,
    dataset: Annotated[
        Path | None, typer.Option(help="Instead of the recipe's: JSON lines with `prompt`.")
    ] = None,
    text: Annotated[
        Path | None, typer.Option(help="Instead of the recipe's: the text of the perplexity.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder of the job. (default: below runs/)")
    ] = None,
) -> None:
    """Apply a recipe's techniques and measure each: quality, speed, memory and price.

    Every variant is loaded, scored on a text, held against the baseline's greedy output and swept;
    the folder gets optimize.json, report.html, a run folder for each variant, and the quantized
    weights of variants that say `save: true`, ready for `lmi-bench serve --model`.
    """
    from lmi_bench.jobs.optimize.run import print_techniques, run

    if listed:
        print_techniques()
        return
    if recipe is None:
        raise InputError("name a recipe file, or --list for the techniques that it may combine")
    if plan:
        from lmi_bench.jobs.optimize.plan import run_plan

        run_plan(recipe, model)
        return
    run(recipe, model=model, dataset=dataset, text=text, out=out)
