"""Compares several runs with the first, level by level: their values, and `compare`'s verdicts."""

from collections.abc import Sequence
from functools import partial

from lmi_bench.analysis.results.compare import Difference, compare_runs
from lmi_bench.core.errors import InputError
from lmi_bench.core.run_store import Run
from lmi_bench.report.formats import MISSING, metric_title, number
from lmi_bench.report.table import Cell, Field, Table, table_of
from lmi_bench.report.tables.levels import load_title
from lmi_bench.report.values import LATENCY, THROUGHPUT, Curve

_TONES = {"faster": "good", "slower": "bad", "unknown": "na"}


def base_of(curves: Sequence[Curve]) -> int:
    """The run that the others are compared with: the first measured one, else the first."""
    return next((at for at, curve in enumerate(curves) if not curve.simulated), 0)


def verdicts_table(base: Run, other: Run, labels: tuple[str, str]) -> Table | str:
    """`compare`'s verdict on each level and metric, or why there is none.

    labels  of the base and of the other run
    """
    first, second = labels
    command = f"lmi-bench compare {base.path} {other.path}"
    try:
        found = compare_runs(base, other)
    except InputError as exc:
        return f"{second} against {first} has no verdict: {exc}"
    by_level: dict[str, dict[str, Difference]] = {}
    for each in found:
        by_level.setdefault(each.level, {})[each.metric] = each

    def cell(level: str, metric: str) -> Cell:
        each = by_level[level].get(metric)
        if each is None or each.change is None or each.low is None or each.high is None:
            return Cell("unknown", each.reason if each else "not measured", "na")
        hint = f"{number(each.a)} and {number(each.b)} {each.unit}"
        if each.detectable is not None:
            hint += f"; a change of {each.detectable:.1%} would be seen"
        between = f"{each.low:+.1%} to {each.high:+.1%}"
        text = f"{each.verdict}, {each.change:+.1%}"
        return Cell(text, hint, _TONES.get(each.verdict, ""), between)

    metrics = dict.fromkeys(each.metric for each in found)
    fields: list[Field[str]] = [
        Field("Level", str, numeric=False),
        *(Field(metric_title(name), partial(cell, metric=name)) for name in metrics),
    ]
    note = (
        f"Changes of {second} against {first}, each with its 95 % interval, as {command} gives "
        "them: faster and slower hold for all figures of the table together (Holm)."
    )
    return table_of(f"{second} against {first}: verdicts", fields, by_level, note)


def comparison_table(curves: Sequence[Curve]) -> Table | None:
    """Throughput and upper latency of runs over the same axis; None with fewer than two.

    A simulated run beside measured ones is a prediction, and its difference an error.
    """
    if len(curves) < 2:
        return None
    base = curves[base_of(curves)]
    same = [curve for curve in curves if curve.axis == base.axis]
    if len(same) < 2:
        return None
    ordered = [base, *(curve for curve in same if curve is not base)]
    loads = sorted({load for curve in ordered for load in curve.loads})

    def cell(curve: Curve, load: float, *, of: tuple[str, str]) -> Cell:
        pairs = (zip(each.loads, each.values[of], strict=True) for each in (curve, base))
        value, first = (dict(each).get(load) for each in pairs)
        judged = (dict(zip(each.loads, each.valid, strict=True)).get(load) for each in (curve, base))
        if value is not None and False in judged:
            return Cell(number(value), "invalid or cut short in one of the runs", "warn")
        if value is None and curve is not base:
            return Cell(MISSING, "this run has no such level", "na")
        if value is None or not first or curve is base:
            return Cell(number(value))
        change = value / first - 1
        better = change > 0 if of == THROUGHPUT else change < 0
        tone = "" if abs(change) < 0.05 else "good" if better else "bad"
        return Cell(f"{number(value)} ({change:+.0%})", "", tone)

    fields: list[Field[float]] = [Field(load_title(base.axis), "{:g}".format)]
    for group, of in (("Throughput, tok/s", THROUGHPUT), ("Latency p90, ms/token", LATENCY)):
        for curve in ordered:
            title = f"{curve.label} (predicted)" if curve.simulated else curve.label
            fields.append(Field(title, partial(cell, curve, of=of), group))
    left_out = len(curves) - len(same)
    note = f"Differences are against {base.label}, a single run each; the verdicts test them."
    if left_out:
        note += f" {left_out} run(s) over another kind of load are left out."
    return table_of("Runs side by side", fields, loads, note)
