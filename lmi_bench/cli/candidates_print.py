"""The table of candidates that recommend prints: prices and predictions with their intervals."""

from collections.abc import Sequence
from typing import Literal

from lmi_bench.analysis.fleet.answer import Candidate
from lmi_bench.cli.console import fit_columns, print_table, say, stdout
from lmi_bench.report.table import bracketed, console_rows
from lmi_bench.report.tables.fleets import CAPACITY, candidate_fields, slo_heading

_GIVE_WAY = (
    "price of", "tok/s", "basis", "limited by", "USD/1M out", "ms/token p90", "ITL p50 ms",
    "capacity req/s", "TTFT p90 ms",
)  # fmt: skip
"""Columns to leave out in a narrow terminal, the least important first; an SLO's column stays.

The last two go only after the latencies' intervals have."""
_LAST_TO_GO = 2
_SHOWN_CANDIDATES, _SHOWN_KINDS = 12, 8


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
    fields = candidate_fields(candidates)
    rows = console_rows(fields, candidates, bracketed)
    held = {slo_heading(outlook.slo) for each in candidates for outlook in each.slos}
    give_way = [name for name in _GIVE_WAY if name not in held]
    fitting, left_out = fit_columns(rows, give_way, width)
    if left_out and _GIVE_WAY.index(left_out[-1]) >= len(_GIVE_WAY) - _LAST_TO_GO:
        bare = console_rows(fields, candidates)
        for without, row in zip(bare, rows, strict=True):
            without[CAPACITY] = row[CAPACITY]
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
    if any(" ?" in value for row in rows for value in row.values()):
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
