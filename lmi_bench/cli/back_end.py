"""Which step back end the bundled engine starts with, and why not the faster one."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmi_bench.cli.console import note, progress
from lmi_bench.cli.quantizing import quantize_settings
from lmi_bench.engine.quantization import NOT_QUANTIZED
from lmi_bench.scenario import EngineSection

if TYPE_CHECKING:
    from lmi_bench.engine.native_backend.binding import StepLibrary


@dataclass(frozen=True, slots=True)
class BackEnd:
    """The step back end of an engine.

    compiled  the native step, None where torch runs it
    reason    why it is torch although the native step was asked for, or would have been taken
    """

    compiled: StepLibrary | None = None
    reason: str | None = None

    @property
    def name(self) -> str:
        """As settings and manifests have it."""
        return "torch" if self.compiled is None else "native"

    @property
    def note(self) -> str:
        """One line for the start of every run."""
        because = "" if self.reason is None else f"; not native, because {self.reason}"
        return f"step back end {self.name}{because}"

    def facts(self) -> dict[str, Any]:
        """What the run's manifest says of it."""
        facts: dict[str, Any] = {"back_end": self.name}
        if self.compiled is not None:
            facts["kernels"] = self.compiled.variants()[0]
        if self.reason is not None:
            facts["back_end_reason"] = self.reason
        return facts


def choose_back_end(
    settings: EngineSection, folders: list[Path], *, degree: int, block_size: int
) -> BackEnd:
    """Native where machine, settings and every model allow it, unless torch is asked for.

    folders  of the model and of its draft
    """
    if settings.backend == "torch":
        return BackEnd()
    if degree > 1:
        return BackEnd(reason="a model split over ranks runs in torch")
    if quantize_settings(settings) != NOT_QUANTIZED:
        return BackEnd(reason="quantized weights run in torch")
    from lmi_bench.engine.native_backend.build import NativeUnavailableError
    from lmi_bench.engine.native_backend.executor import step_library

    with ExitStack() as shown:

        def tell(text: str) -> None:
            note(text)
            shown.enter_context(progress())("compiling", 0, None)

        try:
            compiled = [
                step_library(folder, block_size=block_size, tell=tell) for folder in folders
            ]
        except NativeUnavailableError as exc:
            return BackEnd(reason=str(exc))
    return BackEnd(compiled[0])
