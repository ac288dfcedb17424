"""SLOs on the console: goodput and each limit by level, and the result of a search."""

import math
from collections.abc import Sequence

from lmi_bench.analysis.results.slo_results import (
    FailureRule,
    check_slo,
    goodput,
    level_measured_ms,
)
from lmi_bench.core.findings import SloAnswer
from lmi_bench.core.level import Level
from lmi_bench.core.records import RequestRecord
from lmi_bench.core.slo import Slo
from lmi_bench.report.formats import NOT_SUPPORTED, load_name, number, share

_SHAPES = {"smooth": "passed gradually", "cliff": "a cliff"}


def describe_answer(answer: SloAnswer) -> str:
    """The result of a search, in one to three lines of plain text."""
    slos = ", ".join(answer.slo)
    spent = f"{number(answer.endpoint_seconds)} endpoint seconds"
    if answer.value is None:
        return (
            f"no load meets {slos}: {load_name(answer.load, answer.first_breach)} already misses "
            f"{answer.binding} ({spent})"
        )
    best = f"highest load that meets {slos}: {load_name(answer.load, answer.value)}"
    if answer.first_breach is None:
        return f"{best}, the highest that was tried: nothing broke ({spent})"
    breach = load_name(answer.load, answer.first_breach)
    return (
        f"{best}\n"
        f"  boundary between {number(answer.low)} and {number(answer.high)} (95 %), "
        f"{_SHAPES[answer.boundary or 'smooth']}; first breach at {breach}: {answer.binding}\n"
        f"  {spent}"
    )


def goodput_rows(
    levels: Sequence[Level],
    records: Sequence[Sequence[RequestRecord]],
    slos: Sequence[Slo],
    limits: Sequence[Slo],
    *,
    failures: FailureRule = "exclude",
) -> list[dict[str, str]]:
    """One row per level: requests that met every limit, and each SLO's measured value.

    limits  limits of a single request; empty: the SLOs
    """
    rows = []
    for line, kept in zip(levels, records, strict=True):
        open_loop = line.load.is_open
        good = goodput(kept, limits or slos, open_loop=open_loop)
        row = {"level": line.name, "goodput req/s": number(good.per_s), "good": share(good.share)}
        for slo in slos:
            measured, _ = level_measured_ms(kept, slo, open_loop=open_loop, failures=failures)
            row[f"{slo.metric}_{slo.statistic} <= {number(slo.limit_ms)} ms"] = _verdict(
                measured, slo
            )
        rows.append(row)
    return rows


def slo_verdicts(
    line: Level,
    records: Sequence[RequestRecord],
    slos: Sequence[Slo],
    failures: FailureRule = "exclude",
) -> list[bool | None]:
    """Whether the level meets each SLO; None where it has too few requests to tell.

    records  empty: by the level's own statistics
    """
    if not records:
        known = {"pass": True, "fail": False}
        return [known.get(check_slo(line, slo).verdict) for slo in slos]
    open_loop = line.load.is_open
    measured = [
        level_measured_ms(records, slo, open_loop=open_loop, failures=failures)[0] for slo in slos
    ]
    return [
        None if value is None else value <= slo.limit_ms
        for value, slo in zip(measured, slos, strict=True)
    ]


def met_and_missed(
    levels: Sequence[Level],
    records: Sequence[Sequence[RequestRecord]] | None,
    slos: Sequence[Slo],
    *,
    failures: FailureRule = "exclude",
) -> tuple[Level | None, Level | None]:
    """The highest level known to meet the SLOs below the first miss, and the level of that miss.

    An invalid level says nothing. One with too few requests to tell is no miss, since latency rises
    with load.
    """
    best = None
    pairs = zip(levels, records or [()] * len(levels), strict=True)
    for line, kept in sorted(pairs, key=lambda pair: pair[0].load.value):
        verdicts = slo_verdicts(line, kept, slos, failures) if line.valid else [None]
        if False in verdicts:
            return best, line
        if all(verdicts):
            best = line
    return best, None


def _verdict(measured: float | None, slo: Slo) -> str:
    if measured is None:
        return NOT_SUPPORTED
    shown = number(measured) if math.isfinite(measured) else "infinite"
    return f"{shown} {'ok' if measured <= slo.limit_ms else 'MISS'}"
