"""`lmi-bench validate`: how far predictions are off on a table of measured levels."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lmi_bench.errors import InputError


def validate(
    table: Annotated[
        Path, typer.Argument(metavar="TABLE.csv", help="Measured levels, one a line.")
    ],
    calibrate_cells: Annotated[
        int | None,
        typer.Option(min=1, help="Lines to choose and calibrate on, over all engines."),
    ] = None,
    calibrate_on: Annotated[
        Path | None,
        typer.Option(metavar="CELLS.csv", help="A table whose lines to calibrate on."),
    ] = None,
    slo: Annotated[
        list[str] | None,
        typer.Option(help="Of open loops: such as ttft_mean<=500ms; repeatable."),
    ] = None,
    seed: Annotated[
        int, typer.Option(help="Of the split; 0 chooses among all lines, others among 70 %.")
    ] = 0,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write one object a line to this file.")
    ] = None,
) -> None:
    """Predict a table's levels and print errors, interval coverage and half-width by slice.

    Without calibration: by the shipped profile of the table's engine.
    """
    from lmi_bench.cli.validate_run import run

    if calibrate_cells is not None and calibrate_on is not None:
        raise InputError("give either --calibrate-cells or --calibrate-on, not both")
    run(
        table,
        calibrate_cells=calibrate_cells or 0,
        calibrate_on=calibrate_on,
        slos=tuple(slo or ()),
        seed=seed,
        json_file=json_file,
    )
