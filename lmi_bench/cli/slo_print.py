"""What a sweep says of its SLOs: goodput by level, and whether any level meets them all."""

from __future__ import annotations

from collections.abc import Sequence

from lmi_bench.analysis.results.slo_results import FailureRule, requests_needed
from lmi_bench.cli.console import print_table, say
from lmi_bench.core.level import Level
from lmi_bench.core.records import RequestRecord
from lmi_bench.core.run_store import Run
from lmi_bench.core.slo import GOOD_SHARE, Slo
from lmi_bench.jobs.sweep.result import SloOptions, best_good_share, misses_slos
from lmi_bench.report.slo_text import goodput_rows, highest_meeting, misses_any


def print_slos(run: Run, slos: Sequence[Slo], options: SloOptions, *, verdict: bool = True) -> None:
    """Print goodput and each SLO by level, and whether a level meets what was stated.

    verdict  False: the levels alone; the rule that picked them says what they come to
    """
    if not slos and not options.limits:
        return
    rows = goodput_rows(run.levels, run.records, slos, options.limits, failures=options.failures)
    limits = ", ".join(limit.of_a_request for limit in options.limits)
    by = limits or ", ".join(map(str, slos))
    print_table(f"Goodput: requests that meet {by}", rows, left=("level",))
    missed = misses_slos(run, slos, options)
    if not slos:
        if missed:
            say(
                f"goodput missed: no level has {GOOD_SHARE:.0%} of its requests within {limits}; "
                f"the best has {best_good_share(run, options.limits):.1%}"
            )
        return
    if not verdict:
        return
    if missed:
        say(why_missed(run, slos, options.failures))
    highest = highest_meeting(run.levels, run.records, slos, failures=options.failures)
    if highest is not None:
        say(f"highest level that meets {', '.join(map(str, slos))}: {highest.name}")


def why_missed(run: Run, slos: Sequence[Slo], failures: FailureRule) -> str:
    """Where the SLOs are missed, and where nothing is known, if no level is known to meet them."""
    stated, needed = ", ".join(map(str, slos)), requests_needed(slos)
    levels = list(zip(run.levels, run.records, strict=True))
    broken = [line for line, kept in levels if misses_any(line, kept, slos, failures=failures)]
    unsure = [line for line, _ in levels if line not in broken]
    if not unsure:
        return f"SLO missed at every level: {stated}"
    if not broken:
        most = max((_counted(records, failures) for records in run.records), default=0)
        return (
            f"no level is known to meet {stated}: that needs {needed} answered requests a level, "
            f"and no level has more than {most} (--requests-per-level {needed})"
        )
    return (
        f"no level is known to meet {stated}: missed at {_names(broken)}; too few requests to tell "
        f"at {_names(unsure)} (--requests-per-level {needed})"
    )


def _names(lines: Sequence[Level]) -> str:
    """`concurrency 1, 2, 4`: levels of one kind share the word."""
    first, *others = (line.name for line in lines)
    word, _, _ = first.partition(" ")
    return ", ".join((first, *(name.removeprefix(f"{word} ") for name in others)))


def _counted(records: Sequence[RequestRecord], failures: FailureRule) -> int:
    """Requests that a quantile of the level can rest on."""
    return len(records) if failures == "infinite" else sum(record.ok for record in records)
