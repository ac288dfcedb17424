"""Several runs level by level: each against the first, at the loads that both have."""

from __future__ import annotations

from collections.abc import Sequence

from lmi_bench.report.formats import MISSING, number
from lmi_bench.report.table import Cell, Column, Row, Table
from lmi_bench.report.values import Curve


def comparison_table(curves: Sequence[Curve]) -> Table | None:
    """Throughput and upper latency of runs over the same axis; None with fewer than two.

    A simulated run beside measured ones is a prediction, and its difference an error.
    """
    if len(curves) < 2:
        return None
    base = next((curve for curve in curves if not curve.simulated), curves[0])
    same = [curve for curve in curves if curve.axis == base.axis]
    if len(same) < 2:
        return None
    ordered = [base, *(curve for curve in same if curve is not base)]
    loads = sorted({load for curve in ordered for load in curve.loads})
    rows = tuple(
        Row((Cell(f"{load:g}"), *_cells(ordered, load, throughput=True),
             *_cells(ordered, load, throughput=False)))
        for load in loads
    )  # fmt: skip
    titles = [f"{curve.label} (predicted)" if curve.simulated else curve.label for curve in ordered]
    columns = (
        Column("Concurrent requests" if base.axis == "concurrency" else "Request rate, req/s"),
        *(Column(title, "Throughput, tok/s") for title in titles),
        *(Column(title, "Latency p90, ms/token") for title in titles),
    )
    left_out = len(curves) - len(same)
    note = f"Differences are against {base.label}, a single run each: no test of significance."
    if left_out:
        note += f" {left_out} run(s) over another kind of load are left out."
    return Table("Runs side by side", columns, rows, note)


def _cells(curves: Sequence[Curve], load: float, *, throughput: bool) -> list[Cell]:
    values = [_value(curve, load, throughput=throughput) for curve in curves]
    base = values[0]
    cells = [Cell(number(base))]
    for value in values[1:]:
        if value is None:
            cells.append(Cell(MISSING, "this run has no such level", "na"))
        elif base is None or base == 0:
            cells.append(Cell(number(value)))
        else:
            change = value / base - 1
            better = change > 0 if throughput else change < 0
            tone = "" if abs(change) < 0.05 else "good" if better else "bad"
            cells.append(Cell(f"{number(value)} ({change:+.0%})", "", tone))
    return cells


def _value(curve: Curve, load: float, *, throughput: bool) -> float | None:
    if load not in curve.loads:
        return None
    index = curve.loads.index(load)
    if throughput:
        return curve.throughput_tokens_per_s[index]
    return curve.latencies["latency_ms_per_token", "upper"][index]
