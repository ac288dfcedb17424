"""What a matrix of sweeps prints: each cell as a sweep, then a table over all."""

from __future__ import annotations

from lmi_bench.analysis.results.repeats import pooled_run
from lmi_bench.analysis.results.sweep_curve import sweep_curve
from lmi_bench.cli.console import Terminal, note, print_table, say
from lmi_bench.cli.sweep_print import print_sweep
from lmi_bench.core.slo import parse_slo
from lmi_bench.jobs.matrix import CellState, MatrixResult
from lmi_bench.jobs.sweep.result import SweepResult
from lmi_bench.report.formats import MISSING, load_name, number
from lmi_bench.report.slo_text import highest_meeting


def print_cell(listener: Terminal, name: str, result: SweepResult | None) -> None:
    """The heading of a cell that begins, or its result when it is over."""
    if result is None:
        say(f"\n== {name} ==")
        return
    listener.close()  # a progress line would be drawn over the tables
    print_sweep(result)


def print_matrix(result: MatrixResult) -> None:
    """The table over all cells, and where the report is."""
    print_table(
        "Matrix", [_row(each) for each in result.cells], left=("target", "payload", "state")
    )
    if result.report is not None:
        say(f"matrix folder: {result.folder}   report: {result.report}")
    if result.interrupted:
        note(f"interrupted: continue with --matrix {result.file} --resume --out {result.folder}")


def _row(each: CellState) -> dict[str, str]:
    row = {
        "target": each.cell.target,
        "payload": each.cell.payload,
        "knee": MISSING,
        "best tok/s": MISSING,
        "at": MISSING,
        "ms/token there": MISSING,
        "highest under SLO": MISSING,
        "USD/1M out": MISSING,
        "state": each.state + (f": {each.error}" if each.error else ""),
    }
    run = each.run
    if run is None or not run.levels:
        return row
    pooled = pooled_run(run)
    curve = sweep_curve(pooled.levels)
    knee = next((knee for knee in run.knees or () if knee.recommended), None)
    if knee is not None and knee.axis == curve.axis and knee.load is not None:
        row["knee"] = load_name(curve.axis, knee.load)
    answer = run.slo_answer
    if answer is not None and answer.value is not None:
        row["highest under SLO"] = load_name(answer.load, answer.value)
    else:
        slos = [parse_slo(text) for text in run.manifest["scenario"].get("slo") or ()]
        met = highest_meeting(pooled.levels, pooled.records, slos) if slos else None
        if met is not None:
            row["highest under SLO"] = met.name
    if curve.usable:
        best = max(curve.usable, key=lambda point: point.throughput_tokens_per_s or 0.0)
        row["best tok/s"] = number(best.throughput_tokens_per_s)
        row["at"] = load_name(curve.axis, best.load)
        row["ms/token there"] = number(best.latency_ms_per_token)
    prices = [line.usd_per_1m_output_tokens for line in pooled.levels]
    known = [price for price in prices if price is not None]
    if known:
        row["USD/1M out"] = number(min(known))
    return row
