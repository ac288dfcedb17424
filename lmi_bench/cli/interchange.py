"""`lmi-bench export` and `lmi-bench import`: runs for other tools, and other tools' results."""

from __future__ import annotations

import sys

from lmi_bench.cli.options.spread import spread_options
from lmi_bench.jobs.settings.interchange import ExportSettings, ImportSettings


@spread_options
def export(settings: ExportSettings) -> None:
    """Write the levels and requests of a run in another format."""
    from lmi_bench.cli.console import say
    from lmi_bench.jobs.interchange import export as write

    for path in write(settings):
        say(str(path))


@spread_options
def import_results(settings: ImportSettings) -> None:
    """Make a run folder of other tools' results: metrics are matched by formula, not by name.

    A metric that the file does not have by our formula stays empty, with the reason.
    """
    from lmi_bench.cli.console import say, terminal
    from lmi_bench.jobs.interchange import import_results as run

    with terminal() as listener:
        made = run(settings, listener, command=["lmi-bench", *sys.argv[1:]])
    say(
        f"{made.folder}: {made.levels} level(s) of {made.tool}   "
        f"next: lmi-bench report {made.folder}"
    )
