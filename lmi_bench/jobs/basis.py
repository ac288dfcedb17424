"""What a recommendation rests on: a shipped profile, or runs, and the machines to choose from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lmi_bench.analysis.fit.from_run import (
    PlacedRun,
    calibrate_on_runs,
    has_users,
    run_dtype,
    run_lengths,
    run_model,
)
from lmi_bench.analysis.fleet.attainment import Routing
from lmi_bench.analysis.fleet.measured_load import MeasuredLoad, loads_from_run
from lmi_bench.analysis.fleet.request import Objective
from lmi_bench.analysis.level.layouts import Workload
from lmi_bench.analysis.model.builtin_profiles import BUNDLED_CPU_PRIOR
from lmi_bench.analysis.model.checkpoint_dtype import dtype_note, narrow_dtype, planned_dtype
from lmi_bench.analysis.model.hardware_probe import LOCAL_NAME, probe_machine
from lmi_bench.analysis.model.profiles import EngineProfile
from lmi_bench.catalog.instances import Instance, find_instance
from lmi_bench.catalog.models import find_model
from lmi_bench.cli.console import note
from lmi_bench.core.errors import InputError
from lmi_bench.core.run_store import Run, load_run
from lmi_bench.jobs.money import Money
from lmi_bench.jobs.planned_workload import read_workload
from lmi_bench.jobs.recommend_axes import AxisFlags
from lmi_bench.targets.profiles import default_note, find_profile


@dataclass(frozen=True, slots=True)
class Question:
    """The command's flags; None and () are what was left out."""

    runs: tuple[Path, ...]
    model: str | None
    input_tokens: int | None
    output_tokens: int | None
    rate_per_s: float | None
    users: int | None
    think_time_s: float | None
    slos: tuple[str, ...]
    objective: Objective
    instances: tuple[str, ...]
    degrees: tuple[int, ...]
    price_usd_per_hour: float | None
    blended_ratio: float
    discount: float
    seed: int
    measured_on: tuple[str, ...] = ()
    vary: str | None = None
    routing: Routing = "random"
    explain: bool = False
    money: Money = field(default_factory=Money)
    profile: str | None = None
    engine_version: str | None = None
    workload: Path | None = None
    engine: AxisFlags = field(default_factory=AxisFlags)


@dataclass(frozen=True, slots=True)
class Basis:
    """What the answer rests on: the profile, the machines to choose from, its accuracy.

    model       as it was named, by the user or the run: a variant has its base's shape
    measured    levels of random arrivals that the runs hold
    rate_per_s  of the scenario that the workload is of; slos: its limits; notes: what of it the
                plan leaves out
    """

    profile: EngineProfile
    instances: tuple[Instance, ...] | None
    workload: Workload
    model: str
    accuracy: dict[str, Any] | None = None
    measured: tuple[MeasuredLoad, ...] = ()
    rate_per_s: float | None = None
    slos: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def basis_of(question: Question) -> Basis:
    """Read what the question names. Raises InputError where it is not enough."""
    runs = [load_run(path) for path in question.runs]
    _check_flags_have_an_object(question, runs)
    if question.workload is None:
        return _measured(question, runs) if runs else _from_profile(question)
    if question.input_tokens is not None or question.output_tokens is not None:
        raise InputError("--workload has lengths of its own: leave --input-tokens and others out")
    read = read_workload(question.workload)
    model = question.model or read.model
    if runs:
        base = _measured(question, runs)
        shape, dtype = base.workload.shape, base.workload.dtype
    elif model is None:
        raise InputError(f"{question.workload} names no model: add --model")
    else:
        base = Basis(
            find_profile(question.profile),
            _machines(question, default=None),
            Workload(find_model(model), planned_dtype(model, question.engine.first_dtype), 1, 1),
            model,
            notes=_notes(question, model),
        )
        shape, dtype = base.workload.shape, base.workload.dtype
    return replace(
        base,
        workload=read.planned(shape, dtype),
        measured=(),
        rate_per_s=read.rate_per_s,
        slos=read.slos,
        notes=(*base.notes, *read.notes),
    )


def _check_flags_have_an_object(question: Question, runs: list[Run]) -> None:
    """Raises InputError for a flag about something that is not there."""
    if question.measured_on and not runs:
        raise InputError("--measured-on says what runs were made on: give their folders, too")
    local = LOCAL_NAME in question.instances or any(map(_of_this_engine, runs))
    if question.price_usd_per_hour is not None and not local:
        raise InputError(
            f"--price-per-hour is the price of this machine (--instance {LOCAL_NAME}); prices of "
            "the catalog's machines stand in a --prices file"
        )


def _from_profile(question: Question) -> Basis:
    missing = [
        flag
        for flag, value in (
            ("--model", question.model),
            ("--input-tokens", question.input_tokens),
            ("--output-tokens", question.output_tokens),
        )
        if value is None
    ]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        raise InputError(
            f"{', '.join(missing)} {verb} missing: give a run folder, or --model, --input-tokens "
            "and --output-tokens"
        )
    assert question.model is not None
    assert question.input_tokens is not None
    assert question.output_tokens is not None
    workload = Workload(
        find_model(question.model),
        planned_dtype(question.model, question.engine.first_dtype),
        question.input_tokens,
        question.output_tokens,
    )
    return Basis(
        find_profile(question.profile),
        _machines(question, default=None),
        workload,
        question.model,
        notes=_notes(question, question.model),
    )


def _notes(question: Question, model: str) -> tuple[str, ...]:
    """What was taken for want of a flag."""
    told = (default_note(question.profile), dtype_note(model, question.engine.first_dtype))
    return tuple(text for text in told if text is not None)


def _measured(question: Question, runs: list[Run]) -> Basis:
    """The profile fitted to the runs' closed loops, and the loads that their rates were."""
    first = runs[0]
    for run in runs:
        if not run.levels:
            raise InputError(
                f"{run.path} has no finished level to calibrate on: sweep again, or go on with "
                "--resume"
            )
    measured_model = _measured_model(question, runs)
    measured_shape = find_model(measured_model)
    model = question.model or measured_model
    shape = find_model(model)
    ours = any(map(_of_this_engine, runs))
    base = BUNDLED_CPU_PRIOR
    if not ours or question.profile is not None:
        base = find_profile(question.profile)
    local = _this_machine(question, base) if ours else None
    placed = [
        _placed(question, run, index, len(runs), local=local) for index, run in enumerate(runs)
    ]
    told = [each for each in placed if has_users(each.run)]
    profile, accuracy = base, None
    if told:
        note(f"calibrating on {sum(len(each.run.levels) for each in told)} measured level(s)")
        # a server's own name for its model says nothing of the format
        told_dtype = narrow_dtype(model) if measured_model == question.model else None
        profile, accuracy = calibrate_on_runs(base, told, measured_shape, dtype=told_dtype)
    lengths = run_lengths(first)
    of_model = None if question.model is None else narrow_dtype(question.model)
    workload = Workload(
        shape,
        question.engine.first_dtype or of_model or run_dtype(first),
        lengths[0] if question.input_tokens is None else question.input_tokens,
        lengths[1] if question.output_tokens is None else question.output_tokens,
    )
    loads = [] if shape.name != measured_shape.name else _loads(placed, workload)
    default = None if local is None else (local,)
    machines = _machines(question, default=default)
    return Basis(profile, machines, workload, model, accuracy, tuple(loads))


def _this_machine(question: Question, profile: EngineProfile) -> Instance:
    """This machine, by the figures that the profile is fitted to where it keeps some."""
    machine = profile.machine or probe_machine()
    return machine.instance(price_usd_per_hour=question.price_usd_per_hour)


def _measured_model(question: Question, runs: list[Run]) -> str:
    """The model of the runs; `--model` tells it where the server's name for it is not known.

    Raises InputError where the runs are of several models, or of one that nobody names.
    """
    known = {}
    for run in runs:
        name = run_model(run)
        try:
            known[name] = find_model(name).name
        except InputError as exc:
            if question.model is None:
                raise InputError(
                    f"{run.path}: {exc} Its server calls it so: add --model with what it is."
                ) from exc
            known[question.model] = find_model(question.model).name
    if len(set(known.values())) > 1:
        raise InputError(
            f"the runs are of several models ({', '.join(known)}): a profile is fitted to one; "
            "give the runs of one of them"
        )
    return next(iter(known))


def _loads(placed: list[PlacedRun], workload: Workload) -> list[MeasuredLoad]:
    """Loads of the workload's own weights; levels of another number format tell nothing."""
    found = [
        load
        for each in placed
        if run_dtype(each.run) == workload.dtype
        for load in loads_from_run(each, workload)
    ]
    if found:
        note(f"{len(found)} measured load(s) of random arrivals are held against the SLOs")
    return found


def _of_this_engine(run: Run) -> bool:
    """Whether the bundled engine was measured, in the sweep's own process."""
    return _facts(run).get("kind") == "engine"


def _facts(run: Run) -> Mapping[str, Any]:
    facts = run.manifest.get("target")
    return facts if isinstance(facts, Mapping) else {}


def _placed(
    question: Question, run: Run, index: int, count: int, *, local: Instance | None
) -> PlacedRun:
    """The run with the machine that it was made on: `--measured-on`, or as the run says."""
    given = question.measured_on
    if len(given) not in (0, 1, count):
        raise InputError(
            f"--measured-on is given {len(given)} times for {count} runs: once for all of them, "
            "or once each in their order"
        )
    if _of_this_engine(run) and local is not None:
        return PlacedRun(run, local)
    name = given[index if len(given) > 1 else 0] if given else _facts(run).get("instance")
    if name is None:
        raise InputError(
            f"{run.path} does not say which machine its endpoint runs on: add "
            "--measured-on INSTANCE, such as --measured-on ml.g5.2xlarge"
        )
    machine, _, degree = str(name).partition(":")
    if degree and not (degree.isdigit() and int(degree) >= 1):
        raise InputError(
            f"--measured-on {name}: write INSTANCE or INSTANCE:TP, such as {machine}:4"
        )
    return PlacedRun(run, find_instance(machine), int(degree) if degree else None)


def _machines(
    question: Question, *, default: tuple[Instance, ...] | None
) -> tuple[Instance, ...] | None:
    """The machines named by the user; `local` is this one, measured."""
    if not question.instances:
        return default
    machines = []
    for name in question.instances:
        if name != LOCAL_NAME:
            machines.append(find_instance(name))
        elif default is not None and default[0].instance_type == LOCAL_NAME:
            machines.append(default[0])
        else:
            machines.append(_this_machine(question, find_profile(question.profile)))
    return tuple(machines)
