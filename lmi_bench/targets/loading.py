"""Loads the copies of a model into memory, each with its draft, and bounds their caches."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from lmi_bench.core.errors import InputError
from lmi_bench.core.listener import Listener
from lmi_bench.core.scenario import EngineSection
from lmi_bench.core.units import MIB
from lmi_bench.engine.drafting import DraftingExecutor
from lmi_bench.engine.executor import Executor
from lmi_bench.engine.memory_budget import MemoryBudget
from lmi_bench.engine.quantization import NOT_QUANTIZED, QuantizedBytes
from lmi_bench.models.folder import read_config, shape_of_folder
from lmi_bench.models.shape import ModelShape
from lmi_bench.targets.back_ends import BackEnd
from lmi_bench.targets.parts import close_all
from lmi_bench.targets.placement import first_device

if TYPE_CHECKING:
    from lmi_bench.engine.torch_backend.load_settings import LoadSettings
    from lmi_bench.engine.torch_backend.static.build import PreparedSteps
    from lmi_bench.engine.torch_backend.static.check import StepDifference

_KEPT_MEMORY_FRAC: Final = 0.05  # of the machine's, which a cache that follows it leaves to others

Progress = Callable[[str, float, float | None], None]


class TorchNumbers(Executor, Protocol):
    """An executor of the torch back end with what it says of itself, over one rank or several."""

    model_shape: ModelShape
    num_blocks: int
    free_memory_bytes: int
    kv_cache_bytes: int
    kv_dtype: str
    weights_description: str
    weight_bytes: int
    quantized: QuantizedBytes | None
    prepared: PreparedSteps | None

    async def score(self, given: Sequence[int], continuation: Sequence[int]) -> list[float]:
        """Log-probabilities of given tokens behind others."""
        ...

    async def compare_prepared(self) -> list[StepDifference]:
        """Prepared decode steps against eager ones."""
        ...

    async def time_products(self, rows: int) -> float | None:
        """Seconds of a decode step's matrix products."""
        ...


class TorchCopy:
    """How one copy of the model is loaded: on one device or over ranks, with a draft or without."""

    def __init__(
        self,
        folder: Path,
        draft_folder: Path | None,
        degree: int,
        back_end: BackEnd,
        settings: LoadSettings,
        gpus: int | None,
    ) -> None:
        self._folder = folder
        self._draft_folder = draft_folder
        self._degree = degree
        self._compiled = back_end.compiled
        self._settings = settings
        self._gpus = gpus

    def load(
        self, copies: int, listener: Listener
    ) -> tuple[tuple[Executor, ...], TorchNumbers, TorchNumbers | None]:
        """Every copy's executor, all with as many blocks as the first; the first copy's numbers
        and those of its draft."""
        executors: list[Executor] = []
        first: TorchNumbers | None = None
        first_draft: TorchNumbers | None = None
        try:
            for number in range(copies):
                title = "weights, MiB" + (f" (copy {number + 1})" if copies > 1 else "")
                settings = replace(
                    self._settings, first_device=first_device(number, self._degree, self._gpus)
                )
                if first is not None:
                    settings = replace(settings, num_blocks=first.num_blocks)
                report = partial(_tell_bytes, listener, title)
                loaded, draft = self._load_one(settings, report, listener.progress)
                executors.append(loaded if draft is None else DraftingExecutor(loaded, draft))
                if first is None:
                    first, first_draft = loaded, draft
        except BaseException:
            asyncio.run(close_all(executors))
            raise
        assert first is not None
        return tuple(executors), first, first_draft

    def _load_one(
        self, settings: LoadSettings, report: Callable[[int, int], None], told: Progress
    ) -> tuple[TorchNumbers, TorchNumbers | None]:
        from lmi_bench.engine.torch_backend.executor import TorchExecutor
        from lmi_bench.engine.torch_backend.parallel_executor import ParallelExecutor

        loaded: TorchNumbers
        if self._degree > 1:
            loaded = ParallelExecutor.load(
                self._folder,
                settings,
                tensor_parallel=self._degree,
                progress=report,
                told=told,
            )
        else:
            loaded = self._on_one_device(self._folder, settings, progress=report, told=told)
        if self._draft_folder is None:
            return loaded, None
        of_draft = replace(
            settings,
            num_blocks=loaded.num_blocks,
            quantize=NOT_QUANTIZED,
            steps=replace(  # a draft's steps run as they are
                settings.steps, compiled=False, artefact=None, captured=False, kernels=None
            ),
        )
        beside = loaded if isinstance(loaded, TorchExecutor) else None
        try:
            draft = self._on_one_device(
                self._draft_folder, of_draft, beside=beside, progress=report, told=told
            )
        except BaseException:
            asyncio.run(loaded.close())
            raise
        return loaded, draft

    def _on_one_device(self, folder: Path, settings: LoadSettings, **watched: Any) -> TorchNumbers:
        if self._compiled is not None:
            from lmi_bench.engine.native_backend.executor import NativeExecutor

            return NativeExecutor.load(folder, settings, compiled=self._compiled, **watched)
        from lmi_bench.engine.torch_backend.executor import TorchExecutor

        return TorchExecutor.load(folder, settings, **watched)


def _tell_bytes(listener: Listener, title: str, done_bytes: int, total_bytes: int) -> None:
    listener.progress(title, done_bytes / MIB, total_bytes / MIB)


def check_memory(folder: Path, dtype: str, devices: int, gpus: int | None) -> None:
    """CapacityError where the weights are larger than the memory of the devices that share them.

    A folder that holds them rounded is let pass.
    """
    import torch

    from lmi_bench.engine.torch_backend.memory import check_weights_fit
    from lmi_bench.engine.torch_backend.precision import torch_dtype

    if "quantization_config" in read_config(folder):
        return
    shape = shape_of_folder(folder)
    place = torch.device("cpu") if gpus is None else torch.device("cuda", 0)
    each = shape.params_total * torch_dtype(dtype).itemsize // devices
    check_weights_fit(folder.name, each, place)


def memory_budget(
    settings: EngineSection,
    models: Sequence[TorchNumbers | None],
    copies: int,
    tell: Callable[[str], None],
) -> MemoryBudget:
    """Of each copy: a share of what is free, and none of the last twentieth of the machine's.

    models  that keep the same tokens in caches of their own
    """
    import torch

    from lmi_bench.engine.torch_backend.memory import free_memory_bytes, memory_bytes

    if settings.device == "cuda" or settings.backend == "triton":
        raise InputError("--follow-memory: a GPU's cache is taken whole at the start")
    if settings.prefix_caching:
        raise InputError(
            "--follow-memory goes without --prefix-caching, whose idle blocks keep their memory"
        )
    place = torch.device("cpu")
    return MemoryBudget(
        free_bytes=lambda: free_memory_bytes(place) // copies,
        bytes_per_block=sum(
            model.kv_cache_bytes // model.num_blocks for model in models if model is not None
        ),
        keep_bytes=int(_KEPT_MEMORY_FRAC * memory_bytes()) // copies,
        told=tell,
    )


def start_ranks_early() -> None:
    """Let the ranks' server import torch while this process does."""
    from lmi_bench.engine.torch_backend.fork_server import fork_context

    fork_context()
