"""Loads the copies of a model onto their devices, each with its draft, and limits their caches."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from lmi_bench.core.errors import InputError
from lmi_bench.core.host import memory_bytes
from lmi_bench.core.listener import Listener
from lmi_bench.core.scenario import EngineSection
from lmi_bench.core.units import MIB
from lmi_bench.engine.drafting import DraftingExecutor
from lmi_bench.engine.executor import Executor
from lmi_bench.engine.memory_budget import MemoryBudget
from lmi_bench.engine.quantization import NOT_QUANTIZED
from lmi_bench.models.folder import read_config, shape_of_folder
from lmi_bench.targets.applies import runs_on_gpu
from lmi_bench.targets.back_ends import BackEnd
from lmi_bench.targets.parts import close_all

if TYPE_CHECKING:
    from lmi_bench.engine.torch_backend.load_settings import LoadSettings
    from lmi_bench.targets.parts import LoadedModel

_KEPT_MEMORY_FRAC: Final = 0.05  # share of memory that --follow-memory leaves free

Progress = Callable[[str, float, float | None], None]


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Which model the bundled engine loads, and onto which devices.

    name        of the model, as reports show it
    degree      devices of a copy
    cores       of this machine that the engine may use
    gpus        of this machine; None for an engine on the CPU
    """

    settings: EngineSection
    name: str
    folder: Path
    draft_folder: Path | None
    degree: int
    cores: int
    gpus: int | None
    block_size: int
    back_end: BackEnd

    @property
    def places(self) -> int:
        """Copies that fit side by side on the GPUs, at least 1; on a CPU 1."""
        return max(1, (self.gpus or 0) // self.degree)

    @property
    def sharing(self) -> int:
        """Maximum number of copies that share a device and its memory."""
        return -(-self.settings.replicas // self.places)

    def first_device(self, copy: int) -> int:
        """Index of a copy's first device: side by side, then from the start again."""
        return copy % self.places * self.degree

    def load(self, settings: LoadSettings, listener: Listener) -> tuple[tuple[Executor, ...], tuple[LoadedModel, ...]]:
        """The executor of every copy, each with as many blocks as the first; the first copy's
        model, and its draft model if there is one."""
        copies: list[tuple[LoadedModel, ...]] = []
        try:
            for number in range(self.settings.replicas):
                which = f" (copy {number + 1})" if self.settings.replicas > 1 else ""
                settings = replace(settings, first_device=self.first_device(number))
                if copies:
                    settings = replace(settings, num_blocks=copies[0][0].num_blocks)
                report = partial(_report_bytes, listener, f"weights, MiB{which}")
                copies.append(self._load_copy(settings, report, listener.progress))
        except BaseException:
            asyncio.run(close_all([each for copy in copies for each in copy]))
            raise
        executors = tuple(copy[0] if self.draft_folder is None else DraftingExecutor(*copy) for copy in copies)
        return executors, copies[0]

    def _load_copy(
        self, settings: LoadSettings, report: Callable[[int, int], None], tell: Progress
    ) -> tuple[LoadedModel, ...]:
        from lmi_bench.engine.torch_backend.executor import ParallelExecutor, TorchExecutor

        loaded: LoadedModel
        if self.degree > 1:
            loaded = ParallelExecutor.load(
                self.folder, settings, tensor_parallel=self.degree, progress=report, tell=tell
            )
        else:
            loaded = self._on_one_device(self.folder, settings, progress=report, tell=tell)
        if self.draft_folder is None:
            return (loaded,)
        of_draft = replace(
            settings,
            num_blocks=loaded.num_blocks,
            quantize=NOT_QUANTIZED,
            steps=replace(  # a draft's steps are not prepared
                settings.steps, compiled=False, artefact=None, captured=False, kernels=None
            ),
        )
        beside = loaded if isinstance(loaded, TorchExecutor) else None
        try:
            draft = self._on_one_device(self.draft_folder, of_draft, beside=beside, progress=report, tell=tell)
        except BaseException:
            asyncio.run(loaded.close())
            raise
        return loaded, draft

    def _on_one_device(self, folder: Path, settings: LoadSettings, **watched: Any) -> LoadedModel:
        compiled = self.back_end.compiled
        if compiled is not None:
            from lmi_bench.engine.native_backend.executor import NativeExecutor

            return NativeExecutor.load(folder, settings, compiled=compiled, **watched)
        from lmi_bench.engine.torch_backend.executor import TorchExecutor

        return TorchExecutor.load(folder, settings, **watched)


def _report_bytes(listener: Listener, title: str, done_bytes: int, total_bytes: int) -> None:
    listener.progress(title, done_bytes / MIB, total_bytes / MIB)


def check_memory(plan: LoadPlan, dtype: str) -> None:
    """Raise CapacityError if the weights exceed the memory of the devices that share them. A folder
    with quantized weights is not checked."""
    import torch

    from lmi_bench.engine.torch_backend.memory import check_weights_fit
    from lmi_bench.engine.torch_backend.precision import torch_dtype

    if "quantization_config" in read_config(plan.folder):
        return
    on_cpu = plan.gpus is None
    weight_bytes = shape_of_folder(plan.folder).params_total * torch_dtype(dtype).itemsize
    weight_bytes *= plan.sharing
    check_weights_fit(
        plan.folder.name,
        weight_bytes // (1 if on_cpu else plan.degree),
        torch.device("cpu") if on_cpu else torch.device("cuda", 0),
    )


def memory_budget(settings: EngineSection, models: Sequence[LoadedModel], tell: Callable[[str], None]) -> MemoryBudget:
    """Each copy's memory budget: a share of the free memory, less a twentieth of the machine's.

    models  the model and its draft, which each cache the same tokens
    """
    import torch

    from lmi_bench.engine.torch_backend.memory import free_memory_bytes

    if runs_on_gpu(settings):
        raise InputError("--follow-memory: a GPU's cache is allocated whole at the start")
    if settings.prefix_caching:
        raise InputError("--follow-memory excludes --prefix-caching, whose idle blocks keep their memory")
    place = torch.device("cpu")
    return MemoryBudget(
        free_bytes=lambda: free_memory_bytes(place) // settings.replicas,
        bytes_per_block=sum(model.kv_cache_bytes // model.num_blocks for model in models),
        keep_bytes=int(_KEPT_MEMORY_FRAC * memory_bytes()) // settings.replicas,
        tell=tell,
    )


def start_ranks_early() -> None:
    """Start the ranks' fork server, so that it imports torch while this process does."""
    from lmi_bench.engine.torch_backend.fork_server import fork_context

    fork_context()


def gpu_count(settings: EngineSection) -> int | None:
    """GPUs of this machine if the settings ask for one; None for an engine on the CPU."""
    if not runs_on_gpu(settings):
        return None
    import torch

    return torch.cuda.device_count()
