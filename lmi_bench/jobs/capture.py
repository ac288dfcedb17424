"""Six levels of an endpoint, chosen, measured and fitted in at most ten minutes of its time.

The levels are those that leave the least doubt about all others within the server's context. Each
sends for a number of seconds that its predicted answers need, in a run folder of its own: an
interrupted capture goes on where it stopped, and each folder can be fitted by itself.
"""

import itertools
import math
import re
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from lmi_bench import __version__
from lmi_bench.analysis.fit.experiment_design import choose_cells
from lmi_bench.analysis.fit.fit import fit_cells, prior_fit
from lmi_bench.analysis.fit.from_run import PlacedRun, cells_from_run, run_model, why_left_out
from lmi_bench.analysis.level.cells import predict_cell, profile_of
from lmi_bench.analysis.model.measured_level import MeasuredLevel, Metric
from lmi_bench.analysis.model.profiles import EngineProfile
from lmi_bench.analysis.model.setup import Setup
from lmi_bench.analysis.results.repeats import steady_lines
from lmi_bench.core.durable import write_whole
from lmi_bench.core.errors import InputError, LmiBenchError
from lmi_bench.core.json_value import JsonValue
from lmi_bench.core.level import Level
from lmi_bench.core.listener import SILENT, Listener, Silent
from lmi_bench.core.load import Load
from lmi_bench.core.manifest import Manifest, RunScenario, TargetFacts
from lmi_bench.core.redaction import REDACTED
from lmi_bench.core.run_store import Run
from lmi_bench.core.scenario import ENGINE_TARGET, Scenario, is_endpoint
from lmi_bench.core.units import plural
from lmi_bench.jobs.calibrate import Calibration, RunLevels, calibration_of, levels_of_run
from lmi_bench.jobs.settings.plan import CalibrateSettings
from lmi_bench.jobs.sweep.run import SweepOptions, read_scenario, sweep_scenario
from lmi_bench.models.folder import read_object
from lmi_bench.targets.bench import Access, read_headers
from lmi_bench.targets.open import open_bench
from lmi_bench.targets.profiles import SHIPPED, find_profile

_CELLS: Final = 6
_BUDGET_S: Final = 600.0  # of the endpoint's time
_MOST_S, _LEAST_S = 50, 3  # seconds in which the requests of one level are sent
_ROUNDS, _ANSWERS = 3, 12  # requests of each user with the first, and of all: at least
_PROMPTS, _OUTPUTS, _USERS = (32, 128, 512, 2048, 8192), (16, 64, 256), (1, 4, 16, 64, 192)
_CERTAIN_SHARE = 0.8  # of a server's context: its tokens of a text are not known
_KNOWN_SHARE = 0.9  # of the tokens that the cache is predicted to hold
_FIGURES: tuple[Metric, ...] = ("throughput_tokens_per_s", "tpot_mean_s")


@dataclass(frozen=True, slots=True)
class PlannedCell(JsonValue):
    """A level to measure.

    seconds  in which its requests are sent; likely_s: with warm-up and the last answers
    """

    input_tokens: int
    output_tokens: int
    users: int
    seconds: int
    likely_s: float

    @property
    def title(self) -> str:
        """Lengths and load, for people."""
        users = plural(self.users, "user")
        return f"{self.input_tokens} in / {self.output_tokens} out, {users}"

    def scenario(self, base: Scenario) -> Scenario:
        """The sweep of this level."""
        lengths = {f"workload.{n}": getattr(self, n) for n in ("input_tokens", "output_tokens")}
        load = {"load.concurrency": [self.users], "load.duration_s": float(self.seconds)}
        return base.with_overrides(lengths | load)


@dataclass(frozen=True, slots=True)
class _Plan(JsonValue):
    """The levels of a capture, and the copy that they are measured on."""

    of: str
    cells: tuple[PlannedCell, ...]


@dataclass(frozen=True, slots=True)
class _Site:
    """The endpoint as it will be measured, as its runs begin, and what a request may hold.

    place  the copy that answers there; base: the profile to fit
    """

    scenario: Scenario
    run: Run
    place: RunLevels
    base: EngineProfile
    context: int


class _Progress(Silent):
    """A listener without the notes of each sweep, which repeat those of the first opening."""

    def __init__(self, listener: Listener, place: str) -> None:
        def progress(description: str, done: float, total: float | None) -> None:
            listener.progress(description.replace("level 1/1", place), done, total)

        vars(self).update(step=listener.step, warn=listener.warn, progress=progress)


def without_address(target: str) -> str:
    """A target as it may be passed on: without its host, a key in its query, or its name at AWS."""
    return re.sub(r"(?<=://)[^/?]*|(?<=^sagemaker:).*|\?.*", REDACTED, target)


def capture(settings: CalibrateSettings, listener: Listener = SILENT) -> tuple[Path, Calibration | None]:
    """Measure and fit: the folder of the runs, and the fit; None: interrupted.

    Raises InputError before anything is measured, LmiBenchError if no level could be used.
    """
    if settings.keep in SHIPPED or Path(settings.keep or "").name != (settings.keep or ""):
        raise InputError(f"--keep {settings.keep}: use a name of your own, without a folder")
    access = Access(settings.api_key, read_headers(settings.header))
    site = _open(settings, access, listener)
    stamp = f"{datetime.now().astimezone():%Y%m%d-%H%M%S}"
    folder = settings.run_dir or Path("runs") / f"{stamp}-capture-{site.place.setup.shape.name}"
    plan = _begun(folder, site)
    minutes = sum(cell.likely_s for cell in plan.cells) / 60
    listener.note(f"{plan.of}: {len(plan.cells)} levels, about {minutes:.1f} minutes; {folder}")
    rows, runs, spent_s, planned_s = list[dict[str, Any]](), list[Run](), 0.0, 0.0
    for number, cell in enumerate(plan.cells, start=1):
        likely_s = cell.likely_s * (max(1.0, spent_s / planned_s) if planned_s else 1.0)
        if spent_s + likely_s > _BUDGET_S:
            listener.warn(
                f"left out {cell.title}: it would take about {likely_s:.0f} s, and {spent_s:.0f} "
                f"of {_BUDGET_S:.0f} are over"
            )
            continue
        listener.step(f"level {number} of {len(plan.cells)}: {cell.title}, about {likely_s:.0f} s")
        where = folder / f"{number}-{cell.input_tokens}-{cell.output_tokens}-{cell.users}"
        options, begun = SweepOptions(access=access), where.exists()
        scenario = cell.scenario(site.scenario)
        heard = _Progress(listener, f"level {number}/{len(plan.cells)}")
        result = sweep_scenario(scenario, options, heard, out=where, resume=begun)
        if result.interrupted:
            return folder, None
        spent_s += math.fsum(map(_seconds, result.levels))
        planned_s += cell.likely_s * len(result.levels)
        for line in steady_lines(result.levels):
            measured = {
                "requests": line.sent,
                "seconds": round(_seconds(line), 1),
                "throughput_tokens_per_s": line.throughput_tokens_per_s,
                "ttft_mean_ms": line.of("ttft").mean,
                "tpot_mean_ms": line.of("tpot").mean,
                "self_check": "ok" if line.valid else line.invalid_reason or "invalid",
            }
            lengths = ("input_tokens", "output_tokens", "users")
            rows.append({name: getattr(cell, name) for name in lengths} | measured)
            if (why := why_left_out(line)) is not None:
                listener.warn(f"{cell.title} is left out of the fit: {why}")
            elif result.run is not None and result.run not in runs:
                runs.append(result.run)
    if not runs:
        raise LmiBenchError(f"no level of {settings.on} could be used: nothing was fitted")
    return folder, _fitted(settings, site, runs, rows)


def _open(settings: CalibrateSettings, access: Access, listener: Listener) -> _Site:
    """Ask the endpoint what it serves; raises InputError if that is not enough to plan."""
    degree, bundled = settings.tensor_parallel, settings.on == ENGINE_TARGET
    scenario = read_scenario(None if bundled else settings.on, {})
    remote = is_endpoint(scenario.target)
    if not remote:
        engine = {"engine.dtype": settings.dtype, "engine.tensor_parallel": degree}
        scenario = scenario.with_overrides({"model": settings.model, **engine})
    bench = open_bench(scenario, access, listener)
    for text in (f"target: {bench.title}", *bench.notes):
        listener.note(text)
    facts = TargetFacts.from_json(bench.facts)
    facts = replace(facts, server=settings.engine or facts.server)
    if facts.copies not in (None, 1):
        raise InputError(f"{settings.on} answers from {facts.copies} copies, but a profile describes one")
    if facts.instance is not None and settings.instance not in (None, facts.instance):
        raise InputError(f"{settings.on} runs on {facts.instance}: leave --instance out")
    told = RunScenario.from_json(bench.scenario.canonical())
    run = Run(Path(settings.on or ""), Manifest(scenario=told, target=facts), [], [], None)
    given = None if settings.profile is None else find_profile(settings.profile)
    try:
        place = levels_of_run(run, settings, None if given is None else given.machine)
    except InputError as exc:
        if settings.model is not None or "model" not in str(exc):
            raise
        raise InputError(
            f"{settings.on} serves {run_model(run)}, which the catalog does not have: add --model "
            "with the catalog's name for it, or with the path of its config.json"
        ) from exc
    setup = place.setup
    devices = setup.instance.num_accelerators
    if devices > 1 and degree is None and facts.tensor_parallel is None:
        raise InputError(
            f"{setup.instance.instance_type} has {devices} devices, and {settings.on} does not say "
            "how many of them one copy uses: add --tp"
        )
    limits = bench.facts["scheduler"] if facts.is_bundled else bench.facts
    context = limits.get("max_model_len") or setup.shape.max_positions
    context = int(context * (_CERTAIN_SHARE if remote else 1))
    return _Site(bench.scenario, run, place, given or place.base, context)


def _begun(folder: Path, site: _Site) -> _Plan:
    """The plan that the folder was begun with, else one that is made and kept there now."""
    path, setup = folder / "capture.json", site.place.setup
    of = f"{setup.shape.name}, {setup.dtype}, on {setup.instance.instance_type}"
    of += f", TP {setup.tensor_parallel}"
    if path.exists():
        plan = _Plan.from_json(read_object(path), str(path))
        if plan.of != of:
            raise InputError(f"{folder} is of {plan.of}, not of {of}: name another with --run-dir")
        return plan
    if folder.exists() and any(folder.iterdir()):
        raise InputError(f"{folder} exists and is no capture: name another with --run-dir")
    plan = _Plan(of, plan_cells(setup, site.base, site.context))
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(path, plan.to_json())
    return plan


def plan_cells(setup: Setup, base: EngineProfile, context: int) -> tuple[PlannedCell, ...]:
    """The levels that tell most about all loads within the context, the most informative first.

    context  most tokens of a request, prompt and answer

    Raises InputError if the model does not fit, or is too slow for any level.
    """
    outputs = [count for count in _OUTPUTS if 4 * count <= context][-2:] or [1]
    wanted, plans = list[MeasuredLevel](), dict[int, PlannedCell]()
    problem = f"{setup.shape.name} on {setup.instance.instance_type} is predicted to answer too "
    problem += f"slowly for a level of {_MOST_S} s: sweep it, then calibrate on that run"
    for prompt, output, users in itertools.product(_PROMPTS, outputs, _USERS):
        if prompt + output > context:
            continue
        level = MeasuredLevel(setup, prompt, output, Load(users), _ROUNDS * users)
        level = replace(level, start_left_out=True)
        try:
            predicted, engine = predict_cell(base, level, smooth=True), profile_of(base, level)
        except InputError as exc:
            problem = str(exc)
            continue
        held = predicted.peak_sequences * (prompt + output / 2)
        if users * (prompt + output) > _KNOWN_SHARE * held:
            continue  # users might wait for each other's cache, whose size is not known
        wanted.append(level)
        # equal requests end together: if their next prompts then need several steps, times depend
        # on how the server orders these, which the terms do not say
        several = users * prompt > engine.max_prefill_tokens
        answer_s = predicted.latency_mean_s_per_token * output
        if (users == 1 or not several) and _ROUNDS * answer_s <= _MOST_S:
            rounds = max(_ROUNDS, 1 + math.ceil(_ANSWERS / users))
            seconds = math.ceil(min(_MOST_S, max(_LEAST_S, rounds * answer_s)))
            likely_s = seconds + 2 * answer_s
            plans[id(level)] = PlannedCell(prompt, output, users, seconds, likely_s)
    candidates = [level for level in wanted if id(level) in plans]
    if not candidates:
        raise InputError(problem)
    chosen = choose_cells(prior_fit(base, wanted), candidates, wanted, _CELLS, _FIGURES)
    return tuple(plans[id(candidates[index])] for index in chosen)


def _seconds(line: Level) -> float:
    """Seconds of a level with its warm-up; in virtual time without."""
    if line.started_at is None or line.ended_at is None:
        return line.wall_s or 0.0
    begun, ended = map(datetime.fromisoformat, (line.started_at, line.ended_at))
    return (ended - begun).total_seconds()


def _fitted(settings: CalibrateSettings, site: _Site, runs: list[Run], rows: list[dict[str, Any]]) -> Calibration:
    """The fit to the runs; its profile says where and how they were measured."""
    setup, degree = site.place.setup, site.place.setup.tensor_parallel
    cells = list[MeasuredLevel]()
    for run in runs:
        placed = PlacedRun(run, setup.instance, degree)
        cells += cells_from_run(placed, setup.shape, dtype=setup.dtype)
    source = f"captured by lmi-bench {__version__}"
    done = calibration_of(settings, fit_cells(site.base, cells), site.place.machine, source)
    about = {
        "date": done.profile.fitted_date,
        "lmi_bench": __version__,
        "endpoint": without_address(site.scenario.target),
        "engine": site.run.manifest.target.engine or "not stated",
        "model": setup.shape.name,
        "dtype": setup.dtype,
        "instance": setup.instance.instance_type,
        "accelerator": setup.instance.accelerator.name,
        "tensor_parallel": degree,
        "seconds": round(sum(row["seconds"] for row in rows), 1),
        "cells": rows,
    }
    return replace(done, profile=replace(done.profile, capture=about))
