"""The cells of a matrix one after the other, each a run folder; then one report over all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from lmi_bench.core.durable import write_text, write_whole
from lmi_bench.core.errors import InputError, LmiBenchError
from lmi_bench.core.listener import SILENT, Listener
from lmi_bench.core.run_store import KNEES, MANIFEST, Run, load_run
from lmi_bench.core.scenario import parse_scenario
from lmi_bench.jobs.matrix_plan import Combination, read_matrix
from lmi_bench.jobs.settings.sweep import SweepSettings
from lmi_bench.jobs.sweep.limits import Budget
from lmi_bench.jobs.sweep.result import SweepResult
from lmi_bench.jobs.sweep.run import SweepOptions, read_options, sweep_scenario
from lmi_bench.targets.access import Access

MATRIX_FILE, REPORT_FILE = "matrix.json", "report.html"

OnCell = Callable[[str, SweepResult | None], None]
"""Called with a cell's name when it begins (None), and with its result when it is over."""


@dataclass(slots=True)
class CellState:
    """How far a cell is: waiting, finished, unfinished (a sweep was cut off), or failed.

    run  as its folder has it; None where there is none
    """

    cell: Combination
    state: str = "waiting"
    error: str = ""
    slo_missed: bool = False
    run: Run | None = None


@dataclass(frozen=True, slots=True)
class MatrixResult:
    """All cells of a matrix; `report` is None where no cell has a level."""

    folder: Path
    file: Path
    cells: tuple[CellState, ...]
    report: Path | None = None
    interrupted: bool = False

    @property
    def failed(self) -> bool:
        """Whether a cell failed."""
        return any(each.state == "failed" for each in self.cells)

    @property
    def slo_missed(self) -> bool:
        """Whether no level of some cell meets what was asked."""
        return any(each.slo_missed for each in self.cells)


def run_matrix(
    settings: SweepSettings,
    listener: Listener = SILENT,
    on_cell: OnCell = lambda _name, _result: None,
) -> MatrixResult:
    """Run every cell that is not finished; a cell that fails does not keep the others from running.

    The settings are laid over each cell's scenario. Raises InputError where the file cannot be
    used or the folder exists and is not to be resumed.
    """
    path, run, overrides = settings.target.matrix, settings.run, settings.overrides()
    if path is None:
        raise InputError("--matrix FILE names the targets and payloads: give it")
    if settings.target.scenario is not None or settings.target.target is not None:
        raise InputError("--matrix names its targets: leave SCENARIO and --target out")
    if run.step_trace is not None:
        raise InputError("--step-trace is for one engine: leave it out with --matrix")
    cells, options = read_matrix(path), read_options(settings)
    folder = run.out or Path("runs") / f"{datetime.now().astimezone():%Y%m%d-%H%M%S}-{path.stem}"
    if folder.exists() and not run.resume:
        raise InputError(
            f"{folder} exists: name another folder with --out, or continue it with --resume"
        )
    folder.mkdir(parents=True, exist_ok=True)
    states = [_state_of(folder, cell) for cell in cells]
    interrupted = False
    for place, each in enumerate(states, start=1):
        name = f"cell {place}/{len(states)}: {each.cell.title}"
        if each.state == "finished":
            listener.note(f"{name}: finished already")
            continue
        on_cell(name, None)
        try:
            result = _run_cell(folder, each, overrides, options, states, listener)
            on_cell(name, result)
            interrupted = result.interrupted
        except LmiBenchError as exc:
            each.state, each.error = "failed", str(exc)
            listener.warn(f"{name} failed: {exc}")
        except KeyboardInterrupt:
            interrupted, each.state = True, _state(folder / each.cell.folder)
        _write_state(folder, path, states)
        if interrupted:
            break
    return MatrixResult(folder, path, tuple(states), _write_report(folder, states), interrupted)


def _run_cell(
    folder: Path,
    each: CellState,
    overrides: Mapping[str, Any],
    options: SweepOptions,
    states: Sequence[CellState],
    listener: Listener,
) -> SweepResult:
    """Sweep one cell and note in its state how that ended."""
    cell = each.cell
    run_folder = folder / cell.folder
    scenario = parse_scenario(cell.fields).with_overrides({**overrides, "name": None})
    budget = options.budget
    if cell.usd_per_hour is not None or cell.instance is not None:
        budget = Budget(cell.usd_per_hour, cell.instance, budget.max_usd)
    if budget.max_usd is not None:
        left = budget.max_usd - sum(_spent_usd(s.run) for s in states if s.state == "finished")
        if left <= 0:
            raise InputError(f"--max-spend {budget.max_usd:g} USD is spent; the cell is not begun")
        budget = replace(budget, max_usd=left)
    key = cell.api_key()
    access = options.access if key is None else Access(key, options.access.headers)
    result = sweep_scenario(
        scenario,
        replace(options, budget=budget, access=access),
        listener,
        out=run_folder,
        resume=run_folder.exists(),
    )
    each.run, each.state, each.slo_missed = result.run, _state(run_folder), result.slo_missed
    if result.failed:
        each.state, each.error = "failed", "no level is usable"
    return result


def _state_of(folder: Path, cell: Combination) -> CellState:
    state = _state(folder / cell.folder)
    run = None if state == "waiting" else load_run(folder / cell.folder)
    return CellState(cell, state, run=run)


def _state(folder: Path) -> str:
    """Of a run folder: its knees are written when its sweep is over."""
    if (folder / KNEES).exists():
        return "finished"
    return "unfinished" if (folder / MANIFEST).exists() else "waiting"


def _spent_usd(run: Run | None) -> float:
    return (run.levels[-1].spent_usd or 0.0) if run and run.levels else 0.0


def _write_state(folder: Path, path: Path, states: Sequence[CellState]) -> None:
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


def _write_report(folder: Path, states: Sequence[CellState]) -> Path | None:
    """One page over the cells that have a level."""
    from lmi_bench.report.html import render_html
    from lmi_bench.report.view import build_view

    shown = [(each.run, each.cell.title) for each in states if each.run and each.run.levels]
    if not shown:
        return None
    runs, labels = [run for run, _ in shown], [title for _, title in shown]
    page = render_html(build_view(runs, [], labels=labels, title="Matrix"))
    write_text(folder / REPORT_FILE, page)
    return folder / REPORT_FILE
