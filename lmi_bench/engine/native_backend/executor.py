"""The executor with the native step: checks whether a model is supported, and loads it."""

from __future__ import annotations

import asyncio
import platform
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Final, Self

import torch

from lmi_bench.engine.native_backend.binding import StepLibrary
from lmi_bench.engine.native_backend.build import NativeUnavailableError, library
from lmi_bench.engine.native_backend.forward import NativeForward
from lmi_bench.engine.native_backend.weights import NativeWeights, unsupported
from lmi_bench.engine.quantization import NOT_QUANTIZED
from lmi_bench.engine.torch_backend.executor import Loaded, TorchExecutor, first_result
from lmi_bench.engine.torch_backend.kv_cache import KvLayoutShape
from lmi_bench.engine.torch_backend.load_settings import DEFAULT_LOAD, LoadSettings
from lmi_bench.engine.torch_backend.memory import free_memory_bytes
from lmi_bench.engine.torch_backend.precision import Precision, torch_dtype
from lmi_bench.engine.torch_backend.quantization.calibration import Told
from lmi_bench.engine.torch_backend.runner import ModelRunner
from lmi_bench.engine.torch_backend.weights import Progress
from lmi_bench.models.folder import check_loadable, read_config
from lmi_bench.models.hf_config import spec_from_hf_config
from lmi_bench.models.spec import DecoderSpec

PORTABLE: Final = "portable"
"""Kernels with generic vectors, for processors other than x86."""


def step_library(
    folder: Path, *, block_size: int, tell: Callable[[str], None] | None = None
) -> StepLibrary:
    """The compiled step for the model in `folder`, built first if needed.

    tell  called with one line when a build starts

    Raises NativeUnavailableError if model, block size, compiler or processor are unsuitable.
    """
    spec = _read_spec(folder)
    reason = unsupported(spec, block_size)
    if reason is not None:
        raise NativeUnavailableError(reason)
    compiled = StepLibrary(library(tell=tell))
    if compiled.variants()[0] == PORTABLE and _is_x86():
        raise NativeUnavailableError("the processor has neither AVX-512 nor AVX2 with FMA")
    return compiled


def _read_spec(folder: Path) -> DecoderSpec:
    config = read_config(folder)
    check_loadable(folder, config)
    if config.get("quantization_config") is not None:
        raise NativeUnavailableError("its stored weights are quantized")
    return spec_from_hf_config(folder.resolve().name, config)


class NativeExecutor(TorchExecutor):
    """Runs steps of one model in the compiled library; see `load`. Its numbers are TorchExecutor's;
    `weights_description` also has kernels and threads."""

    _forward: NativeForward

    @classmethod
    def load(
        cls,
        folder: Path,
        settings: LoadSettings = DEFAULT_LOAD,
        *,
        beside: TorchExecutor | None = None,  # noqa: ARG003  the library has its own threads
        progress: Progress | None = None,
        told: Told | None = None,  # noqa: ARG003  nothing is calibrated
        compiled: StepLibrary | None = None,
        variant: str = "",
    ) -> Self:
        """As TorchExecutor.load, and also:

        compiled  from `step_library`; None: find or build it
        variant   instruction set of the kernels; empty: the processor's best

        "bfloat16" weights are stored as such and widened or multiplied while reading.
        `settings.steps` has no effect. Raises NativeUnavailableError like `step_library`, and if
        weights are to be quantized.
        """
        if settings.quantize != NOT_QUANTIZED:
            raise NativeUnavailableError("weights are to be quantized")
        block_size, count = settings.block_size, settings.threads_in_use
        if compiled is None:
            compiled = step_library(folder, block_size=block_size)
        worker = ThreadPoolExecutor(
            1,
            thread_name_prefix="lmi-bench-native",
            initializer=torch.set_num_threads,
            initargs=(count,),
        )
        load = partial(_load, folder, settings, compiled, variant, progress)
        loaded, forward = first_result(worker, load)
        made = cls(loaded, forward.shape, block_size, worker)
        made._forward = forward
        kernels = variant or compiled.variants()[0]
        made.weights_description = (
            f"{settings.dtype}, kernels {kernels}, {count} thread{'s' if count > 1 else ''}"
        )
        return made

    async def close(self) -> None:
        """Wait for the running step, then end the worker and the library's threads."""
        await super().close()
        await asyncio.to_thread(self._forward.close)


def _load(
    folder: Path,
    settings: LoadSettings,
    compiled: StepLibrary,
    variant: str,
    progress: Progress | None,
) -> tuple[Loaded, NativeForward]:
    """Load weights and allocate the cache, in the thread that will compute."""
    spec = _read_spec(folder)
    shape = spec.shape(folder.resolve().name)
    stored = torch_dtype(settings.dtype)
    weights = NativeWeights(folder, spec, stored, progress)
    layout = KvLayoutShape.of(shape, settings.block_size, settings.cache_dtype(stored))
    free = free_memory_bytes(torch.device("cpu"))
    blocks = settings.blocks_in(free, layout.bytes_per_block)
    cache_bytes = weights.take_cache(layout, blocks)
    forward = NativeForward(
        compiled,
        weights,
        shape,
        block_size=settings.block_size,
        num_blocks=blocks,
        threads=settings.threads_in_use,
        variant=variant,
    )
    loaded = Loaded(
        ModelRunner(forward, sampling_seed=settings.seed()),
        Precision(stored, stored),
        blocks,
        free,
        layout.bytes_per_block,
        cache_bytes,
        str(layout.dtype).removeprefix("torch."),
        weights.nbytes,
        None,
    )
    return loaded, forward


def _is_x86() -> bool:
    return platform.machine().lower() in ("x86_64", "amd64")
