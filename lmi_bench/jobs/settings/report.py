"""What `report` is asked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from lmi_bench.core.option import Option


@dataclass(frozen=True, slots=True)
class ReportSettings:
    """Results, and the files to write about them."""

    runs: Annotated[
        tuple[Path, ...],
        Option("Run folders, written by `sweep`.", argument=True, metavar="[RUN_DIR]..."),
    ] = ()
    recommendation: Annotated[
        tuple[Path, ...], Option("File written by `recommend --json`; repeatable.")
    ] = ()
    label: Annotated[
        tuple[str, ...], Option("Label of a run, in the order of the runs; repeatable.")
    ] = ()
    title: Annotated[str, Option("Title of the page.")] = ""
    figures: Annotated[Path | None, Option("Folder for the curves as pictures.")] = None
    figure_format: Annotated[str, Option("Format of the pictures: png, svg or pdf.")] = "png"
    markdown: Annotated[Path | None, Option("File for the tables as Markdown.")] = None
    out: Annotated[Path, Option("HTML file.", ("--out", "-o"))] = Path("report.html")
