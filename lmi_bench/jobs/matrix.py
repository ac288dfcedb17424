"""A matrix of sweeps: every payload on every target, a run folder each, then one report."""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from lmi_bench.analysis.results.gate import OUTCOMES, Outcome
from lmi_bench.core.durable import write_inside, write_whole
from lmi_bench.core.errors import InputError, LmiBenchError
from lmi_bench.core.json_value import check_types
from lmi_bench.core.listener import SILENT, Listener
from lmi_bench.core.redaction import redact_text
from lmi_bench.core.run_store import KNEES, MANIFEST, Run, load_run
from lmi_bench.core.scenario import Scenario, load_scenario, parse_scenario, read_yaml
from lmi_bench.core.scenario_sections import Section
from lmi_bench.jobs.files import checked
from lmi_bench.jobs.settings.sweep import RunSettings, SweepSettings
from lmi_bench.jobs.sweep.limits import Budget
from lmi_bench.jobs.sweep.result import SweepResult, finished_run
from lmi_bench.jobs.sweep.run import SweepOptions, read_options, refuse_without_effect, sweep_scenario
from lmi_bench.report.live import REPORT_FILE
from lmi_bench.targets.bench import Access

_TARGET_FIELDS = {"instance": "instance", "price_per_hour": "usd_per_hour", "api_key_env": "api_key_env"}


class _MatrixFile(Section):
    targets: Annotated[list[str | dict[str, Any]], Field(min_length=1)]
    payloads: Annotated[list[str | dict[str, Any]], Field(min_length=1)]
    defaults: Mapping[str, Any] = Field(default_factory=dict)


@dataclass(slots=True)
class Cell:
    """One payload on one target, and the state of its sweep.

    instance, usd_per_hour  type and price of the target's machines, if the file states them
    state  waiting, finished, unfinished (its sweep was cut off), or failed
    run    as its folder has it; None if there is none
    """

    target: str
    payload: str
    scenario: Scenario
    instance: str | None = None
    usd_per_hour: float | None = None
    api_key_env: str | None = None
    state: str = "waiting"
    error: str = ""
    slo_outcome: Outcome | None = None
    run: Run | None = None

    @property
    def folder(self) -> str:
        """Name of the cell's run folder."""
        return f"{_slug(self.target)}--{_slug(self.payload)}"

    @property
    def title(self) -> str:
        """The cell's name in tables and reports."""
        return f"{self.payload} on {self.target}"

    def to_json(self) -> dict[str, Any]:
        """As matrix.json has it."""
        known = {"target": self.target, "payload": self.payload, "run": self.folder}
        return known | {"state": self.state, "error": self.error or None}

    def keep(self, result: SweepResult) -> None:
        """Take over how the cell's sweep ended."""
        self.run, self.slo_outcome = result.run, result.slo_outcome
        self.state = _state(result.folder)
        if result.failed:
            self.state, self.error = "failed", "no level is usable"


def read_matrix(path: Path) -> list[Cell]:
    """The cells of a matrix file, payload after payload on each target.

    Every cell's scenario is checked before anything runs. Raises InputError.
    """
    expected = "`targets` and `payloads`, lists, and optionally `defaults`"
    matrix = checked(_MatrixFile, read_yaml(path), source=str(path), expected=expected)
    targets = [_target(entry) for entry in matrix.targets]
    payloads = [_payload(entry, path.parent) for entry in matrix.payloads]
    cells = [_cell(path, one, payload, matrix.defaults) for one in targets for payload in payloads]
    folders = [cell.folder for cell in cells]
    for cell in cells:
        if folders.count(cell.folder) > 1:
            raise InputError(f"{path}: two cells have the name {cell.title}: rename one")
    return cells


def _target(entry: str | dict[str, Any]) -> dict[str, Any]:
    fields = {"target": entry} if isinstance(entry, str) else dict(entry)
    if "target" not in fields:
        raise InputError(f"matrix: the target {fields.get('name', fields)} has no `target`")
    fields.setdefault("name", redact_text(str(fields["target"])))  # it names folders
    return fields


def _payload(entry: str | dict[str, Any], base: Path) -> dict[str, Any]:
    if isinstance(entry, str):
        path = base / entry
        load_scenario(path)  # raises for a faulty one
        stated = read_yaml(path) or {}
        entry, base = {"name": path.stem, **stated}, path.parent
    if "name" not in entry:
        raise InputError(f"matrix: the payload {entry} has no `name`")
    fields = {name: value for name, value in entry.items() if name != "target"}
    if isinstance(workload := fields.get("workload"), dict):  # else the scenario's check says so
        for name in ("dataset", "trace", "conversations"):
            if isinstance(file := workload.get(name), str) and file:
                workload = workload | {name: str(base / file)}
        fields["workload"] = workload
    return fields


def _cell(path: Path, target: dict[str, Any], payload: dict[str, Any], defaults: Mapping[str, Any]) -> Cell:
    own = ("name", *_TARGET_FIELDS)
    stated = {name: value for name, value in target.items() if name not in own}
    fields = _merged(_merged(defaults, payload), stated)
    fields["name"] = f"{payload['name']} on {target['name']}"
    scenario = parse_scenario(fields, source=f"{path}, {fields['name']}")
    known: dict[str, Any] = {field: target.get(name) for name, field in _TARGET_FIELDS.items()}
    check_types(Cell, known, f"{path}, {fields['name']}")
    return Cell(str(target["name"]), str(payload["name"]), scenario, **known)


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """One mapping over the other, section by section."""
    merged = dict(below)
    for name, value in above.items():
        known = merged.get(name)
        both = isinstance(known, Mapping) and isinstance(value, Mapping)
        merged[name] = _merged(known, value) if both else value  # type: ignore[arg-type]
    return merged


def _slug(text: str) -> str:
    """Text as part of a folder's name; only target and payload are joined by two hyphens."""
    words = "-".join(filter(None, re.split(r"[^\w.]+", text)))
    return words.encode()[:100].decode(errors="ignore").strip(".") or "cell"


MATRIX_FILE = "matrix.json"

OnCell = Callable[[str, SweepResult | None], None]
"""Called with a cell's name and None when it begins, and with its result when it is over."""


@dataclass(frozen=True, slots=True)
class MatrixResult:
    """All cells of a matrix; `report` is None if no cell has a level."""

    folder: Path
    file: Path
    cells: tuple[Cell, ...]
    report: Path | None = None
    interrupted: bool = False

    @property
    def failed(self) -> bool:
        """Whether a cell failed."""
        return any(each.state == "failed" for each in self.cells)

    @property
    def slo_outcome(self) -> Outcome | None:
        """The worst outcome of a cell; None without SLOs."""
        found = {each.slo_outcome for each in self.cells}
        return next((each for each in OUTCOMES if each in found), None)


def run_matrix(
    settings: SweepSettings, listener: Listener = SILENT, on_cell: OnCell = lambda _name, _result: None
) -> MatrixResult:
    """Run every cell that is not finished; a failed cell does not stop the others.

    The settings override each cell's scenario. Raises InputError for a file that cannot be used or
    a folder that exists without --resume.
    """
    path, run, overrides = settings.target.matrix, settings.run, settings.overrides()
    if path is None:
        raise InputError("--matrix FILE is missing: it names the targets and payloads")
    _check(run, overrides, is_named=settings.target.scenario is not None)
    cells, options = read_matrix(path), read_options(settings)
    refuse_without_effect(settings, *(each.scenario.with_overrides(overrides) for each in cells))
    folder = run.out or Path("runs") / f"{datetime.now().astimezone():%Y%m%d-%H%M%S}-{path.stem}"
    if folder.exists() and not run.resume:
        raise InputError(f"{folder} exists: name another folder with --out, or continue it with --resume")
    folder.mkdir(parents=True, exist_ok=True)
    for each in cells:
        each.state = _state(folder / each.folder)
        if each.state != "waiting":
            with suppress(LmiBenchError):  # a damaged one fails in its turn
                each.run = load_run(folder / each.folder, to_resume=True)
    interrupted = False
    for place, each in enumerate(cells, start=1):
        name = f"cell {place}/{len(cells)}: {each.title}"
        try:
            scenario = each.scenario.with_overrides({**overrides, "name": None})
            found = finished_run(folder / each.folder, scenario, options.slo)
            if found is not None:
                each.keep(found)
                listener.note(f"{name}: {each.state} already")
                continue
            on_cell(name, None)
            others = [other for other in cells if other is not each]
            result = _run_cell(folder, each, scenario, options, others, listener)
            each.keep(result)
            on_cell(name, result)
            interrupted = result.interrupted
        except LmiBenchError as exc:
            each.state, each.error = "failed", str(exc)
            listener.warn(f"{name} failed: {exc}")
        except KeyboardInterrupt:
            interrupted, each.state = True, _state(folder / each.folder)
        listed = [each.to_json() for each in cells]
        state = {"schema_version": 1, "matrix": path.name, "cells": listed}
        write_whole(folder / MATRIX_FILE, state)
        if interrupted:
            break
    return MatrixResult(folder, path, tuple(cells), _write_report(folder, cells), interrupted)


def _check(run: RunSettings, overrides: Mapping[str, Any], *, is_named: bool) -> None:
    """Raise InputError for what a matrix does not take."""
    if is_named or "target" in overrides:
        raise InputError("--matrix names its targets: leave SCENARIO and --target out")
    for option, value, why in (
        ("--step-trace", run.step_trace, "needs a single engine"),
        ("--live", run.live, "follows a single sweep"),
        ("--measure-startup", run.measure_startup, "starts a single server"),
        ("--name", overrides.get("name"), "is for a single sweep, a matrix names its cells"),
    ):
        if value is not None:
            raise InputError(f"{option} {why}: leave it out with --matrix")
    if run.resume and run.out is None:
        raise InputError("--resume continues a matrix: name its folder with --out")


def _run_cell(
    folder: Path, cell: Cell, scenario: Scenario, options: SweepOptions, others: Sequence[Cell], listener: Listener
) -> SweepResult:
    """Sweep a cell for the money that the others left."""
    run_folder = folder / cell.folder
    budget = options.budget
    if cell.usd_per_hour is not None or cell.instance is not None:
        budget = Budget(cell.usd_per_hour, cell.instance, budget.max_usd)
    if budget.max_usd is not None:
        runs = [other.run for other in others]
        left = budget.max_usd - sum(r.levels[-1].spent_usd or 0.0 for r in runs if r and r.levels)
        if left <= 0:
            raise InputError(f"--max-spend {budget.max_usd:g} USD is spent; this cell is left out")
        budget = replace(budget, max_usd=left)
    access = options.access
    if cell.api_key_env is not None:
        key = os.environ.get(cell.api_key_env)
        if not key:
            raise InputError(f"target {cell.target}: the variable {cell.api_key_env} is not set")
        access = Access(key, access.headers)
    return sweep_scenario(
        scenario, replace(options, budget=budget, access=access), listener, out=run_folder, resume=run_folder.exists()
    )


def _state(folder: Path) -> str:
    """The state of a run folder; its knees are written when its sweep is over."""
    if (folder / KNEES).exists():
        return "finished"
    return "unfinished" if (folder / MANIFEST).exists() else "waiting"


def _write_report(folder: Path, cells: Sequence[Cell]) -> Path | None:
    from lmi_bench.report.html import render_html
    from lmi_bench.report.view import build_view

    shown = [(each.run, each.title) for each in cells if each.run and each.run.levels]
    if not shown:
        return None
    runs, labels = [run for run, _ in shown], [title for _, title in shown]
    page = render_html(build_view(runs, [], labels=labels, title="Matrix"))
    write_inside(folder / REPORT_FILE, page)
    return folder / REPORT_FILE
