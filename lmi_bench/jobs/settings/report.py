"""What `report` is asked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lmi_bench.core.option import option


@dataclass(frozen=True, slots=True)
class ReportSettings:
    """Results, and the files to write about them."""

    runs: tuple[Path, ...] = option(
        "Run folders, written by `sweep`.", value=(), argument=True, metavar="[RUN_DIR]..."
    )
    recommendation: tuple[Path, ...] = option(
        "File written by `recommend --json`; repeatable.", value=()
    )
    label: tuple[str, ...] = option(
        "Label of a run, in the order of the runs; repeatable.", value=()
    )
    title: str = option("Title of the page.", value="")
    figures: Path | None = option("Folder for the curves as pictures.")
    figure_format: str = option("Format of the pictures: png, svg or pdf.", value="png")
    markdown: Path | None = option("File for the tables as Markdown.")
    out: Path = option("HTML file.", "--out", "-o", value=Path("report.html"))
