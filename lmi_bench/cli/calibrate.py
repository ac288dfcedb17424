"""`lmi-bench calibrate`: an engine's profile from a few levels, and what to measure next."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def calibrate(
    sources: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[RUN_DIR|TABLE.csv|SUMMARY.json...]",
            help="Sweeps, tables of levels, results of vllm bench serve or AIPerf. Left out with "
            "--next, --model and --instance: what to measure first.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Write the profile to this JSON file.")
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(
            help="Prior: a profile file, eager-prior, graph-prior ... (default: by the source)"
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="A catalog name. (default: that of the source)"),
    ] = None,
    instance: Annotated[
        str | None, typer.Option(help="Machine of the levels, where the source does not say.")
    ] = None,
    tensor_parallel: Annotated[int, typer.Option("--tp", help="Of summary files.")] = 1,
    dtype: Annotated[str | None, typer.Option(help="Of the weights.")] = None,
    version: Annotated[str | None, typer.Option(help="Version of the engine.")] = None,
    next_cells: Annotated[
        int,
        typer.Option("--next", min=0, help="Name so many levels to measure next."),
    ] = 0,
) -> None:
    """Fit a profile to measured levels: named parameters, their uncertainty, what they miss."""
    from lmi_bench.jobs.calibrate import Order, run

    run(
        Order(
            sources=tuple(sources or ()),
            out=out,
            profile=profile,
            model=model,
            instance=instance,
            tensor_parallel=tensor_parallel,
            dtype=dtype,
            version=version,
            next_cells=next_cells,
        )
    )
