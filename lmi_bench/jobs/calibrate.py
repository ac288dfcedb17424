"""Profiles: fitted to measured levels, and judged by their errors on such levels."""

import itertools
import os
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from operator import attrgetter
from pathlib import Path
from typing import Any

from lmi_bench.analysis.fit import from_run, validation
from lmi_bench.analysis.fit.experiment_design import choose_cells
from lmi_bench.analysis.fit.fit import Fit, fit_cells, prior_fit
from lmi_bench.analysis.fit.measured_tables import TableRow, read_table
from lmi_bench.analysis.fit.uncertainty import Estimate, estimates
from lmi_bench.analysis.fit.unstated import fit_unstated
from lmi_bench.analysis.level.cells import can_run
from lmi_bench.analysis.model.builtin_profiles import (
    BUNDLED_CPU_PRIOR,
    EAGER_GPU_PRIOR,
    GRAPH_GPU_PRIOR,
    SERVED_CPU_PRIOR,
)
from lmi_bench.analysis.model.checkpoint_dtype import narrow_dtype
from lmi_bench.analysis.model.local_machine import LOCAL_NAME, MeasuredMachine, probe_machine
from lmi_bench.analysis.model.measured_level import MeasuredLevel, Metric
from lmi_bench.analysis.model.profiles import EngineProfile
from lmi_bench.analysis.model.setup import Setup
from lmi_bench.catalog.instances import find_instance
from lmi_bench.catalog.models import find_model
from lmi_bench.catalog.published import published_table
from lmi_bench.catalog.tables import read_rows
from lmi_bench.core.errors import InputError
from lmi_bench.core.listener import SILENT, Listener
from lmi_bench.core.load import Load
from lmi_bench.core.run_store import Run, load_run
from lmi_bench.core.slo import parse_slo
from lmi_bench.core.units import plural
from lmi_bench.jobs.planned import planned_setup
from lmi_bench.jobs.settings.plan import CalibrateSettings, ValidateSettings
from lmi_bench.targets.profiles import SHIPPED, find_profile

_KEY = attrgetter(  # what tells levels to measure apart
    "setup.shape.name",
    "setup.instance.instance_type",
    "setup.tensor_parallel",
    "input_tokens",
    "output_tokens",
    "concurrency",
    "rate_per_s",
)
_USERS = (1, 4, 16, 64, 256)
_INFORMATIVE: list[Metric] = ["throughput_tokens_per_s", "tpot_mean_s"]
_MOST_LINES = 48  # of a table: the time of a fit grows faster than their number, to over a minute
_FIRST_TOKENS = 256  # prompt and output length of the first levels to measure


@dataclass(frozen=True, slots=True)
class Calibration:
    """A fit, its profile, and the levels to measure next, the most informative first.

    is_fitted    false if nothing was measured: the profile is the prior
    next_levels  each with the throughput that is expected of it
    """

    fit: Fit
    profile: EngineProfile
    is_fitted: bool
    next_levels: tuple[tuple[MeasuredLevel, Estimate], ...]


@dataclass(frozen=True, slots=True)
class RunLevels:
    """Usable levels of a run, the prior of its kind of engine, this machine if it was measured.

    setup  copy that the run measures
    """

    cells: list[MeasuredLevel]
    base: EngineProfile
    machine: MeasuredMachine | None
    setup: Setup


def calibrate(settings: CalibrateSettings, listener: Listener = SILENT) -> Calibration:
    """Fit a profile. Raises InputError for a source that cannot be used."""
    given = None if settings.profile is None else find_profile(settings.profile)
    if not settings.sources:
        assert settings.model is not None  # the first levels to measure of it are chosen
        assert settings.instance is not None
        prior, degree = given or GRAPH_GPU_PRIOR, settings.tensor_parallel or 1
        setup = planned_setup(settings.model, settings.instance, degree, settings.dtype)
        plain = MeasuredLevel(setup, _FIRST_TOKENS, _FIRST_TOKENS, Load(1), num_requests=1)
        fit = prior_fit(prior, [plain])
        return Calibration(fit, prior, False, _next(fit, settings.next_levels, [plain]))
    # a profile that was fitted here states shares of this machine's measured figures
    machine = None if given is None else given.machine
    cells: list[MeasuredLevel] = []
    base: EngineProfile | None = None
    for source in settings.sources:
        if source.is_dir():
            run = load_run(source)
            found = levels_of_run(run, settings, machine)
            listener.note(from_run.calibrated_levels([run]))
            more, base, machine = found.cells, found.base, found.machine or machine
        elif source.suffix.lower() in (".json", ".jsonl"):
            more, base = _of_summary(settings, source), base or GRAPH_GPU_PRIOR
        else:
            rows = [row for row in read_table(source) if row.cell is not None]
            engines = sorted({row.engine for row in rows})
            if len(engines) > 1:
                raise InputError(
                    f"{source} has {len(engines)} engines ({', '.join(engines)}) but a profile "
                    "describes one: keep the lines of one engine"
                )
            if not (usable := [row for row in rows if row.fits]):
                raise InputError(f"{source}: no line can be used; fit = no rules a line out")
            if len(usable) > _MOST_LINES:
                listener.warn(f"{source}: uses the {_MOST_LINES} most telling of {len(usable)} lines")
                usable = validation.choose_rows(engines[0], usable, _MOST_LINES, 0)
            more = [row.cell for row in usable if row.cell is not None]
            base = from_run.prior_for(engines[0], more)
        cells += more
    base = given or base or EAGER_GPU_PRIOR
    listener.progress(f"fit to {plural(len(cells), 'level')}", 0, None)
    # sweeps state their lengths; tables and summaries of other tools do not
    has_sweeps = any(source.is_dir() for source in settings.sources)
    fit = (fit_cells if has_sweeps else fit_unstated)(base, cells)
    names = ", ".join(source.name for source in settings.sources)
    return calibration_of(settings, fit, machine, names)


def calibration_of(settings: CalibrateSettings, fit: Fit, machine: MeasuredMachine | None, source: str) -> Calibration:
    """The profile of a fit to measured levels; source: what holds or measured them."""
    models = ", ".join(dict.fromkeys(cell.setup.shape.name for cell in fit.cells))
    machines = ", ".join(dict.fromkeys(cell.setup.instance.instance_type for cell in fit.cells))
    profile = from_run.profile_of_fit(
        fit,
        version=settings.version,
        fitted_on=f"{len(fit.cells)} levels of {models} on {machines} ({source})",
        fitted_date=datetime.now(UTC).date().isoformat(),
        keep_levels=True,
    )
    profile = replace(profile, machine=machine)
    return Calibration(fit, profile, True, _next(fit, settings.next_levels, fit.cells))


def _of_summary(settings: CalibrateSettings, source: Path) -> list[MeasuredLevel]:
    from lmi_bench.interchange.imports.read import read_results  # loads pandas, 0.3 s

    try:
        found = read_results(source)
    except InputError as exc:
        raise InputError(
            f"{exc}; `lmi-bench import` takes a file's load as an option and makes a run, which `calibrate` reads"
        ) from exc
    model = settings.model or found.facts.get("model")
    if model is None or settings.instance is None:
        missing = "--model" if model is None else "--instance"
        raise InputError(f"{source} does not state the {missing.removeprefix('--')}: add {missing}")
    setup = planned_setup(model, settings.instance, settings.tensor_parallel or 1, settings.dtype)
    return [from_run.cell_of_summary(source, each.level, setup) for each in found.levels]


def _next(fit: Fit, count: int, like: Sequence[MeasuredLevel]) -> tuple[tuple[MeasuredLevel, Estimate], ...]:
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
    known = {_KEY(cell) for cell in fit.cells}
    candidates = [cell for cell in wanted if _KEY(cell) not in known]
    chosen = (candidates[n] for n in choose_cells(fit, candidates, wanted, count, _INFORMATIVE))
    return tuple((each, estimates(fit, each, _INFORMATIVE)["throughput_tokens_per_s"]) for each in chosen)


def _grid(fit: Fit, like: Sequence[MeasuredLevel]) -> list[MeasuredLevel]:
    """Closed loops of 1 to 256 users, at the lengths of the cells and at four times the longest
    prompt, on the cells' machines at every degree."""
    grid: dict[tuple[object, ...], MeasuredLevel] = {}
    longest = max(cell.input_tokens for cell in like)
    for measured in like:
        most = measured.setup.instance.num_accelerators
        degrees = {measured.setup.tensor_parallel, *(1 << n for n in range(most.bit_length()))}
        prompts = sorted({measured.input_tokens, 4 * longest})
        for degree, prompt, users in itertools.product(sorted(degrees), prompts, _USERS):
            cell = replace(
                measured,
                setup=replace(measured.setup, tensor_parallel=degree),
                input_tokens=prompt,
                load=Load(users),
                num_requests=3 * users,
                replicas=1,
                max_sequences=None,
            )
            if _KEY(cell) not in grid and can_run(fit.profile, cell):
                grid[_KEY(cell)] = cell
    return list(grid.values())


def levels_of_run(run: Run, stated: CalibrateSettings, machine: MeasuredMachine | None) -> RunLevels:
    """The usable levels of a run, or of one that has none yet: then the copy and the prior alone.

    stated   what counts instead of what the run states; the bundled engine runs on `local`
    machine  figures of `local` if known; None: it is measured now

    Raises InputError if the run states too little or has no usable level.
    """
    model, facts = stated.model, run.manifest.target
    shape = find_model(model or from_run.run_model(run))
    dtype = stated.dtype or (narrow_dtype(model) if model else None) or from_run.run_dtype(run)
    name = stated.instance or facts.instance or (LOCAL_NAME if facts.is_bundled else None)
    if name is None:
        raise InputError(
            f"{run.path} does not state which machine its endpoint runs on: add --instance, such "
            "as --instance ml.g5.2xlarge, or --instance local for this one"
        )
    if name == LOCAL_NAME:
        machine = machine or probe_machine()
        where = machine.instance()
    else:
        where, machine = find_instance(str(name)), None
    placed = from_run.PlacedRun(run, where, stated.tensor_parallel)
    setup = Setup(shape, where, placed.degree, dtype, kv_dtype=facts.kv_dtype)
    cells = from_run.cells_from_run(placed, shape, dtype=dtype) if run.levels else []
    if name != LOCAL_NAME:
        base = from_run.prior_for_run(run, cells or [MeasuredLevel(setup, 1, 1, Load(1), 1)])
    else:
        base = BUNDLED_CPU_PRIOR if facts.is_bundled else SERVED_CPU_PRIOR
    return RunLevels(cells, from_run.profile_for_run(base, run), machine, setup)


_TTFT_LIMIT_MS, _TPOT_LIMIT_MS = 500.0, 50.0
_WITHOUT_STATISTIC = re.compile(r"^(ttft|tpot|latency_per_token)\s*<=")
_KEYS = {"ttft": "ttft_ms", "tpot": "tpot_ms", "latency_per_token": validation.FIGURES[1]}
TABLES_VARIABLE = "LMI_BENCH_TABLES"


@dataclass(frozen=True, slots=True)
class Validation:
    """Every level, measured and predicted.

    under_slo  the highest loads of each set-up under the limits
    """

    judged: list[validation.Judged]
    under_slo: list[validation.LoadUnderSlo]
    warnings: list[str]

    def to_json(self) -> list[dict[str, Any]]:
        """As `validate --json` writes it: each row with the loads under SLOs of its set-up."""
        key, loads = validation.setup_key, defaultdict[Any, list[dict[str, Any]]](list)
        for entry in self.under_slo:
            loads[key(entry.row)].append(entry.to_json())
        return [{**each.to_json(), "under_slo": loads[key(each.row)] if each.row.cell else []} for each in self.judged]


@dataclass(frozen=True, slots=True)
class PublishedTable:
    """A published table, and the engines in it that a profile describes, with `|` between them.

    ships  empty: it is read from the folder LMI_BENCH_TABLES
    """

    profile: str
    file: str
    engines: str
    ships: str

    def path(self) -> Path | None:
        """Path of the table; None if it is not available."""
        if self.ships:
            return published_table(self.file)
        folder = os.environ.get(TABLES_VARIABLE)
        path = None if not folder else Path(folder) / self.file
        return path if path is not None and path.exists() else None


_TABLES = [PublishedTable(**row) for row in read_rows("judged_tables.csv", "jobs")]


@dataclass(frozen=True, slots=True)
class ShippedErrors:
    """The errors of the shipped profiles, each with its profile and table.

    absent  tables that are not available
    """

    errors: list[tuple[PublishedTable, validation.Accuracy]]
    absent: list[PublishedTable]

    def to_json(self) -> list[dict[str, Any]]:
        """As `validate --json` writes it without a table."""
        rows = [(table, entry.to_json()) for table, entry in self.errors]
        return [
            {"profile": table.profile, "table": table.file, "lines of": row.pop("slice"), **row} for table, row in rows
        ]


def validate(settings: ValidateSettings, listener: Listener = SILENT) -> Validation:
    """Judge the levels. Raises InputError for a file or a limit that cannot be used."""
    limits = [] if settings.slo else [("ttft_ms", _TTFT_LIMIT_MS), ("tpot_ms", _TPOT_LIMIT_MS)]
    for text in settings.slo:
        slo = parse_slo(_WITHOUT_STATISTIC.sub(r"\1_mean<=", text.strip()))
        key = _KEYS.get(slo.metric)
        if key is None or (slo.statistic != "mean" and slo.metric in ("ttft", "tpot")):
            raise InputError(f"--slo {text}: tables state means: ttft, tpot or latency_per_token")
        limits.append((key, slo.limit_ms))
    profile = None if settings.profile is None else find_profile(settings.profile)
    rows = _rows(settings, profile, listener)
    listener.progress("levels", 0, len(rows))  # the fit comes first
    if profile is None:
        on = settings.calibrate_on
        fitted = validation.fitted_rows(
            rows,
            calibrate_cells=settings.calibrate_cells or 0,
            calibrate_on=None if on is None else read_table(on),
            seed=settings.seed,
        )
    else:
        fitted = iter([validation.rows_of_profile(profile, rows)])
    judged, warnings = validation.validate(rows, fitted, listener)
    if profile is not None:
        of_engines = map(profile.warning_for_engine, sorted({row.engine for row in rows}))
        warnings[:0] = filter(None, of_engines)
    under = [entry for limit in limits for entry in validation.loads_under(judged, *limit)]
    if not settings.slo:  # closed loops have no limit unless one is stated
        under = [entry for entry in under if entry.is_rate]
    return Validation(judged, under, warnings)


def validate_shipped(listener: Listener = SILENT) -> ShippedErrors:
    """Judge each shipped profile on its tables; models it was not fitted to are judged apart."""
    found: list[tuple[PublishedTable, validation.Accuracy]] = []
    absent: list[PublishedTable] = []
    for index, table in enumerate(_TABLES):
        listener.progress("tables", index, len(_TABLES))
        path = table.path()
        if path is None:
            absent.append(table)
        else:
            found += [(table, entry) for entry in _errors(table, read_table(path))]
    return ShippedErrors(found, absent)


def _rows(settings: ValidateSettings, profile: EngineProfile | None, listener: Listener) -> list[TableRow]:
    folders = [source for source in settings.sources if source.is_dir()]
    if not folders and len(settings.sources) == 1:
        rows = read_table(settings.sources[0])
        listener.note(f"{plural(len(rows), 'line')} of {settings.sources[0].name}")
        return rows
    if len(folders) < len(settings.sources):
        raise InputError("give either one table or sweeps: lines of several sources do not mix")
    if profile is None:
        raise InputError(
            "levels of sweeps need a profile: fit one to other sweeps with `lmi-bench calibrate "
            "RUN_DIR -o profile.json` and add --profile profile.json"
        )
    stated = CalibrateSettings(settings.sources, instance=settings.instance, dtype=settings.dtype)
    cells: list[MeasuredLevel] = []
    for folder in folders:
        cells += levels_of_run(load_run(folder), stated, profile.machine).cells
    listener.note(f"{plural(len(cells), 'level')} of {plural(len(folders), 'sweep')}")
    return [TableRow(number, "", cell) for number, cell in enumerate(cells)]


def _errors(table: PublishedTable, rows: Sequence[TableRow]) -> Iterator[validation.Accuracy]:
    profile = SHIPPED[table.profile]
    own = [row for row in rows if row.engine in table.engines.split("|")]
    found, _ = validation.validate(own, [validation.rows_of_profile(profile, own)])
    judged = [replace(row, calibrated=False) for row in found]
    for name, is_fitted in (("fitted models", True), ("other models", False)):
        part = [
            row for row in judged if row.row.cell and (row.row.cell.setup.shape.name in profile.models) == is_fitted
        ]
        for figure in validation.FIGURES:
            entry = validation.accuracy_of(name, part, figure)
            if entry is not None:
                yield entry
