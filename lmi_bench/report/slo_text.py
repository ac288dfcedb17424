"""The SLOs' answer in words: the highest load within them, of listed levels and of a search."""

from collections.abc import Sequence

from lmi_bench.analysis.results.slo_results import FailureRule, level_slo, requests_needed
from lmi_bench.core.findings import SloAnswer
from lmi_bench.core.level import Level
from lmi_bench.core.load import load_name
from lmi_bench.core.records import RequestRecord
from lmi_bench.core.slo import Slo
from lmi_bench.report.formats import MISSING, number
from lmi_bench.report.values import Headline

_SHAPES = {"smooth": "the SLO is passed gradually", "cliff": "a cliff: one step of the load breaks it by far"}


def slo_verdicts(
    line: Level, records: Sequence[RequestRecord], slos: Sequence[Slo], failures: FailureRule = "exclude"
) -> list[bool | None]:
    """Whether the level meets each SLO; None where it has too few requests to tell."""
    known = {"pass": True, "fail": False}
    return [known.get(level_slo(line, records, slo, failures).verdict) for slo in slos]


def met_and_missed(
    levels: Sequence[Level],
    records: Sequence[Sequence[RequestRecord]],
    slos: Sequence[Slo],
    *,
    failures: FailureRule = "exclude",
) -> tuple[Level | None, tuple[Level, Slo] | None]:
    """The highest level known to meet the SLOs below the first miss, and that miss.

    An invalid level says nothing. One with too few requests to tell is no miss, since latency rises
    with load.
    """
    best = None
    for line, kept in sorted(zip(levels, records, strict=True), key=lambda pair: pair[0].load.value):
        verdicts: list[bool | None] = slo_verdicts(line, kept, slos, failures) if line.valid else [None]
        if False in verdicts:
            return best, (line, slos[verdicts.index(False)])
        if all(verdicts):
            best = line
    return best, None


def slo_headline(
    lines: Sequence[Level],
    records: Sequence[Sequence[RequestRecord]],
    slos: Sequence[Slo],
    *,
    failures: FailureRule = "exclude",
) -> Headline | None:
    """The highest load of a sweep that meets every SLO, below the first miss; None if unknown."""
    if not lines or not slos:
        return None
    met, miss = met_and_missed(lines, records, slos, failures=failures)
    detail = ", ".join(map(str, slos))
    if miss is not None:
        detail += f"; {miss[0].name} misses {miss[1]}"
    elif met is not None:
        detail += ": no level misses them"
    title = "Highest level within the SLOs"
    if met is not None:
        bound = "≥ " if miss is None else ""
        unit = "req/s" if met.load.is_open else "concurrent requests"
        return Headline(title, f"{bound}{met.load.value:g}", unit, detail, "good")
    if miss is not None and miss[0].load.value == min(line.load.value for line in lines):
        return Headline(title, "none", "", detail, "bad")
    needed = requests_needed(slos)
    below = "level" if miss is None else "lower level"
    detail += f"; no valid {below} has the {needed} answered requests that it takes (--requests-per-level {needed})"
    return Headline(title, "not measured", "", detail, "na")


def search_headline(answer: SloAnswer | None) -> Headline | None:
    """The headline of a search: the highest load that it found."""
    if answer is None:
        return None
    title = "Highest load within the SLOs"
    slos = ", ".join(answer.slo)
    unit = "concurrent requests" if answer.load == "concurrency" else "req/s"
    spent = f"{number(answer.endpoint_seconds)} endpoint seconds"
    first = answer.first_breach
    breach = MISSING if first is None else load_name(answer.load, first)
    if answer.value is None:
        detail = f"{breach} already misses {answer.binding}; {spent}"
        return Headline(title, "none", "", detail, "bad")
    if first is None:
        detail = f"{slos}: the highest that was tried, nothing broke; {spent}"
        return Headline(title, f"≥ {answer.value:g}", unit, detail)
    detail = (
        f"{slos}; boundary {number(answer.low)} to {number(answer.high)} (95 %), "
        f"{_SHAPES.get(answer.boundary or '', '')}; first breach at {breach}: {answer.binding}; "
        f"{spent}"
    )
    return Headline(title, f"{answer.value:g}", unit, detail)
