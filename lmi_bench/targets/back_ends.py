"""Which step back end the bundled engine starts with, and why not the faster one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmi_bench.core.errors import InputError
from lmi_bench.core.listener import SILENT, Listener
from lmi_bench.core.scenario import EngineSection
from lmi_bench.engine.quantization import NOT_QUANTIZED
from lmi_bench.models.folder import read_config
from lmi_bench.models.hf_config import spec_from_hf_config
from lmi_bench.targets.quantizing import quantize_settings

if TYPE_CHECKING:
    from lmi_bench.engine.native_backend.binding import StepLibrary


@dataclass(frozen=True, slots=True)
class BackEnd:
    """The step back end of an engine.

    compiled  the native step, None where another runs it
    reason    why it is torch although another was asked for, or would have been taken
    triton    whether decode steps are Triton's; prompts are torch's on the same GPU
    device    cpu or cuda
    asked     what `reason` is about
    """

    compiled: StepLibrary | None = None
    reason: str | None = None
    triton: bool = False
    device: str = "cpu"
    asked: str = "native"

    @property
    def name(self) -> str:
        """As settings and manifests have it."""
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
        """What the run's manifest says of it."""
        facts: dict[str, Any] = {"back_end": self.name}
        if self.device != "cpu":
            facts["device"] = self.device
        if self.compiled is not None:
            facts["kernels"] = self.compiled.variants()[0]
        if self.reason is not None:
            facts["back_end_reason"] = self.reason
        return facts


def _check_gpu(option: str) -> None:
    import torch

    if not torch.cuda.is_available():
        raise InputError(f"{option} needs a GPU that torch can use; there is none here")


def _triton(settings: EngineSection, folder: Path, *, degree: int, block_size: int) -> BackEnd:
    """Triton where model and settings allow it, else torch on the same GPU with the reason."""
    if settings.device == "cpu":
        raise InputError("--backend triton runs on a GPU: leave --device cpu out")
    _check_gpu("--backend triton")
    try:
        from lmi_bench.engine.triton_backend.step import unsupported
    except ImportError as exc:
        raise InputError(f"--backend triton needs {exc.name}: pip install triton") from exc
    reason = unsupported(spec_from_hf_config(folder.name, read_config(folder)), block_size)
    if degree > 1:
        reason = "a model split over ranks runs in torch"
    elif quantize_settings(settings) != NOT_QUANTIZED or "quantization_config" in read_config(
        folder
    ):
        reason = "quantized weights run in torch"
    return BackEnd(reason=reason, triton=reason is None, device="cuda", asked="triton")


def choose_back_end(
    settings: EngineSection,
    folders: list[Path],
    *,
    degree: int,
    block_size: int,
    listener: Listener = SILENT,
) -> BackEnd:
    """Native where machine, settings and every model allow it, on a GPU triton; else torch.

    folders  of the model and of its draft
    """
    if settings.backend == "triton":
        return _triton(settings, folders[0], degree=degree, block_size=block_size)
    if settings.device == "cuda":
        if settings.backend == "native":
            raise InputError("--backend native runs on a CPU: leave --device cuda out")
        _check_gpu("--device cuda")
        prepared = settings.compile or settings.artefact is not None
        if settings.backend == "torch" or prepared:
            return BackEnd(device="cuda")
        return _triton(settings, folders[0], degree=degree, block_size=block_size)
    if settings.backend == "torch":
        return BackEnd()
    if settings.compile or settings.artefact is not None:
        if settings.backend == "native":
            raise InputError("--backend native is compiled as it is: leave --compile out")
        return BackEnd(reason="compiled steps are torch's")
    if degree > 1:
        return BackEnd(reason="a model split over ranks runs in torch")
    if quantize_settings(settings) != NOT_QUANTIZED:
        return BackEnd(reason="quantized weights run in torch")
    if "float16" in (settings.dtype, settings.kv_dtype):
        return BackEnd(reason="float16 runs in torch")
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
