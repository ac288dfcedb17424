"""`lmi-bench export`: a run for spreadsheets, data frames and other tools."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lmi_bench.core.errors import InputError


def export(
    run: Annotated[Path, typer.Argument(help="Run folder written by `sweep` or `import`.")],
    export_format: Annotated[
        str, typer.Option("--format", "-f", help="csv, parquet, json or llm-d (report 0.2).")
    ] = "csv",
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Folder. [RUN-export]")] = None,
) -> None:
    """Write the levels and requests of a run in another format."""
    from lmi_bench.cli.console import say
    from lmi_bench.core.run_store import load_run
    from lmi_bench.interchange.export import EXPORT_FORMATS, export_run

    if export_format not in EXPORT_FORMATS:
        raise InputError(
            f"--format {export_format!r} is not known; write {', '.join(EXPORT_FORMATS)}"
        )
    folder = out or run.with_name(f"{run.resolve().name}-export")
    for path in export_run(load_run(run), export_format, folder):
        say(str(path))
