"""One calibration: gather cells from whatever was measured, fit, print, save, say what is next."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lmi_bench.analysis.fit.calibrate import profile_of_fit
from lmi_bench.analysis.fit.discrepancy import observations_of
from lmi_bench.analysis.fit.experiment_design import choose_cells
from lmi_bench.analysis.fit.fit import Fit, fit_cells, prior_fit
from lmi_bench.analysis.fit.measured_tables import read_table
from lmi_bench.analysis.fit.summary_files import (
    Served,
    cell_of_summary,
    model_named_in,
    read_summary,
)
from lmi_bench.analysis.fit.unstated import fit_unstated
from lmi_bench.analysis.level.cells import Cell, Metric, can_run, marks_of
from lmi_bench.analysis.model.builtin_profiles import (
    EAGER_GPU_PRIOR,
    GRAPH_GPU_PRIOR,
    prior_of_engine,
)
from lmi_bench.analysis.model.checkpoint_dtype import planned_dtype
from lmi_bench.analysis.model.local_machine import MeasuredMachine
from lmi_bench.analysis.model.profiles import PARAMETER_NAMES, EngineProfile, profile_to_json
from lmi_bench.catalog.instances import find_instance
from lmi_bench.catalog.models import find_model
from lmi_bench.cli.console import print_table, say, warn
from lmi_bench.core.durable import write_text
from lmi_bench.core.errors import InputError
from lmi_bench.core.units import format_figure
from lmi_bench.jobs.run_cells import cells_of_run_folder
from lmi_bench.targets.profiles import find_profile

_SHOWN_LEVELS = 12
_MOST_USERS = 512
_FIRST_TOKENS = 256  # in and out, of levels that nobody has measured


@dataclass(frozen=True, slots=True)
class Order:
    """The command's flags; None is what was left out."""

    sources: tuple[Path, ...]
    out: Path | None
    profile: str | None
    model: str | None
    instance: str | None
    tensor_parallel: int
    dtype: str | None
    version: str | None
    next_cells: int


@dataclass(slots=True)
class _Gathered:
    """Cells so far, the prior that their source suggests, and `local` where they are of it."""

    cells: list[Cell]
    base: EngineProfile | None = None
    machine: MeasuredMachine | None = None


def run(order: Order) -> None:
    """Calibrate. Raises InputError where a source cannot be used."""
    given = None if order.profile is None else find_profile(order.profile)
    if not order.sources:
        _plan_first(order, given or GRAPH_GPU_PRIOR)
        return
    # shares of a prior that was fitted here are of the figures that it keeps
    gathered = _Gathered([], machine=None if given is None else given.machine)
    for source in order.sources:
        if source.is_dir():
            _add_run(order, source, gathered)
        elif source.suffix.lower() in (".json", ".jsonl"):
            _add_summary(order, source, gathered)
        else:
            _add_table(source, gathered)
    base = given or gathered.base or EAGER_GPU_PRIOR
    # sweeps state their lengths; tables and summaries of other tools do not
    own = any(source.is_dir() for source in order.sources)
    fit = fit_cells(base, gathered.cells) if own else fit_unstated(base, gathered.cells)
    profile = profile_of_fit(
        fit,
        version=order.version,
        fitted_on=_fitted_on(order, gathered.cells),
        fitted_date=datetime.now(UTC).date().isoformat(),
        keep_levels=True,
    )
    profile = replace(profile, machine=gathered.machine)
    if order.out is not None:
        write_text(order.out, profile_to_json(profile))
    _print(fit, profile)
    if order.next_cells:
        _print_next(fit, order.next_cells, fit.cells)
    if order.out is not None:
        say(f"profile: {order.out}")


def _plan_first(order: Order, base: EngineProfile) -> None:
    """Name the levels to measure of a model on a machine of which nothing is known yet."""
    if not order.next_cells or order.model is None or order.instance is None:
        raise InputError(
            "name sweeps or tables to fit to; or, to learn what to measure first, give --next, "
            "--model and --instance"
        )
    if order.out is not None:
        raise InputError("--out needs measured levels: nothing was fitted")
    plain = Cell(
        shape=find_model(order.model),
        instance=find_instance(order.instance),
        tensor_parallel=order.tensor_parallel,
        dtype=planned_dtype(order.model, order.dtype),
        input_tokens=_FIRST_TOKENS,
        output_tokens=_FIRST_TOKENS,
        concurrency=1,
        num_requests=1,
    )
    fit = prior_fit(base, [plain])
    say(base.provenance)
    _print_next(fit, order.next_cells, [plain])


def _fitted_on(order: Order, cells: Sequence[Cell]) -> str:
    models = ", ".join(dict.fromkeys(cell.shape.name for cell in cells))
    machines = ", ".join(dict.fromkeys(cell.instance.instance_type for cell in cells))
    names = ", ".join(source.name for source in order.sources)
    return f"{len(cells)} levels of {models} on {machines} ({names})"


def _add_run(order: Order, source: Path, gathered: _Gathered) -> None:
    found = cells_of_run_folder(
        source,
        model=order.model,
        instance=order.instance,
        dtype=order.dtype,
        machine=gathered.machine,
    )
    gathered.cells += found.cells
    gathered.base = found.base
    gathered.machine = found.machine or gathered.machine


def _add_summary(order: Order, source: Path, gathered: _Gathered) -> None:
    content = read_summary(source)
    model = order.model or model_named_in(content)
    if model is None or order.instance is None:
        missing = "--model" if model is None else "--instance"
        raise InputError(f"{source} does not say {missing.removeprefix('--')}: add {missing}")
    served = Served(
        find_model(model),
        find_instance(order.instance),
        order.tensor_parallel,
        planned_dtype(model, order.dtype),
    )
    gathered.cells.append(cell_of_summary(source, content, served))
    gathered.base = gathered.base or GRAPH_GPU_PRIOR


def _add_table(source: Path, gathered: _Gathered) -> None:
    rows = [row for row in read_table(source) if row.cell is not None]
    engines = sorted({row.engine for row in rows})
    if len(engines) > 1:
        raise InputError(
            f"{source} is of {len(engines)} engines ({', '.join(engines)}): a profile is of one; "
            "keep the lines of one of them"
        )
    cells = [row.cell for row in rows if row.cell is not None]
    if not cells:
        raise InputError(f"{source}: no line can be used")
    gathered.cells += cells
    gathered.base = prior_of_engine(
        engines[0],
        models={cell.shape.name for cell in cells},
        accelerators={cell.instance.accelerator.name for cell in cells},
        open_loop=any(cell.rate_per_s is not None for cell in cells),
        marks=marks_of(cells),
    )


def _print(fit: Fit, profile: EngineProfile) -> None:
    say(profile.provenance)
    print_table(
        "Parameters",
        [
            {
                "parameter": name,
                "value": f"{getattr(profile.parameters, name):.4g}",
                "80 % factor": f"{1 + 1.2816 * profile.log_sd[name]:.2f}",
            }
            for name in PARAMETER_NAMES
            if name in profile.log_sd
        ],
        left=("parameter",),
    )
    items = observations_of(fit.cells)
    worst = sorted(
        zip(items, fit.residuals, strict=True), key=lambda pair: abs(pair[1]), reverse=True
    )
    print_table(
        "Largest misfits",
        [
            {
                "level": describe(item.cell),
                "figure": item.metric,
                "measured / predicted": f"{math.expm1(float(residual)):+.1%}",
            }
            for item, residual in worst[:_SHOWN_LEVELS]
        ],
        left=("level", "figure"),
    )
    for text in profile.notes:
        warn(text)


def describe(cell: Cell) -> str:
    """A level for people."""
    load = f"{cell.concurrency} users" if cell.rate_per_s is None else f"{cell.rate_per_s:g} req/s"
    return (
        f"{cell.shape.name} on {cell.instance.instance_type}, TP {cell.tensor_parallel}, "
        f"{cell.input_tokens} in / {cell.output_tokens} out, {load}"
    )


def _print_next(fit: Fit, count: int, like: Sequence[Cell]) -> None:
    """`count` levels to measure, on the machines and at the lengths of cells like these."""
    wanted = _grid(fit, like)
    if not wanted:
        raise InputError(
            f"{like[0].shape.name} in {like[0].dtype} fits {like[0].instance.instance_type} at no "
            "tensor-parallel degree: nothing can be measured there"
        )
    metrics: list[Metric] = ["throughput_tokens_per_s", "tpot_mean_s"]
    known = {_key(cell) for cell in fit.cells}
    candidates = [cell for cell in wanted if _key(cell) not in known]
    chosen = choose_cells(fit, candidates, wanted, count, metrics)
    rows: list[dict[str, Any]] = []
    for index in chosen:
        said = fit.estimates(candidates[index], metrics)["throughput_tokens_per_s"]
        rows.append(
            {
                "level": describe(candidates[index]),
                "expected tok/s": "{} [{} to {}]".format(
                    *map(format_figure, (said.value, said.low, said.high))
                ),
            }
        )
    print_table("Measure next, the most telling first", rows, left=("level",))


def _key(cell: Cell) -> tuple[object, ...]:
    return (
        cell.shape.name,
        cell.instance.instance_type,
        cell.tensor_parallel,
        cell.input_tokens,
        cell.output_tokens,
        cell.concurrency,
        cell.rate_per_s,
    )


def _grid(fit: Fit, like: Sequence[Cell]) -> list[Cell]:
    """Closed loops of 1 to 512 users, at the lengths of the cells and with a prompt of four times
    the longest, on every machine and degree that the cells are of or that can be had on it."""
    grid: dict[tuple[object, ...], Cell] = {}
    longest = max(cell.input_tokens for cell in like)
    for measured in like:
        degrees = {measured.tensor_parallel}
        degree = 1
        while degree <= measured.instance.num_accelerators:
            degrees.add(degree)
            degree *= 2
        for tensor_parallel in sorted(degrees):
            for prompt in sorted({measured.input_tokens, 4 * longest}):
                users = 1
                while users <= _MOST_USERS:
                    cell = replace(
                        measured,
                        tensor_parallel=tensor_parallel,
                        input_tokens=prompt,
                        concurrency=users,
                        rate_per_s=None,
                        num_requests=3 * users,
                        replicas=1,
                        max_sequences=None,
                    )
                    if _key(cell) not in grid and can_run(fit.profile, cell):
                        grid[_key(cell)] = cell
                    users *= 4
    return list(grid.values())
