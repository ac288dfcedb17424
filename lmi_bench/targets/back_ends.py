"""Chooses the step back end of the bundled engine, with the reason against a faster one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from lmi_bench.core.errors import InputError
from lmi_bench.core.listener import SILENT, Listener
from lmi_bench.core.scenario import EngineSection
from lmi_bench.engine.quantization import NOT_QUANTIZED
from lmi_bench.models.folder import read_config
from lmi_bench.models.hf_config import spec_from_hf_config
from lmi_bench.targets.quantizing import quantize_settings

if TYPE_CHECKING:
    from lmi_bench.engine.native_backend.binding import StepLibrary

_SPLIT: Final = "a model split over ranks runs in torch"
_QUANTIZED: Final = "quantized weights run in torch"


@dataclass(frozen=True, slots=True)
class BackEnd:
    """The step back end of an engine.

    compiled  the native step; None if another back end runs it
    reason    why the requested or preferred back end is not used
    triton    True if decode steps run in Triton; prompts run in torch on the same GPU
    device    cpu or cuda
    asked     the back end that `reason` is about
    """

    compiled: StepLibrary | None = None
    reason: str | None = None
    triton: bool = False
    device: str = "cpu"
    asked: str = "native"

    @property
    def name(self) -> str:
        """Name in settings and manifests."""
        if self.triton:
            return "triton"
        return "torch" if self.compiled is None else "native"

    @property
    def note(self) -> str:
        """One line for the start of every run."""
        because = "" if self.reason is None else f"; not {self.asked}, because {self.reason}"
        place = "" if self.device == "cpu" else f" on {self.device}"
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
    settings: EngineSection,
    folders: list[Path],
    *,
    degree: int,
    block_size: int,
    listener: Listener = SILENT,
) -> BackEnd:
    """Native if machine, settings and every model allow it, or Triton on a GPU; else torch.

    folders  of the model and of its draft
    """
    prepared = settings.compile or settings.artefact is not None
    if settings.backend == "triton":
        if settings.device == "cpu":
            raise InputError("--backend triton runs on a GPU: leave --device cpu out")
        return _triton(settings, folders[0], degree=degree, block_size=block_size)
    if settings.device == "cuda":
        if settings.backend == "native":
            raise InputError("--backend native runs on a CPU: leave --device cuda out")
        _check_gpu("--device cuda")
        if settings.backend == "torch" or prepared:
            return BackEnd(device="cuda")
        return _triton(settings, folders[0], degree=degree, block_size=block_size)
    if settings.backend == "torch":
        return BackEnd()
    if prepared and settings.backend == "native":
        raise InputError("--backend native is compiled already: leave --compile out")
    for needs_torch, reason in (
        (prepared, "compiled steps are torch's"),
        (degree > 1, _SPLIT),
        (quantize_settings(settings) != NOT_QUANTIZED, _QUANTIZED),
        ("float16" in (settings.dtype, settings.kv_dtype), "float16 runs in torch"),
    ):
        if needs_torch:
            return BackEnd(reason=reason)
    return _native(folders, block_size, listener)


def _native(folders: list[Path], block_size: int, listener: Listener) -> BackEnd:
    """The native step, compiled if necessary, else torch with the reason."""
    from lmi_bench.engine.native_backend.build import NativeUnavailableError
    from lmi_bench.engine.native_backend.executor import step_library

    def tell(text: str) -> None:
        listener.note(text)
        listener.progress("compiling", 0, None)

    try:
        compiled = [step_library(folder, block_size=block_size, tell=tell) for folder in folders]
    except NativeUnavailableError as exc:
        return BackEnd(reason=str(exc))
    return BackEnd(compiled[0])


def _triton(settings: EngineSection, folder: Path, *, degree: int, block_size: int) -> BackEnd:
    """Triton if model and settings allow it, else torch on the same GPU with the reason."""
    _check_gpu("--backend triton")
    try:
        from lmi_bench.engine.triton_backend.step import unsupported
    except ImportError as exc:
        raise InputError(f"--backend triton needs {exc.name}: pip install triton") from exc
    config = read_config(folder)
    reason = unsupported(spec_from_hf_config(folder.name, config), block_size)
    if degree > 1:
        reason = _SPLIT
    elif quantize_settings(settings) != NOT_QUANTIZED or "quantization_config" in config:
        reason = _QUANTIZED
    return BackEnd(reason=reason, triton=reason is None, device="cuda", asked="triton")


def _check_gpu(option: str) -> None:
    import torch

    if not torch.cuda.is_available():
        raise InputError(f"{option} needs a GPU that torch can use; there is none here")
