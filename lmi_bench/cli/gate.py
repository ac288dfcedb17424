"""`lmi-bench gate`: pass or fail a run by SLOs and by an earlier run."""

from __future__ import annotations

import typer

from lmi_bench.cli.options.spread import spread_options
from lmi_bench.core.errors import EXIT_SLO_MISSED
from lmi_bench.jobs.settings.gate import GateSettings


@spread_options
def gate(settings: GateSettings) -> None:
    """Exit 0 if every level meets every SLO and none got slower than the baseline, else 99."""
    from lmi_bench.cli.console import print_table, say
    from lmi_bench.jobs.gate import gate as run
    from lmi_bench.report.gate_files import gate_rows

    verdict = run(settings)
    left = ("", "level", "check", "why")
    print_table(f"Gate: {settings.run}", gate_rows(verdict.cases), left=left)
    if verdict.missed:
        say(f"gate: {verdict.missed} of {len(verdict.cases)} checks missed")
        raise typer.Exit(EXIT_SLO_MISSED)
    say("gate: passed")
