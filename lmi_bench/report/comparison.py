"""Compares several runs with the first, level by level."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from lmi_bench.report.formats import MISSING, number
from lmi_bench.report.table import Cell, Field, Table, field, table_of
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

    def cell(curve: Curve, load: float, *, throughput: bool) -> Cell:
        value, first = (_value(each, load, throughput=throughput) for each in (curve, base))
        if value is None and curve is not base:
            return Cell(MISSING, "this run has no such level", "na")
        if value is None or not first or curve is base:
            return Cell(number(value))
        change = value / first - 1
        better = change > 0 if throughput else change < 0
        tone = "" if abs(change) < 0.05 else "good" if better else "bad"
        return Cell(f"{number(value)} ({change:+.0%})", "", tone)

    by_concurrency = base.axis == "concurrency"
    fields: list[Field[float]] = [
        field("Concurrent requests" if by_concurrency else "Request rate, req/s", "{:g}".format)
    ]
    for group, throughput in (("Throughput, tok/s", True), ("Latency p90, ms/token", False)):
        for curve in ordered:
            title = f"{curve.label} (predicted)" if curve.simulated else curve.label
            of_run = partial(cell, curve, throughput=throughput)
            fields.append(field(title, of_run, group))
    left_out = len(curves) - len(same)
    note = f"Differences are against {base.label}, a single run each: no test of significance."
    if left_out:
        note += f" {left_out} run(s) over another kind of load are left out."
    return table_of("Runs side by side", fields, loads, note)


def _value(curve: Curve, load: float, *, throughput: bool) -> float | None:
    if load not in curve.loads:
        return None
    index = curve.loads.index(load)
    if throughput:
        return curve.throughput_tokens_per_s[index]
    return curve.latencies["latency_ms_per_token", "upper"][index]
