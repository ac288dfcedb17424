"""What a recommendation rests on: a shipped profile, or runs, and the machines to choose from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from lmi_bench.analysis.fit.from_run import (
    PlacedRun,
    calibrate_on_runs,
    has_users,
    run_dtype,
    run_lengths,
    run_model,
)
from lmi_bench.analysis.fleet.measured_load import MeasuredLoad, loads_from_run
from lmi_bench.analysis.level.layouts import Workload
from lmi_bench.analysis.model.builtin_profiles import BUNDLED_CPU_PRIOR
from lmi_bench.analysis.model.checkpoint_dtype import dtype_note, narrow_dtype, planned_dtype
from lmi_bench.analysis.model.local_machine import LOCAL_NAME, probe_machine
from lmi_bench.analysis.model.profiles import EngineProfile
from lmi_bench.catalog.instances import Instance, find_instance
from lmi_bench.catalog.models import find_model
from lmi_bench.core.errors import InputError
from lmi_bench.core.listener import Listener
from lmi_bench.core.run_store import Run, load_run
from lmi_bench.jobs.planned import first_dtype, read_workload
from lmi_bench.jobs.settings.recommend import RecommendSettings
from lmi_bench.targets.profiles import default_note, find_profile


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


def basis_of(settings: RecommendSettings, listener: Listener) -> Basis:
    """Read what the question names. Raises InputError where it is not enough."""
    runs = [load_run(path) for path in settings.runs]
    _check_flags_have_an_object(settings, runs)
    if settings.workload is None:
        return _measured(settings, runs, listener) if runs else _from_profile(settings)
    if settings.input_tokens is not None or settings.output_tokens is not None:
        raise InputError("--workload has lengths of its own: leave --input-tokens and others out")
    read = read_workload(settings.workload)
    if runs:
        base = _measured(settings, runs, listener)
    else:
        model = settings.model or read.model
        if model is None:
            raise InputError(f"{settings.workload} names no model: add --model")
        base = _from_profile(replace(settings, model=model, input_tokens=1, output_tokens=1))
    return replace(
        base,
        workload=read.planned(base.workload.shape, base.workload.dtype),
        measured=(),
        rate_per_s=read.rate_per_s,
        slos=read.slos,
        notes=(*base.notes, *read.notes),
    )


def _check_flags_have_an_object(settings: RecommendSettings, runs: list[Run]) -> None:
    """Raises InputError for a flag about something that is not there."""
    if settings.measured_on and not runs:
        raise InputError("--measured-on says what runs were made on: give their folders, too")
    local = LOCAL_NAME in settings.instances or any(map(_of_this_engine, runs))
    if settings.machine_price is not None and not local:
        raise InputError(
            f"--machine-price-per-hour is the price of this machine (--instance {LOCAL_NAME}); "
            "prices of the catalog's machines stand in a --prices file"
        )


def _from_profile(settings: RecommendSettings) -> Basis:
    """A shipped or calibrated profile, with notes on the defaults that were applied."""
    model, asked, answered = settings.model, settings.input_tokens, settings.output_tokens
    if model is None or asked is None or answered is None:
        named = {"--model": model, "--input-tokens": asked, "--output-tokens": answered}
        missing = [flag for flag, value in named.items() if value is None]
        verb = "is" if len(missing) == 1 else "are"
        raise InputError(
            f"{', '.join(missing)} {verb} missing: give a run folder, or --model, --input-tokens "
            "and --output-tokens"
        )
    dtype = first_dtype(settings.axes)
    notes = (default_note(settings.profile), dtype_note(model, dtype))
    return Basis(
        find_profile(settings.profile),
        _machines(settings, default=None),
        Workload(find_model(model), planned_dtype(model, dtype), asked, answered),
        model,
        notes=tuple(text for text in notes if text is not None),
    )


def _measured(settings: RecommendSettings, runs: list[Run], listener: Listener) -> Basis:
    """The profile fitted to the runs' closed loops, and the loads that their rates were."""
    first = runs[0]
    for run in runs:
        if not run.levels:
            raise InputError(
                f"{run.path} has no finished level to calibrate on: sweep again, or go on with "
                "--resume"
            )
    measured_model = _measured_model(settings, runs)
    measured_shape = find_model(measured_model)
    model = settings.model or measured_model
    shape = find_model(model)
    ours = any(map(_of_this_engine, runs))
    base = BUNDLED_CPU_PRIOR
    if not ours or settings.profile is not None:
        base = find_profile(settings.profile)
    local = _this_machine(settings, base) if ours else None
    placed = [
        _placed(settings, run, index, len(runs), local=local) for index, run in enumerate(runs)
    ]
    told = [each for each in placed if has_users(each.run)]
    profile, accuracy = base, None
    if told:
        listener.note(
            f"calibrating on {sum(len(each.run.levels) for each in told)} measured level(s)"
        )
        # a server's own name for its model says nothing of the format
        told_dtype = narrow_dtype(model) if measured_model == settings.model else None
        profile, accuracy = calibrate_on_runs(base, told, measured_shape, dtype=told_dtype)
    lengths = run_lengths(first)
    of_model = None if settings.model is None else narrow_dtype(settings.model)
    workload = Workload(
        shape,
        first_dtype(settings.axes) or of_model or run_dtype(first),
        lengths[0] if settings.input_tokens is None else settings.input_tokens,
        lengths[1] if settings.output_tokens is None else settings.output_tokens,
    )
    loads = [] if shape.name != measured_shape.name else _loads(placed, workload, listener)
    default = None if local is None else (local,)
    machines = _machines(settings, default=default)
    return Basis(profile, machines, workload, model, accuracy, tuple(loads))


def _this_machine(settings: RecommendSettings, profile: EngineProfile) -> Instance:
    """This machine, by the figures that the profile is fitted to where it keeps some."""
    machine = profile.machine or probe_machine()
    return machine.instance(price_usd_per_hour=settings.machine_price)


def _measured_model(settings: RecommendSettings, runs: list[Run]) -> str:
    """The model of the runs; `--model` tells it where the server's name for it is not known.

    Raises InputError where the runs are of several models, or of one that nobody names.
    """
    known = {}
    for run in runs:
        name = run_model(run)
        try:
            known[name] = find_model(name).name
        except InputError as exc:
            if settings.model is None:
                raise InputError(
                    f"{run.path}: {exc} Its server calls it so: add --model with what it is."
                ) from exc
            known[settings.model] = find_model(settings.model).name
    if len(set(known.values())) > 1:
        raise InputError(
            f"the runs are of several models ({', '.join(known)}): a profile is fitted to one; "
            "give the runs of one of them"
        )
    return next(iter(known))


def _loads(placed: list[PlacedRun], workload: Workload, listener: Listener) -> list[MeasuredLoad]:
    """Loads of the workload's own weights; levels of another number format tell nothing."""
    found = [
        load
        for each in placed
        if run_dtype(each.run) == workload.dtype
        for load in loads_from_run(each, workload)
    ]
    if found:
        listener.note(f"{len(found)} measured load(s) of random arrivals are held against the SLOs")
    return found


def _of_this_engine(run: Run) -> bool:
    """Whether the bundled engine was measured, in the sweep's own process."""
    return _facts(run).get("kind") == "engine"


def _facts(run: Run) -> Mapping[str, Any]:
    facts = run.manifest.get("target")
    return facts if isinstance(facts, Mapping) else {}


def _placed(
    settings: RecommendSettings, run: Run, index: int, count: int, *, local: Instance | None
) -> PlacedRun:
    """The run with the machine that it was made on: `--measured-on`, or as the run says."""
    given = settings.measured_on
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
    settings: RecommendSettings, *, default: tuple[Instance, ...] | None
) -> tuple[Instance, ...] | None:
    """The machines named by the user; `local` is this one, measured."""
    if not settings.instances:
        return default
    machines = []
    for name in settings.instances:
        if name != LOCAL_NAME:
            machines.append(find_instance(name))
        elif default is not None and default[0].instance_type == LOCAL_NAME:
            machines.append(default[0])
        else:
            machines.append(_this_machine(settings, find_profile(settings.profile)))
    return tuple(machines)
