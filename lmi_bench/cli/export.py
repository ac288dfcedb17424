"""`lmi-bench export`: a run for spreadsheets, data frames and other tools."""

from __future__ import annotations

from lmi_bench.cli.options.spread import spread_options
from lmi_bench.jobs.settings.interchange import ExportSettings


@spread_options
def export(settings: ExportSettings) -> None:
    """Write the levels and requests of a run in another format."""
    from lmi_bench.cli.console import say
    from lmi_bench.jobs.interchange import export as write

    for path in write(settings):
        say(str(path))
