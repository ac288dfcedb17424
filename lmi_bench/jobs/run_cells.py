"""A run folder as calibration cells: which model, which machine, which prior it suggests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lmi_bench.analysis.fit.from_run import cells_from_run, profile_for_run, run_model
from lmi_bench.analysis.level.cells import Cell
from lmi_bench.analysis.model.builtin_profiles import (
    BUNDLED_CPU_PRIOR,
    EAGER_GPU_PRIOR,
    SERVED_CPU_PRIOR,
)
from lmi_bench.analysis.model.checkpoint_dtype import narrow_dtype
from lmi_bench.analysis.model.hardware_probe import LOCAL_NAME, probe_machine
from lmi_bench.analysis.model.local_machine import MeasuredMachine
from lmi_bench.analysis.model.profiles import EngineProfile
from lmi_bench.catalog.instances import find_instance
from lmi_bench.catalog.models import find_model
from lmi_bench.core.errors import InputError
from lmi_bench.core.run_store import load_run


@dataclass(frozen=True, slots=True)
class RunCells:
    """The usable levels of a run, the prior of its kind of engine, and `local` if it is of it."""

    cells: list[Cell]
    base: EngineProfile
    machine: MeasuredMachine | None


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
