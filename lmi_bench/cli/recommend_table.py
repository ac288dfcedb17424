"""The table of candidates for the width of the terminal: what decides stays, the rest gives way."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lmi_bench.analysis.fit.uncertainty import Estimate
from lmi_bench.analysis.fleet.answer import Candidate
from lmi_bench.analysis.level.layouts import Rejection
from lmi_bench.cli.console import STDOUT, fit_columns, print_table, say
from lmi_bench.core.slo import parse_slo
from lmi_bench.report.formats import number

_GIVE_WAY = (
    "price of", "tok/s", "basis", "limited by", "USD/1M out", "ms/token p90", "ITL p50 ms",
    "capacity req/s", "TTFT p90 ms",
)  # fmt: skip
"""Columns of little help to the choice first; the SLOs' own stand in a column of theirs."""
_SHOWN_CANDIDATES = 12
_SHOWN_REASONS = 6
_NUMBER = re.compile(r"\d[\d,.]*")


def distinct_layouts(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The best setting of each machine and degree, in the candidates' order."""
    found: dict[tuple[str, int], Candidate] = {}
    for each in candidates:
        found.setdefault((each.instance, each.tensor_parallel), each)
    return list(found.values())


def candidate_rows(
    candidates: Sequence[Candidate], width: int
) -> tuple[list[dict[str, str]], list[str]]:
    """Rows for a terminal of this width, and the columns that it has no room for.

    Every predicted figure has its interval. Columns give way, the least telling first and those of
    the SLOs never.
    """
    rows = [_row(each) for each in candidates]
    if not any(row["engine"] for row in rows):
        for row in rows:
            del row["engine"]
    held = {_title(outlook.slo) for each in candidates for outlook in each.slos}
    return fit_columns(rows, [name for name in _GIVE_WAY if name not in held], width)


def print_candidates(candidates: Sequence[Candidate]) -> None:
    """The best dozen layouts, as much of each as the terminal has room for."""
    layouts = distinct_layouts(candidates)
    rows, left_out = candidate_rows(layouts[:_SHOWN_CANDIDATES], STDOUT.width)
    print_table(
        "Candidates, the best first: predicted [80 % interval]",
        rows,
        left=("engine", "limited by", "basis", "price of"),
        whole=("fleet",),
    )
    if any(value.endswith(" ?") for row in rows for value in row.values()):
        say("?: within the SLO as predicted, not at the interval's upper end")
    if any("withheld" in row.values() for row in rows):
        say("withheld: too near to saturation to foresee a latency")
    if left_out:
        say(f"no room for {', '.join(left_out)}: a wider terminal, or --json")
    if len(layouts) > _SHOWN_CANDIDATES:
        say(f"{len(layouts) - _SHOWN_CANDIDATES} more layouts in the --json file")
    if len(layouts) < len(candidates):
        say("of each layout its best engine setting; the others in the --json file")


def _row(candidate: Candidate) -> dict[str, str]:
    row = {
        "fleet": f"{candidate.instances} x {candidate.instance}",
        "TP x copies": f"{candidate.tensor_parallel} x {candidate.copies}",
        "engine": candidate.setting.describe(),
        "USD/h": _money(candidate.price_usd_per_hour),
        "USD/1M out": _money(candidate.usd_per_1m_output_tokens),
        "capacity req/s": interval(candidate.figures.get("capacity_rate_per_s")),
        "tok/s": _plain(candidate.figures.get("throughput_tokens_per_s")),
        "TTFT p90 ms": interval(candidate.figures.get("ttft_p90_ms")),
        "ITL p50 ms": interval(candidate.figures.get("itl_p50_ms")),
        "ms/token p90": interval(candidate.figures.get("latency_per_token_p90_ms")),
    }
    for outlook in candidate.slos:
        slo = parse_slo(outlook.slo)
        figure = candidate.figures.get(f"{slo.metric}_{slo.statistic}_ms")
        shown = interval(figure) if figure is not None else ""
        mark = {"likely": " ?", "measured": " measured", "missed": " missed"}
        title = _title(outlook.slo)
        row.pop(title, None)
        row[title] = shown + mark.get(outlook.confidence, "")
    return row | {
        "limited by": candidate.limited_by,
        "basis": candidate.basis,
        "price of": _price_of(candidate),
    }


def _title(slo: str) -> str:
    """The column of an SLO: `ITL p90 ms`."""
    found = parse_slo(slo)
    return f"{found.metric.upper() if len(found.metric) < 5 else found.metric} {found.statistic} ms"


def _money(value: float | None) -> str:
    return "?" if value is None else f"{value:,.2f}"


def _plain(figure: Estimate | None) -> str:
    return "" if figure is None else f"{figure.value:,.0f}"


def interval(figure: Estimate | None) -> str:
    """47 [41-55]: predicted with its 80 % interval; alone where it is certain."""
    if figure is None:
        return "withheld"
    low, high = number(figure.low), number(figure.high)
    if low == high:
        return low
    return f"{number(figure.value)} [{low}-{high}]"


def _price_of(candidate: Candidate) -> str:
    """Where a row's price is from: component, region, date."""
    cost = candidate.cost
    if cost.get("machine_price_usd_per_hour") is None:
        return "no price known"
    date = str(cost["price_date"]).split(" (")[0]
    component = str(cost["price_component"]).replace("component not stated", "")
    return f"{cost['price_region']} {date} {component}".strip()


def rejection_lines(rejected: Sequence[Rejection], shown: int = _SHOWN_REASONS) -> Iterator[str]:
    """The layouts that are out, by kind of reason, each with one of them as an example."""
    if not rejected:
        return
    kinds: Counter[str] = Counter()
    examples: dict[str, Rejection] = {}
    for each in rejected:
        kind = _NUMBER.sub("#", each.reason)
        kinds[kind] += 1
        examples.setdefault(kind, each)
    yield "1 layout is out:" if len(rejected) == 1 else f"{len(rejected)} layouts are out:"
    for kind, times in kinds.most_common(shown):
        each = examples[kind]
        place = each.instance_type
        if each.tensor_parallel is not None:
            place += f" TP {each.tensor_parallel}"
        if setting := each.setting.describe():
            place += f", {setting}"
        yield f"  {times:>3}  {'such as ' if times > 1 else ''}{place}: {each.reason}"
    if len(kinds) > shown:
        yield f"  more kinds of reason: {len(kinds) - shown}, in the --json file"


def accuracy_rows(accuracy: Mapping[str, Any]) -> list[dict[str, str]]:
    """What a fitted profile predicts of the levels that it was fitted to."""
    rows = []
    for level in accuracy["levels"]:
        row = {"concurrency": str(level["concurrency"])}
        for key, pair in level.items():
            if isinstance(pair, Mapping):
                row[key] = f"{pair['predicted']:.4g} / {pair['measured']:.4g}"
        rows.append(row)
    return rows
