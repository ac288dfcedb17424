"""The table of candidates that recommend prints: prices and predictions with their intervals."""

import re
from collections.abc import Sequence
from typing import Literal

from lmi_bench.analysis.fit.uncertainty import Estimate
from lmi_bench.analysis.fleet.answer import Candidate
from lmi_bench.analysis.fleet.money import usd_text
from lmi_bench.cli.console import fit_columns, print_table, say, stdout
from lmi_bench.core.slo import parse_slo
from lmi_bench.report.formats import number

_GIVE_WAY = (
    "price of", "tok/s", "basis", "limited by", "USD/1M out", "ms/token p90", "ITL p50 ms",
    "capacity req/s", "TTFT p90 ms",
)  # fmt: skip
"""Columns to leave out in a narrow terminal, the least important first; an SLO's column stays.

The last two go only after the latencies' intervals have."""
_LAST_TO_GO = 2
_SHOWN_CANDIDATES, _SHOWN_KINDS = 12, 8
_INTERVAL = re.compile(r" \[[^]]*\]")


def distinct_layouts(
    candidates: Sequence[Candidate], *, by: Literal["instance", "accelerator"] = "instance"
) -> list[Candidate]:
    """The best setting of each machine (or accelerator) and degree, in the candidates' order."""
    found: dict[tuple[str, int], Candidate] = {}
    for each in candidates:
        found.setdefault((getattr(each, by), each.tensor_parallel), each)
    return list(found.values())


def candidate_rows(
    candidates: Sequence[Candidate], width: int
) -> tuple[list[dict[str, str]], list[str]]:
    """Rows for a terminal of this width, and what is left out.

    Before the capacity goes, the latencies' intervals do. The SLOs' columns always stay.
    """
    rows = [_row(each) for each in candidates]
    if not any(row["engine"] for row in rows):
        for row in rows:
            del row["engine"]
    held = {slo_title(outlook.slo) for each in candidates for outlook in each.slos}
    give_way = [name for name in _GIVE_WAY if name not in held]
    fitting, left_out = fit_columns(rows, give_way, width)
    if left_out and _GIVE_WAY.index(left_out[-1]) >= len(_GIVE_WAY) - _LAST_TO_GO:
        latencies = held | {"TTFT p90 ms"}
        bare = [
            {
                key: _INTERVAL.sub("", text) if key in latencies else text
                for key, text in row.items()
            }
            for row in rows
        ]
        fitting, left_out = fit_columns(bare, give_way, width)
        left_out.append("intervals of latencies")
    return fitting, left_out


def print_candidates(candidates: Sequence[Candidate], *, every_layout: bool = True) -> None:
    """The best layouts, with as many columns as fit the terminal.

    every_layout  False: the best one of each accelerator and degree
    """
    layouts = distinct_layouts(candidates)
    shown = layouts if every_layout else distinct_layouts(candidates, by="accelerator")
    shown = shown[: _SHOWN_CANDIDATES if every_layout else _SHOWN_KINDS]
    rows, left_out = candidate_rows(shown, stdout().width)
    print_table(
        "Candidates, the best first: predicted [80 % interval]",
        rows,
        left=("engine", "limited by", "basis", "price of"),
        whole=("fleet",),
    )
    if any(value.endswith(" ?") for row in rows for value in row.values()):
        say("?: within the SLO as predicted, not at the interval's upper end")
    if any("withheld" in row.values() for row in rows):
        say("withheld: too near to saturation to predict a latency")
    if any(row["USD/h"].startswith("~") for row in rows):
        say("~: an estimated price, see --explain")
    if left_out:
        say(f"no room for {', '.join(left_out)}: a wider terminal, or --json")
    if len(layouts) > len(shown):
        say(f"{len(layouts) - len(shown)} more layouts in the --json file")
    if len(layouts) < len(candidates):
        say("each layout has its best engine setting here; the others are in the --json file")


def _row(candidate: Candidate) -> dict[str, str]:
    served = candidate.figures.get("throughput_tokens_per_s")
    row = {
        "fleet": f"{candidate.instances} x {candidate.instance}",
        "TP x copies": f"{candidate.tensor_parallel} x {candidate.copies}",
        "engine": candidate.setting.describe(),
        "USD/h": money(candidate, candidate.price_usd_per_hour),
        "USD/1M out": money(candidate, candidate.usd_per_1m_output_tokens),
        "capacity req/s": interval(candidate.figures.get("capacity_rate_per_s")),
        "tok/s": "" if served is None else f"{served.value:,.0f}",
        "TTFT p90 ms": interval(candidate.figures.get("ttft_p90_ms")),
        "ITL p50 ms": interval(candidate.figures.get("itl_p50_ms")),
        "ms/token p90": interval(candidate.figures.get("latency_per_token_p90_ms")),
    }
    for outlook in candidate.slos:
        slo = parse_slo(outlook.slo)
        figure = candidate.figures.get(f"{slo.metric}_{slo.statistic}_ms")
        shown = interval(figure) if figure is not None else ""
        mark = {"likely": " ?", "measured": " measured", "missed": " missed"}
        title = slo_title(outlook.slo)
        row.pop(title, None)
        row[title] = shown + mark.get(outlook.confidence, "")
    return row | {
        "limited by": candidate.limited_by,
        "basis": candidate.basis,
        "price of": _price_of(candidate),
    }


def slo_title(slo: str) -> str:
    found = parse_slo(slo)
    if found.metric == "latency_per_token":
        return f"ms/token {found.statistic}"
    return f"{found.metric.upper() if len(found.metric) < 5 else found.metric} {found.statistic} ms"


def money(candidate: Candidate, usd: float | None) -> str:
    """USD for people, with `~` if the price is an estimate."""
    estimated = candidate.price_range_usd_per_hour is not None
    return "?" if usd is None else usd_text(usd, estimated=estimated)


def interval(figure: Estimate | None) -> str:
    """A prediction with its 80 % interval: `47 [41-55]`; alone if it is certain."""
    if figure is None:
        return "withheld"
    low, high = number(figure.low), number(figure.high)
    if low == high:
        return low
    return f"{number(figure.value)} [{low}-{high}]"


def _price_of(candidate: Candidate) -> str:
    """The source of a row's price: component, region, date."""
    cost = candidate.cost
    if cost.machine_price_usd_per_hour is None:
        return "no price known"
    date = str(cost.price_date).split(" (")[0]
    component = str(cost.price_component).replace("component not stated", "")
    return f"{cost.price_region} {date} {component}".strip()
