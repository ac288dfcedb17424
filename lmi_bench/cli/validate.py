"""`lmi-bench validate`: how far predictions are off on a table of measured levels."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lmi_bench.core.errors import InputError


def validate(
    sources: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[TABLE.csv|RUN_DIR...]",
            help="A table of measured levels, one a line, or sweeps (with --profile). Left out: "
            "every shipped profile is judged on its published tables.",
        ),
    ] = None,
    calibrate_cells: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Lines to choose and calibrate on, so many for each engine of the table: each is "
            "fitted apart.",
        ),
    ] = None,
    calibrate_on: Annotated[
        Path | None,
        typer.Option(metavar="CELLS.csv", help="A table whose lines to calibrate on."),
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(help="Judge this profile as it is: a file of `calibrate`, vllm-0.12 ..."),
    ] = None,
    instance: Annotated[
        str | None, typer.Option(help="Machine of the sweeps, where they do not say.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Of the sweeps' weights, where they do not say.")
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
    """Predict measured levels and print errors, interval coverage and half-width by slice.

    Without calibration or profile: by the shipped profile of the table's engine. Without a table:
    the errors of the shipped profiles themselves.
    """
    from lmi_bench.jobs.validate import Order, run

    if not sources:
        from lmi_bench.jobs.validate_profiles import validate_profiles

        if calibrate_cells or calibrate_on or profile or instance or dtype or slo or seed:
            raise InputError(
                "name a table or sweeps to judge; without one, every shipped profile is judged "
                "as it is and only --json counts"
            )
        validate_profiles(json_file=json_file)
        return
    given = [calibrate_cells is not None, calibrate_on is not None, profile is not None]
    if sum(given) > 1:
        raise InputError("give one of --calibrate-cells, --calibrate-on and --profile")
    run(
        Order(
            sources=tuple(sources),
            calibrate_cells=calibrate_cells or 0,
            calibrate_on=calibrate_on,
            profile=profile,
            instance=instance,
            dtype=dtype,
            slos=tuple(slo or ()),
            seed=seed,
        ),
        json_file=json_file,
    )
