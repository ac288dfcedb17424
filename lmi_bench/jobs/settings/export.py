"""What `export` is asked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from lmi_bench.core.option import Option


@dataclass(frozen=True, slots=True)
class ExportSettings:
    """A run and the format to write it in."""

    run: Annotated[Path, Option("Run folder, written by `sweep` or `import`.", argument=True)]
    export_format: Annotated[
        str, Option("Format: csv, parquet, json or llm-d (report 0.2).", ("--format", "-f"))
    ] = "csv"
    out: Annotated[
        Path | None, Option("Folder for the files.", ("--out", "-o"), default="RUN-export")
    ] = None
