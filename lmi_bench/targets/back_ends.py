"""Chooses the step back end of the bundled engine, and its compiled and captured decode steps."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from lmi_bench.core.errors import InputError, installed
from lmi_bench.core.listener import SILENT, Listener
from lmi_bench.core.scenario import EngineSection
from lmi_bench.core.units import bytes_to_gib
from lmi_bench.engine.quantization import NOT_QUANTIZED
from lmi_bench.engine.scheduling.config import DEFAULT_ROLLING_BATCH_SIZE
from lmi_bench.models.folder import read_config
from lmi_bench.models.hf_config import spec_from_hf_config
from lmi_bench.targets.quantizing import quantize_settings

if TYPE_CHECKING:
    from lmi_bench.engine.native_backend.binding import StepLibrary
    from lmi_bench.engine.torch_backend.static.build import PreparedSteps, StepSettings

TRUST: Final = (
    "warning: {folder} holds compiled code, which runs with your rights: use only what you, or "
    "people you trust, have made"
)
_SPLIT: Final = "a model split over ranks runs in torch"
_QUANTIZED: Final = "quantized weights run in torch"


@dataclass(frozen=True, slots=True)
class BackEnd:
    """The step back end of an engine.

    compiled  the native step; None if another back end runs it
    reason    why the preferred back end, native on a CPU and else Triton, is not used
    triton    True if decode steps run in Triton; prompts run in torch on the same GPU
    device    cpu or cuda
    """

    compiled: "StepLibrary | None" = None
    reason: str | None = None
    triton: bool = False
    device: str = "cpu"

    @property
    def name(self) -> str:
        """Name in settings and manifests."""
        if self.triton:
            return "triton"
        return "torch" if self.compiled is None else "native"

    @property
    def note(self) -> str:
        """One line for the start of every run."""
        preferred, place = ("native", "") if self.device == "cpu" else ("triton", f" on {self.device}")
        because = "" if self.reason is None else f"; not {preferred}, because {self.reason}"
        return f"step back end {self.name}{place}{because}"

    def facts(self) -> dict[str, Any]:
        """Facts for the run's manifest."""
        facts = {
            "back_end": self.name,
            "device": None if self.device == "cpu" else self.device,
            "kernels": None if self.compiled is None else self.compiled.variants()[0],
            "back_end_reason": self.reason,
        }
        return {key: value for key, value in facts.items() if value is not None}


def choose_back_end(
    settings: EngineSection, folders: list[Path], *, degree: int, block_size: int, listener: Listener = SILENT
) -> BackEnd:
    """Native if machine, settings and every model allow it, or Triton on a GPU; else torch.

    folders  of the model and of its draft
    """
    prepared = settings.compile or settings.artefact is not None
    if settings.backend == "triton":
        if settings.device == "cpu":
            raise InputError("--backend triton runs on a GPU: leave --device cpu out")
        return _triton(folders[0], degree=degree, block_size=block_size)
    if settings.device == "cuda":
        if settings.backend == "native":
            raise InputError("--backend native runs on a CPU: leave --device cuda out")
        _check_gpu("--device cuda")
        if settings.backend == "torch" or prepared:
            return BackEnd(device="cuda")
        return _triton(folders[0], degree=degree, block_size=block_size)
    if settings.backend == "torch":
        return BackEnd()
    if prepared and settings.backend == "native":
        raise InputError("--backend native is compiled already: leave --compile out")
    for needs_torch, reason in (
        (prepared, "compiled steps are torch's"),
        (degree > 1, _SPLIT),
        (quantize_settings(settings) != NOT_QUANTIZED, _QUANTIZED),
        ("float16" in (settings.dtype, settings.kv_dtype), "float16 runs in torch"),
        (settings.kv_dtype == "float8", "a float8 cache is torch's"),
    ):
        if needs_torch:
            return BackEnd(reason=reason)
    return _native(folders, block_size, listener)


def _native(folders: list[Path], block_size: int, listener: Listener) -> BackEnd:
    """The native step, compiled if necessary, else torch with the reason."""
    from lmi_bench.core.native_build import NativeUnavailableError
    from lmi_bench.engine.native_backend.executor import step_library

    def tell(text: str) -> None:
        listener.note(text)
        listener.progress("compiling", 0, None)

    try:
        compiled = [step_library(folder, block_size=block_size, tell=tell) for folder in folders]
    except NativeUnavailableError as exc:
        return BackEnd(reason=str(exc))
    return BackEnd(compiled[0])


def _triton(folder: Path, *, degree: int, block_size: int) -> BackEnd:
    """Triton if model and settings allow it, else torch on the same GPU with the reason."""
    _check_gpu("--backend triton")
    with installed("--backend triton"):
        from lmi_bench.engine.triton_backend.step import unsupported
    reason = unsupported(spec_from_hf_config(folder.name, read_config(folder)), block_size)
    if degree > 1:
        reason = _SPLIT
    return BackEnd(reason=reason, triton=reason is None, device="cuda")


def _check_gpu(option: str) -> None:
    import torch

    if not torch.cuda.is_available():
        raise InputError(f"{option} needs a GPU that torch can use; there is none here")


def step_settings(settings: EngineSection, back_end: BackEnd, *, out: Path | None = None) -> "StepSettings":
    """The engine's settings for prepared steps.

    out  folder to compile into; None: the user's cache
    Raises InputError for settings that exclude each other, and for a folder that cannot be written.
    """
    from lmi_bench.engine.torch_backend.static.artefact import check_writable, parse_shapes
    from lmi_bench.engine.torch_backend.static.build import StepSettings

    if settings.compile and settings.artefact is not None:
        raise InputError(
            f"--compile and --artefact {settings.artefact}: an artefact is compiled already; leave one of the two out"
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
    rolling = settings.max_rolling_batch_size or DEFAULT_ROLLING_BATCH_SIZE
    by_policy = {"none": 1, "dynamic": settings.batch_size or 1}
    shapes = settings.compile_shapes
    return StepSettings(
        compiled=settings.compile,
        artefact=None if settings.artefact is None else Path(settings.artefact),
        out=out,
        captured=back_end.device == "cuda" and not settings.enforce_eager,
        shapes=() if shapes is None else parse_shapes(shapes),
        max_tokens=settings.max_model_len,
        most_sequences=by_policy.get(settings.policy, rolling),
        kernels=kernels,
    )


def step_notes(settings: EngineSection, prepared: "PreparedSteps | None") -> tuple[str, ...]:
    """Notes for the start of a run."""
    if prepared is None:
        return ()
    shapes = ", ".join(map(str, prepared.shapes)) or "none that this engine can fill"
    lines = []
    if (artefact := prepared.artefact) is not None:
        how = (
            f"found in {artefact.folder}, ready in {prepared.ready_s:.1f} s (compiling took {artefact.compile_s:.1f} s)"
            if artefact.found
            else f"compiled in {artefact.compile_s:.1f} s into {artefact.folder}"
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


def step_facts(prepared: "PreparedSteps | None") -> dict[str, Any]:
    """Facts for a run's manifest."""
    if prepared is None:
        return {}
    artefact = prepared.artefact
    facts: dict[str, Any] = {
        "shapes": [str(shape) for shape in prepared.shapes],
        "compiled": artefact is not None,
        "found": artefact is None or artefact.found,
        "compile_s": 0.0 if artefact is None else artefact.compile_s,
        "ready_s": prepared.ready_s,
    }
    if prepared.graph_bytes is not None:
        facts["graph_bytes"] = prepared.graph_bytes
    return {"prepared_steps": facts}


def count_notes(executors: Sequence[object]) -> tuple[str, ...]:
    """Note for the end of a run: how many steps ran prepared; empty if none were prepared."""
    counts = [getattr(executor, "step_counts", None) for executor in executors]
    known = [count for count in counts if count is not None]
    if not known:
        return ()
    prepared, others = (sum(count[i] for count in known) for i in (0, 1))
    return (f"{prepared:,} steps ran prepared, {others:,} with prompts or beyond every shape",)
