"""The cells of a matrix one after the other, each a run folder; then one table and one report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from lmi_bench.analysis.results.checks import level_name
from lmi_bench.analysis.results.repeats import pooled_run
from lmi_bench.analysis.results.sweep_curve import sweep_curve
from lmi_bench.cli.console import note, print_table, say, warn
from lmi_bench.core.durable import write_text, write_whole
from lmi_bench.core.errors import InputError, LmiBenchError
from lmi_bench.core.run_store import KNEES, MANIFEST, Run, load_run
from lmi_bench.core.scenario import parse_scenario
from lmi_bench.core.slo import parse_slo
from lmi_bench.jobs.matrix_plan import Cell, read_matrix
from lmi_bench.jobs.sweep.run import SweepOptions, SweepOutcome, run_scenario
from lmi_bench.jobs.sweep.spend import Budget
from lmi_bench.report.formats import MISSING, load_name, number
from lmi_bench.report.slo_text import highest_meeting
from lmi_bench.targets.access import Access

MATRIX_FILE, REPORT_FILE = "matrix.json", "report.html"


@dataclass(slots=True)
class _State:
    """How far a cell is: waiting, finished, unfinished (a sweep was cut off), or failed."""

    cell: Cell
    state: str = "waiting"
    error: str = ""
    slo_missed: bool = False


def run_matrix(
    path: Path,
    overrides: Mapping[str, Any],
    options: SweepOptions,
    *,
    out: Path | None,
    resume: bool,
) -> SweepOutcome:
    """Run every cell that is not finished; a cell that fails does not keep the others from running.

    overrides  flags, laid over each cell's scenario
    Raises InputError where the file cannot be used or the folder exists and is not to be resumed.
    """
    cells = read_matrix(path)
    if options.trace is not None:
        raise InputError("--step-trace is for one engine: leave it out with --matrix")
    folder = out or Path("runs") / f"{datetime.now().astimezone():%Y%m%d-%H%M%S}-{path.stem}"
    if folder.exists() and not resume:
        raise InputError(
            f"{folder} exists: name another folder with --out, or continue it with --resume"
        )
    folder.mkdir(parents=True, exist_ok=True)
    states = [_State(cell, _state(folder / cell.folder)) for cell in cells]
    interrupted = False
    for place, each in enumerate(states, start=1):
        name = f"cell {place}/{len(states)}: {each.cell.title}"
        if each.state == "finished":
            note(f"{name}: finished already")
            continue
        say(f"\n== {name} ==")
        try:
            interrupted = _run_cell(folder, each, overrides, options, states)
        except LmiBenchError as exc:
            each.state, each.error = "failed", str(exc)
            warn(f"{name} failed: {exc}")
        except KeyboardInterrupt:
            interrupted, each.state = True, _state(folder / each.cell.folder)
        _write_state(folder, path, states)
        if interrupted:
            break
    _conclude(folder, states)
    if interrupted:
        note(f"interrupted: continue with --matrix {path} --resume --out {folder}")
    return SweepOutcome(
        interrupted=interrupted,
        failed=any(each.state == "failed" for each in states),
        slo_missed=any(each.slo_missed for each in states),
    )


def _run_cell(
    folder: Path,
    each: _State,
    overrides: Mapping[str, Any],
    options: SweepOptions,
    states: Sequence[_State],
) -> bool:
    """Sweep one cell; whether it was interrupted."""
    cell = each.cell
    run_folder = folder / cell.folder
    scenario = parse_scenario(cell.fields).with_overrides({**overrides, "name": None})
    budget = options.budget
    if cell.usd_per_hour is not None or cell.instance is not None:
        budget = Budget(cell.usd_per_hour, cell.instance, budget.max_usd)
    if budget.max_usd is not None:
        others = (load_run(folder / s.cell.folder) for s in states if s.state == "finished")
        left = budget.max_usd - sum(_spent_usd(run) for run in others)
        if left <= 0:
            raise InputError(f"--max-spend {budget.max_usd:g} USD is spent; the cell is not begun")
        budget = replace(budget, max_usd=left)
    key = cell.api_key()
    access = options.access if key is None else Access(key, options.access.headers)
    outcome = run_scenario(
        scenario,
        replace(options, budget=budget, access=access),
        out=run_folder,
        resume=run_folder.exists(),
    )
    each.state = _state(run_folder)
    each.slo_missed = outcome.slo_missed
    if outcome.failed:
        each.state, each.error = "failed", "no level is usable"
    return outcome.interrupted


def _state(folder: Path) -> str:
    """Of a run folder: its knees are written when its sweep is over."""
    if (folder / KNEES).exists():
        return "finished"
    return "unfinished" if (folder / MANIFEST).exists() else "waiting"


def _spent_usd(run: Run) -> float:
    return float((run.levels[-1].get("spent_usd") or 0.0) if run.levels else 0.0)


def _write_state(folder: Path, path: Path, states: Sequence[_State]) -> None:
    cells = [
        {
            "target": each.cell.target,
            "payload": each.cell.payload,
            "run": each.cell.folder,
            "state": each.state,
            "error": each.error or None,
        }
        for each in states
    ]
    write_whole(folder / MATRIX_FILE, {"schema_version": 1, "matrix": path.name, "cells": cells})


def _conclude(folder: Path, states: Sequence[_State]) -> None:
    """The table over all cells, and the report over those that have a level."""
    from lmi_bench.report.html import render_html
    from lmi_bench.report.view import build_view

    runs: dict[str, Run] = {}
    for each in states:
        if (folder / each.cell.folder / MANIFEST).exists():
            run = load_run(folder / each.cell.folder)
            if run.levels:
                runs[each.cell.folder] = run
    print_table(
        "Matrix",
        [_row(each, runs.get(each.cell.folder)) for each in states],
        left=("target", "payload", "state"),
    )
    if not runs:
        return
    labels = [each.cell.title for each in states if each.cell.folder in runs]
    page = render_html(build_view(list(runs.values()), [], labels=labels, title="Matrix"))
    write_text(folder / REPORT_FILE, page)
    say(f"matrix folder: {folder}   report: {folder / REPORT_FILE}")


def _row(each: _State, run: Run | None) -> dict[str, str]:
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
    if run is None:
        return row
    pooled = pooled_run(run)
    curve = sweep_curve(pooled.levels)
    knee = next((k for k in run.knees or () if k.get("recommended")), None)
    if knee is not None and knee.get(curve.axis) is not None:
        row["knee"] = load_name(curve.axis, knee[curve.axis])
    if run.slo_answer is not None and run.slo_answer.get("value") is not None:
        row["highest under SLO"] = load_name(run.slo_answer["load"], run.slo_answer["value"])
    else:
        slos = [parse_slo(text) for text in run.manifest["scenario"].get("slo") or ()]
        met = highest_meeting(pooled.levels, pooled.records, slos) if slos else None
        if met is not None:
            row["highest under SLO"] = level_name(met)
    if curve.usable:
        best = max(curve.usable, key=lambda point: point.throughput_tokens_per_s or 0.0)
        row["best tok/s"] = number(best.throughput_tokens_per_s)
        row["at"] = load_name(curve.axis, best.load)
        row["ms/token there"] = number(best.latency_ms_per_token)
    prices = [line.get("usd_per_1m_output_tokens") for line in pooled.levels]
    known = [price for price in prices if price is not None]
    if known:
        row["USD/1M out"] = number(min(known))
    return row
