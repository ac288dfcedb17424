"""`lmi-bench report`: one self-contained HTML page about one or more sweeps."""

from __future__ import annotations

from lmi_bench.cli.options.spread import spread_options
from lmi_bench.jobs.settings.report import ReportSettings


@spread_options
def report(settings: ReportSettings) -> None:
    """Write one HTML page with curves, knees, levels and recommendations; it needs no network."""
    from lmi_bench.cli.console import say
    from lmi_bench.jobs.report import report as write

    written = write(settings)
    say(
        f"report: {written.html} ({len(settings.runs)} sweep(s), "
        f"{len(settings.recommendation)} recommendation(s))"
    )
    if written.markdown is not None:
        say(f"markdown: {written.markdown}")
    for path in written.figures:
        say(f"figure: {path}")
