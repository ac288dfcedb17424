"""Compiled and captured decode steps as the settings state them, and what is said of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmi_bench.core.errors import InputError
from lmi_bench.core.scenario import EngineSection
from lmi_bench.core.units import bytes_to_gib
from lmi_bench.engine.scheduling.config import DEFAULT_ROLLING_BATCH_SIZE
from lmi_bench.targets.back_ends import BackEnd

if TYPE_CHECKING:
    from lmi_bench.engine.torch_backend.static.build import PreparedSteps, StepSettings

TRUST = (
    "warning: {folder} holds compiled code, which runs with your rights: use only what you, or "
    "people you trust, have made"
)


def step_settings(
    settings: EngineSection, back_end: BackEnd, *, out: Path | None = None
) -> StepSettings:
    """The settings of the engine that belong to prepared steps.

    out  folder to compile into; None: the user's cache

    Raises InputError for settings that exclude each other, and for a folder that cannot be written.
    """
    from lmi_bench.engine.torch_backend.static.artefact import check_writable
    from lmi_bench.engine.torch_backend.static.build import StepSettings
    from lmi_bench.engine.torch_backend.static.shapes import parse_shapes

    if settings.compile and settings.artefact is not None:
        raise InputError(
            f"--compile and --artefact {settings.artefact}: an artefact is compiled already; "
            "leave one of the two out"
        )
    if settings.artefact is not None and settings.compile_shapes is not None:
        raise InputError("--compile-shapes: an artefact has its own shapes; leave it out")
    compiled = settings.compile or settings.artefact is not None
    if compiled and back_end.name != "torch":
        raise InputError(
            f"compiled steps are torch's; --backend {back_end.name} has its own: leave --compile "
            "and --artefact out, or take --backend torch"
        )
    if out is not None:
        check_writable(out)  # before the weights are loaded and minutes are spent on compiling
    kernels = None
    if back_end.name == "triton":
        from lmi_bench.engine.triton_backend.step import TritonStep

        kernels = TritonStep
    shapes = settings.compile_shapes
    return StepSettings(
        compiled=settings.compile,
        artefact=None if settings.artefact is None else Path(settings.artefact),
        out=out,
        captured=back_end.device == "cuda" and not settings.enforce_eager,
        shapes=() if shapes is None else parse_shapes(shapes),
        max_tokens=settings.max_model_len,
        most_sequences=_most_sequences(settings),
        kernels=kernels,
    )


def _most_sequences(settings: EngineSection) -> int:
    """Of a decode step under the settings' batching policy."""
    match settings.policy:
        case "none":
            return 1
        case "dynamic":
            return settings.batch_size or 1
    return settings.max_rolling_batch_size or DEFAULT_ROLLING_BATCH_SIZE


def step_notes(settings: EngineSection, prepared: PreparedSteps | None) -> tuple[str, ...]:
    """Notes for the start of a run."""
    if prepared is None:
        return ()
    shapes = ", ".join(map(str, prepared.shapes)) or "none that this engine can fill"
    lines = []
    if prepared.folder is not None:
        how = (
            f"found in {prepared.folder}, ready in {prepared.ready_s:.1f} s (compiling took "
            f"{prepared.compile_s:.1f} s)"
            if prepared.found
            else f"compiled in {prepared.compile_s:.1f} s into {prepared.folder}"
        )
        lines.append(f"compiled decode steps {shapes}: {how}")
    if prepared.graph_bytes is not None:
        lines.append(
            f"CUDA graphs of decode steps {shapes}: {bytes_to_gib(prepared.graph_bytes):.2f} GiB, "
            f"ready in {prepared.ready_s:.1f} s"
        )
    if not lines:
        lines.append(f"decode steps {shapes} without CUDA graphs")
    if settings.artefact is not None:
        lines.append(TRUST.format(folder=settings.artefact))
    return tuple(lines)


def step_facts(prepared: PreparedSteps | None) -> dict[str, Any]:
    """What a run's manifest says of them."""
    if prepared is None:
        return {}
    facts: dict[str, Any] = {
        "shapes": [str(shape) for shape in prepared.shapes],
        "compiled": prepared.folder is not None,
        "found": prepared.found,
        "compile_s": prepared.compile_s,
        "ready_s": prepared.ready_s,
    }
    if prepared.graph_bytes is not None:
        facts["graph_bytes"] = prepared.graph_bytes
    return {"prepared_steps": facts}


def count_notes(executors: Sequence[object]) -> tuple[str, ...]:
    """At the end: how many steps the prepared ones were, where any were."""
    counts = [getattr(executor, "step_counts", None) for executor in executors]
    known = [count for count in counts if count is not None]
    if not known:
        return ()
    prepared, others = (sum(count[i] for count in known) for i in (0, 1))
    return (f"{prepared:,} steps ran prepared, {others:,} with prompts or beyond every shape",)
