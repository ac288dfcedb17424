"""`lmi-bench report`: one self-contained HTML page about one or more sweeps."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[RUN_DIR]...", help="Run folders written by `sweep`."),
    ] = None,
    recommendation: Annotated[
        list[Path] | None,
        typer.Option(help="A file written by `recommend --json`; repeatable."),
    ] = None,
    label: Annotated[
        list[str] | None,
        typer.Option(help="Own name of a run, in their order; repeatable."),
    ] = None,
    title: Annotated[str, typer.Option(help="Of the page.")] = "",
    figures: Annotated[
        Path | None, typer.Option(help="Also write the curves as pictures into this folder.")
    ] = None,
    figure_format: Annotated[str, typer.Option(help="png, svg or pdf.")] = "png",
    markdown: Annotated[
        Path | None, typer.Option(help="Also write the tables as Markdown to this file.")
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="HTML file.")] = Path("report.html"),
) -> None:
    """Write one HTML page with curves, knees, levels and recommendations; it needs no network."""
    from lmi_bench.cli.console import say
    from lmi_bench.core.durable import write_text
    from lmi_bench.core.run_store import load_run
    from lmi_bench.jobs.saved_recommendation import read_recommendation
    from lmi_bench.report.html import render_html
    from lmi_bench.report.text import render_markdown
    from lmi_bench.report.view import build_view

    recommendations = [read_recommendation(path) for path in recommendation or ()]
    runs = runs or []
    view = build_view(
        [load_run(path) for path in runs], recommendations, labels=label or (), title=title
    )
    write_text(out, render_html(view))
    say(f"report: {out} ({len(runs)} sweep(s), {len(recommendations)} recommendation(s))")
    if markdown is not None:
        write_text(markdown, render_markdown(view))
        say(f"markdown: {markdown}")
    if figures is not None:
        from lmi_bench.report.figures import write_figures

        for path in write_figures(view, figures, file_format=figure_format):
            say(f"figure: {path}")
