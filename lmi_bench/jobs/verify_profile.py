"""What a verification teaches: the plan's profile fitted to the measured level as well."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from lmi_bench.analysis.fit.from_run import (
    PlacedRun,
    accuracy_on,
    calibrate_on_runs,
    cells_from_run,
)
from lmi_bench.analysis.model.builtin_profiles import EAGER_GPU_PRIOR, GRAPH_GPU_PRIOR
from lmi_bench.analysis.model.engine_setting import has_graphs
from lmi_bench.analysis.model.local_machine import LOCAL_NAME, probe_machine
from lmi_bench.analysis.model.profiles import EngineProfile, profile_from_json, profile_to_json
from lmi_bench.catalog.instances import find_instance
from lmi_bench.catalog.models import find_model
from lmi_bench.core.durable import write_text
from lmi_bench.core.errors import InputError
from lmi_bench.core.run_store import Run
from lmi_bench.jobs.saved_recommendation import SavedRecommendation


def known_profile(plan: SavedRecommendation, path: Path) -> EngineProfile:
    """The profile to go on from: the file's, else the plan's. Raises InputError without either."""
    if path.exists():
        return profile_from_json(path.read_text(encoding="utf-8"))
    if plan.profile_document is None:
        raise InputError(
            f"the plan holds no profile to go on from: run recommend --json again, or put one at "
            f"{path}"
        )
    return profile_from_json(json.dumps(plan.profile_document))


def check_learnable(plan: SavedRecommendation, copies: float) -> None:
    """Raises InputError where the measurement could not teach a profile.

    copies  of the fleet whose share of the load the target gets
    """
    if abs(copies - 1) > 1e-6:
        share = 1 / (plan.best.instances * plan.best.copies)
        raise InputError(
            f"--update-profile learns from one copy of the model, this load is that of {copies:g}: "
            f"point --target at one copy and add --share {share:.4g}"
        )
    if plan.answer.question.kinds:
        raise InputError(
            "--update-profile needs equal requests; the plan's differ in length: sweep with "
            "--input-tokens and --output-tokens, then calibrate on that run"
        )
    if any(getattr(plan.best.setting, name) for name in _UNFITTED):
        raise InputError(
            f"--update-profile: the plan's engine differs from its profile in "
            f"{', '.join(_UNFITTED)}: sweep that engine and calibrate on the run"
        )


_UNFITTED = ("speculation", "cuda_graphs")


def doubted(profile: EngineProfile) -> EngineProfile:
    """The profile where a measurement contradicts it: its values, with the doubt of an engine of
    its kind of which no level is known."""
    general = GRAPH_GPU_PRIOR if has_graphs(profile) else EAGER_GPU_PRIOR
    return replace(
        profile,
        log_sd={name: max(sd, general.log_sd.get(name, sd)) for name, sd in profile.log_sd.items()},
        log_correlation=(),
    )


@dataclass(frozen=True, slots=True)
class Change:
    """A figure's prediction over the measurement, less 1, before and after the fit."""

    name: str
    before: float
    after: float


@dataclass(frozen=True, slots=True)
class Learned:
    """What a measurement made of a profile.

    doubted  figures lay outside their intervals, so that less of the profile was believed
    refused  why nothing could be fitted; the file is then as it was
    """

    path: Path
    changes: tuple[Change, ...] = ()
    doubted: bool = False
    refused: str | None = None


def learn(
    plan: SavedRecommendation, run: Run, profile: EngineProfile
) -> tuple[EngineProfile, tuple[Change, ...]]:
    """The profile fitted to the run's level; what it says of that level before and after."""
    shape, best = find_model(plan.model), plan.best
    name = best.instance
    machine = probe_machine().instance() if name == LOCAL_NAME else find_instance(name)
    placed = PlacedRun(run, machine, best.tensor_parallel)
    setting = best.setting
    dtype = setting.dtype or plan.answer.question.dtype
    cells = cells_from_run(placed.run, shape, machine, dtype=dtype, tensor_parallel=placed.degree)
    if setting.kv_dtype:
        cells = [
            replace(cell, setup=replace(cell.setup, kv_dtype=setting.kv_dtype)) for cell in cells
        ]
    fitted, after = calibrate_on_runs(profile, [placed], shape, dtype=dtype)
    fitted = replace(fitted, fitted_on=f"{profile.fitted_on}; then {fitted.fitted_on}")
    before = accuracy_on(profile, cells)
    changes = []
    for old, new in zip(before["levels"], after["levels"], strict=True):
        for key, pair in old.items():
            if isinstance(pair, Mapping) and pair["measured"]:
                ratios = (pair["predicted"], new[key]["predicted"])
                changes.append(Change(key, *(value / pair["measured"] - 1 for value in ratios)))
    return fitted, tuple(changes)


def update(
    plan: SavedRecommendation,
    run: Run,
    profile: EngineProfile,
    path: Path,
    *,
    contradicted: bool,
) -> Learned:
    """Fit and write; a run that cannot be fitted leaves the file as it is, with the reason.

    contradicted  figures lie outside their intervals, so that less of the profile is believed
    """
    try:
        fitted, changes = learn(plan, run, doubted(profile) if contradicted else profile)
    except InputError as exc:
        return Learned(path, doubted=contradicted, refused=str(exc))
    write_text(path, profile_to_json(fitted))
    return Learned(path, changes, contradicted)
