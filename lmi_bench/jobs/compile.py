"""Decode steps compiled ahead of time, and compared with eager ones."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lmi_bench.core.listener import SILENT, Listener
from lmi_bench.core.scenario import parse_scenario
from lmi_bench.jobs.settings.compile import CompileSettings
from lmi_bench.jobs.settings.engine import stated_settings
from lmi_bench.targets.bundled import open_torch_engine
from lmi_bench.targets.parts import EngineParts, close_all

if TYPE_CHECKING:
    from lmi_bench.targets.parts import StepDifference


@dataclass(frozen=True, slots=True)
class CompiledSteps:
    """The folder of the compiled steps, and how far each shape's step is from the eager one."""

    folder: Path
    differences: list[StepDifference]


def compile_steps(settings: CompileSettings, listener: Listener = SILENT) -> CompiledSteps:
    """Compile and compare; raises InputError for a model or setting that cannot be compiled."""
    stated = stated_settings(settings.steps) | {"compile": True}
    if settings.shapes is not None:
        stated["compile_shapes"] = settings.shapes
    engine = parse_scenario({"engine": stated}, source="compile").engine
    parts = open_torch_engine(settings.model, engine, listener, compile_into=settings.out)
    for line in parts.notes:
        listener.note(line)
    return CompiledSteps(settings.out, asyncio.run(_compare(parts)))


async def _compare(parts: EngineParts) -> list[StepDifference]:
    assert parts.loaded is not None  # a torch engine with compiled steps has it
    try:
        return await parts.loaded.compare_prepared()
    finally:
        await close_all(parts.executors)
