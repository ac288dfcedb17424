"""One self-contained HTML page about sweeps and recommendations."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lmi_bench.core.durable import write_text
from lmi_bench.core.run_store import load_run
from lmi_bench.jobs.saved_recommendation import read_recommendation
from lmi_bench.jobs.settings.report import ReportSettings
from lmi_bench.report.html import render_html
from lmi_bench.report.text import render_markdown
from lmi_bench.report.view import build_view


@dataclass(frozen=True, slots=True)
class WrittenReport:
    """The files that were written; markdown and figures where they were asked for."""

    html: Path
    markdown: Path | None
    figures: tuple[Path, ...]


def report(settings: ReportSettings) -> WrittenReport:
    """Write the page; raises InputError for a run or a recommendation that cannot be read."""
    recommendations = [read_recommendation(path) for path in settings.recommendation]
    runs = [load_run(path) for path in settings.runs]
    view = build_view(runs, recommendations, labels=settings.label, title=settings.title)
    write_text(settings.out, render_html(view))
    if settings.markdown is not None:
        write_text(settings.markdown, render_markdown(view))
    figures: tuple[Path, ...] = ()
    if settings.figures is not None:
        from lmi_bench.report.figures import write_figures

        figures = tuple(write_figures(view, settings.figures, file_format=settings.figure_format))
    return WrittenReport(settings.out, settings.markdown, figures)
