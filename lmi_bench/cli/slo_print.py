"""What a sweep says of its SLOs: goodput by level, and whether any level meets them all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lmi_bench.analysis.slo_judgement import requests_needed
from lmi_bench.analysis.slo_values import FailureRule
from lmi_bench.cli.console import print_table, say
from lmi_bench.report.slo_text import goodput_rows, meets_all
from lmi_bench.run_store import Run
from lmi_bench.slo import Slo


@dataclass(frozen=True, slots=True)
class SloOptions:
    """How requests are judged: limits of a good request (none: the SLOs), and failures."""

    limits: tuple[Slo, ...] = ()
    failures: FailureRule = "exclude"


AS_STATED = SloOptions()


def print_slos(run: Run, slos: Sequence[Slo], options: SloOptions) -> bool:
    """Print goodput and each SLO by level; whether every level missed a stated SLO."""
    if not slos and not options.limits:
        return False
    rows = goodput_rows(run.levels, run.records, slos, options.limits, failures=options.failures)
    by = ", ".join(str(limit) for limit in options.limits or slos)
    print_table(f"Goodput: requests that meet {by}", rows, left=("level",))
    missed = bool(slos) and not any(
        meets_all(line, records, slos, failures=options.failures)
        for line, records in zip(run.levels, run.records, strict=True)
    )
    if missed:
        needed = requests_needed(slos)
        if all(len(records) < needed for records in run.records):
            say(
                f"no level is known to meet {', '.join(map(str, slos))}: that needs {needed} "
                f"requests a level (--requests-per-level {needed})"
            )
        else:
            say(f"SLO missed at every level: {', '.join(map(str, slos))}")
    return missed
