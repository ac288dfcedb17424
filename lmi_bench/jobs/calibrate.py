"""One calibration: gather measured levels, fit a profile to them, choose what to measure next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from lmi_bench.analysis.fit.calibrate import profile_of_fit
from lmi_bench.analysis.fit.experiment_design import choose_cells
from lmi_bench.analysis.fit.fit import Fit, fit_cells, prior_fit
from lmi_bench.analysis.fit.from_run import cells_from_run, profile_for_run, run_model
from lmi_bench.analysis.fit.measured_files import (
    cell_of_summary,
    model_named_in,
    read_summary,
    read_table,
)
from lmi_bench.analysis.fit.uncertainty import Estimate, estimates
from lmi_bench.analysis.fit.unstated import fit_unstated
from lmi_bench.analysis.level.cells import MeasuredLevel, Metric, can_run, marks_of
from lmi_bench.analysis.model.builtin_profiles import (
    BUNDLED_CPU_PRIOR,
    EAGER_GPU_PRIOR,
    GRAPH_GPU_PRIOR,
    SERVED_CPU_PRIOR,
    prior_of_engine,
)
from lmi_bench.analysis.model.checkpoint_dtype import narrow_dtype, planned_dtype
from lmi_bench.analysis.model.local_machine import LOCAL_NAME, MeasuredMachine, probe_machine
from lmi_bench.analysis.model.profiles import EngineProfile
from lmi_bench.analysis.model.setup import Setup
from lmi_bench.catalog.instances import find_instance
from lmi_bench.catalog.models import find_model
from lmi_bench.core.errors import InputError
from lmi_bench.core.load import Load
from lmi_bench.core.run_store import load_run
from lmi_bench.jobs.settings.calibrate import CalibrateSettings
from lmi_bench.targets.profiles import find_profile

_MOST_USERS = 512
_TELLING: list[Metric] = ["throughput_tokens_per_s", "tpot_mean_s"]
_FIRST_TOKENS = 256  # in and out, of levels that nobody has measured


@dataclass(frozen=True, slots=True)
class NextLevel:
    """A level to measure, and the throughput that is expected of it."""

    level: MeasuredLevel
    expected: Estimate


@dataclass(frozen=True, slots=True)
class Calibration:
    """A fit, its profile, and the levels to measure next, the most telling first.

    is_fitted  false where nothing was measured: the profile is the prior
    """

    fit: Fit
    profile: EngineProfile
    is_fitted: bool
    next_levels: tuple[NextLevel, ...]


@dataclass(frozen=True, slots=True)
class RunCells:
    """The usable levels of a run, the prior of its kind of engine, and `local` if it is of it."""

    cells: list[MeasuredLevel]
    base: EngineProfile
    machine: MeasuredMachine | None


@dataclass(slots=True)
class _Gathered:
    """Cells so far, the prior that their source suggests, and `local` where they are of it."""

    cells: list[MeasuredLevel]
    base: EngineProfile | None = None
    machine: MeasuredMachine | None = None


def calibrate(settings: CalibrateSettings) -> Calibration:
    """Fit a profile. Raises InputError where a source cannot be used."""
    given = None if settings.profile is None else find_profile(settings.profile)
    if not settings.sources:
        return _plan_first(settings, given or GRAPH_GPU_PRIOR)
    # shares of a prior that was fitted here are of the figures that it keeps
    gathered = _Gathered([], machine=None if given is None else given.machine)
    for source in settings.sources:
        if source.is_dir():
            _add_run(settings, source, gathered)
        elif source.suffix.lower() in (".json", ".jsonl"):
            _add_summary(settings, source, gathered)
        else:
            _add_table(source, gathered)
    base = given or gathered.base or EAGER_GPU_PRIOR
    # sweeps state their lengths; tables and summaries of other tools do not
    own = any(source.is_dir() for source in settings.sources)
    fit = fit_cells(base, gathered.cells) if own else fit_unstated(base, gathered.cells)
    profile = profile_of_fit(
        fit,
        version=settings.version,
        fitted_on=_fitted_on(settings.sources, gathered.cells),
        fitted_date=datetime.now(UTC).date().isoformat(),
        keep_levels=True,
    )
    profile = replace(profile, machine=gathered.machine)
    return Calibration(fit, profile, True, _next(fit, settings.next_levels, fit.cells))


def _plan_first(settings: CalibrateSettings, base: EngineProfile) -> Calibration:
    """Choose the levels to measure of a model on a machine of which nothing is known yet."""
    assert settings.model is not None
    assert settings.instance is not None
    plain = MeasuredLevel(
        Setup(
            find_model(settings.model),
            find_instance(settings.instance),
            settings.tensor_parallel,
            planned_dtype(settings.model, settings.dtype),
        ),
        input_tokens=_FIRST_TOKENS,
        output_tokens=_FIRST_TOKENS,
        load=Load(1),
        num_requests=1,
    )
    fit = prior_fit(base, [plain])
    return Calibration(fit, base, False, _next(fit, settings.next_levels, [plain]))


def _fitted_on(sources: Sequence[Path], cells: Sequence[MeasuredLevel]) -> str:
    models = ", ".join(dict.fromkeys(cell.setup.shape.name for cell in cells))
    machines = ", ".join(dict.fromkeys(cell.setup.instance.instance_type for cell in cells))
    names = ", ".join(source.name for source in sources)
    return f"{len(cells)} levels of {models} on {machines} ({names})"


def _add_run(settings: CalibrateSettings, source: Path, gathered: _Gathered) -> None:
    found = cells_of_run_folder(
        source,
        model=settings.model,
        instance=settings.instance,
        dtype=settings.dtype,
        machine=gathered.machine,
    )
    gathered.cells += found.cells
    gathered.base = found.base
    gathered.machine = found.machine or gathered.machine


def _add_summary(settings: CalibrateSettings, source: Path, gathered: _Gathered) -> None:
    content = read_summary(source)
    model = settings.model or model_named_in(content)
    if model is None or settings.instance is None:
        missing = "--model" if model is None else "--instance"
        raise InputError(f"{source} does not say {missing.removeprefix('--')}: add {missing}")
    served = Setup(
        find_model(model),
        find_instance(settings.instance),
        settings.tensor_parallel,
        planned_dtype(model, settings.dtype),
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
        models={cell.setup.shape.name for cell in cells},
        accelerators={cell.setup.instance.accelerator.name for cell in cells},
        open_loop=any(cell.rate_per_s is not None for cell in cells),
        marks=marks_of(cells),
    )


def _next(fit: Fit, count: int, like: Sequence[MeasuredLevel]) -> tuple[NextLevel, ...]:
    """`count` levels to measure, on the machines and at the lengths of cells like these."""
    if not count:
        return ()
    wanted = _grid(fit, like)
    if not wanted:
        setup = like[0].setup
        raise InputError(
            f"{setup.shape.name} in {setup.dtype} fits {setup.instance.instance_type} at no "
            "tensor-parallel degree: nothing can be measured there"
        )
    known = {_key(cell) for cell in fit.cells}
    candidates = [cell for cell in wanted if _key(cell) not in known]
    chosen = choose_cells(fit, candidates, wanted, count, _TELLING)
    return tuple(
        NextLevel(
            candidates[index],
            estimates(fit, candidates[index], _TELLING)["throughput_tokens_per_s"],
        )
        for index in chosen
    )


def _key(cell: MeasuredLevel) -> tuple[object, ...]:
    return (
        cell.setup.shape.name,
        cell.setup.instance.instance_type,
        cell.setup.tensor_parallel,
        cell.input_tokens,
        cell.output_tokens,
        cell.concurrency,
        cell.rate_per_s,
    )


def _grid(fit: Fit, like: Sequence[MeasuredLevel]) -> list[MeasuredLevel]:
    """Closed loops of 1 to 512 users, at the lengths of the cells and with a prompt of four times
    the longest, on every machine and degree that the cells are of or that can be had on it."""
    grid: dict[tuple[object, ...], MeasuredLevel] = {}
    longest = max(cell.input_tokens for cell in like)
    for measured in like:
        degrees = {measured.setup.tensor_parallel}
        degree = 1
        while degree <= measured.setup.instance.num_accelerators:
            degrees.add(degree)
            degree *= 2
        for tensor_parallel in sorted(degrees):
            for prompt in sorted({measured.input_tokens, 4 * longest}):
                users = 1
                while users <= _MOST_USERS:
                    cell = replace(
                        measured,
                        setup=replace(measured.setup, tensor_parallel=tensor_parallel),
                        input_tokens=prompt,
                        load=Load(users),
                        num_requests=3 * users,
                        replicas=1,
                        max_sequences=None,
                    )
                    if _key(cell) not in grid and can_run(fit.profile, cell):
                        grid[_key(cell)] = cell
                    users *= 4
    return list(grid.values())


def cells_of_run_folder(
    source: Path,
    *,
    model: str | None = None,
    instance: str | None = None,
    dtype: str | None = None,
    machine: MeasuredMachine | None = None,
) -> RunCells:
    """Read a run folder.

    model, instance, dtype  None: as the run says; the bundled engine runs on `local`
    machine                 figures of `local` where they are known, else it is measured now

    Raises InputError where the run does not say enough or has no usable level.
    """
    run = load_run(source)
    facts = run.manifest.get("target")
    facts = facts if isinstance(facts, Mapping) else {}
    shape = find_model(model or run_model(run))
    dtype = dtype or (None if model is None else narrow_dtype(model))
    bundled = facts.get("kind") == "engine"
    name = instance or facts.get("instance") or (LOCAL_NAME if bundled else None)
    if name is None:
        raise InputError(
            f"{source} does not say which machine its endpoint runs on: add --instance, such as "
            "--instance ml.g5.2xlarge, or --instance local for this one"
        )
    if name == LOCAL_NAME:
        machine = machine or probe_machine()
        where = machine.instance()
        base = BUNDLED_CPU_PRIOR if bundled else SERVED_CPU_PRIOR
    else:
        base, where, machine = EAGER_GPU_PRIOR, find_instance(str(name)), None
    return RunCells(
        cells_from_run(run, shape, where, dtype=dtype), profile_for_run(base, run), machine
    )
