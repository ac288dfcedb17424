"""The back end `native`: a whole step in one call of the compiled library.

Checks whether a model is supported, and loads it.
"""

import asyncio
import platform
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Self

import torch
from torch import Tensor

from lmi_bench.core.errors import EngineError
from lmi_bench.core.native_build import NativeUnavailableError
from lmi_bench.engine.native_backend import binding
from lmi_bench.engine.native_backend.binding import StepLibrary, library
from lmi_bench.engine.native_backend.weights import NativeWeights, unsupported
from lmi_bench.engine.quantization import NOT_QUANTIZED
from lmi_bench.engine.torch_backend.attention import SequenceRows
from lmi_bench.engine.torch_backend.executor import ModelNumbers, TorchExecutor, start_worker
from lmi_bench.engine.torch_backend.kv_cache import KvLayoutShape
from lmi_bench.engine.torch_backend.load_settings import DEFAULT_LOAD, LoadSettings
from lmi_bench.engine.torch_backend.memory import free_memory_bytes
from lmi_bench.engine.torch_backend.precision import dtype_name, torch_dtype
from lmi_bench.engine.torch_backend.rank import RankWorker
from lmi_bench.engine.torch_backend.runner import ModelRunner
from lmi_bench.engine.torch_backend.weights import Progress, Tell, read_model
from lmi_bench.models.shape import ModelShape
from lmi_bench.models.spec import DecoderSpec


class NativeForward:
    """A model and its cache in the library's own layout; `close` ends its threads."""

    def __init__(
        self,
        library: binding.StepLibrary,
        weights: NativeWeights,
        shape: ModelShape,
        variant: str = "",
    ) -> None:
        """weights  with their cache and threads

        variant  kernels, one of `library.variants()`; empty: the best
        """
        self.shape = shape
        self.block_size: int = weights.model.block_size
        self.num_blocks = weights.num_blocks
        self._library = library
        self._weights = weights
        self._handle = library.open(weights.model, variant)
        if not self._handle:
            raise EngineError(
                f"the native step (kernels {variant or 'the best'}) did not get memory or its "
                f"{weights.model.threads:,} threads from the system: lower --threads, raise the "
                "limit of processes (ulimit -u, a container's pids), or use --backend torch"
            )

    def logits(self, sequences: Sequence[SequenceRows]) -> Tensor:
        """Logits of the sampled rows, shape (sampled rows, vocab), float32."""
        logits = torch.empty(sum(rows.sampled for rows in sequences), self.shape.vocab_size)
        self._step(sequences, logits=logits.data_ptr())
        return logits

    def likeliest(self, sequences: Sequence[SequenceRows]) -> list[int]:
        token_ids = array("i", bytes(4 * sum(rows.sampled for rows in sequences)))
        self._step(sequences, likeliest=token_ids.buffer_info()[0])
        return token_ids.tolist()

    def close(self) -> None:
        """End the threads; no step may follow."""
        handle, self._handle = self._handle, 0
        if handle:
            self._library.close(handle)

    def _step(
        self,
        sequences: Sequence[SequenceRows],
        *,
        logits: int | None = None,
        likeliest: int | None = None,
    ) -> None:
        token_ids: list[int] = []
        tables: list[int] = []
        sampled: list[int] = []
        spans = array("q")
        for rows in sequences:
            first_row = len(token_ids)
            token_ids.extend(rows.token_ids)
            end = len(token_ids)
            spans.extend((first_row, end - first_row, rows.first_position, len(tables)))
            tables.extend(rows.block_table)
            sampled.extend(range(end - rows.sampled, end))
        ids, blocks, wanted = array("i", token_ids), array("i", tables), array("i", sampled)
        step = binding.Step(
            rows=len(ids),
            sequences=len(sequences),
            sampled=len(wanted),
            token_ids=ids.buffer_info()[0],
            sequence=spans.buffer_info()[0],
            tables=blocks.buffer_info()[0],
            sampled_rows=wanted.buffer_info()[0],
            logits=logits,
            likeliest=likeliest,
        )
        if not self._library.step(self._handle, step):
            raise EngineError(f"a step of {len(ids):,} rows does not fit in memory")


PORTABLE: Final = "portable"  # kernels with generic vectors, for processors other than x86


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
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    if compiled.variants()[0] == PORTABLE and x86:
        raise NativeUnavailableError("the processor has neither AVX-512 nor AVX2 with FMA")
    return compiled


def _read_spec(folder: Path) -> DecoderSpec:
    source = read_model(folder)
    if source.config.get("quantization_config") is not None:
        raise NativeUnavailableError("its stored weights are quantized")
    return source.spec


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
        tell: Tell | None = None,  # noqa: ARG003  nothing is calibrated
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
        kernels = compiled or step_library(folder, block_size=settings.block_size)
        shown, count = variant or kernels.variants()[0], settings.threads_in_use

        def load() -> tuple[ModelNumbers, NativeForward]:
            """Load weights and allocate the cache, in the thread that will compute."""
            spec = _read_spec(folder)
            shape = spec.shape(folder.resolve().name)
            stored = torch_dtype(settings.dtype)
            weights = NativeWeights(folder, spec, stored, progress)
            layout = KvLayoutShape.of(shape, settings.block_size, settings.cache_dtype(stored))
            free = free_memory_bytes(torch.device("cpu"))
            blocks = settings.blocks_in(free, layout.bytes_per_block)
            cache_bytes = weights.take_cache(layout, blocks)
            weights.model.threads = count
            numbers = ModelNumbers(
                model_shape=shape,
                block_size=settings.block_size,
                num_blocks=blocks,
                free_memory_bytes=free,
                kv_cache_bytes=cache_bytes,
                kv_dtype=dtype_name(layout.dtype),
                weights_description=f"{settings.dtype}, kernels {shown}, {count} "
                f"thread{'s' if count > 1 else ''}{weights.unread}",
                weight_bytes=weights.nbytes,
            )
            return numbers, NativeForward(kernels, weights, shape, variant)

        worker, (numbers, forward) = start_worker("native", count, load)
        rank = RankWorker(runner=ModelRunner(forward, sampling_seed=settings.seed()))
        made = cls(numbers, rank, worker)
        made._forward = forward
        return made

    async def close(self) -> None:
        """Wait for the running step, then end the worker and the library's threads."""
        await super().close()
        await asyncio.to_thread(self._forward.close)
