"""The executor with a real model: one device, driven from its own thread."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from lmi_bench.core.errors import EngineError, LmiBenchError
from lmi_bench.engine.quantization import NOT_QUANTIZED, QuantizedBytes, QuantizeSettings
from lmi_bench.engine.scheduling.batch import StepBatch, StepOutput
from lmi_bench.engine.torch_backend.kv_cache import KvLayoutShape
from lmi_bench.engine.torch_backend.load_settings import DEFAULT_LOAD, LoadSettings
from lmi_bench.engine.torch_backend.measure import product_time_s
from lmi_bench.engine.torch_backend.memory import free_memory_bytes
from lmi_bench.engine.torch_backend.precision import choose_precision, dtype_name
from lmi_bench.engine.torch_backend.quantization.calibration import Calibration, prepare
from lmi_bench.engine.torch_backend.quantization.loader import build_model
from lmi_bench.engine.torch_backend.runner import ModelRunner
from lmi_bench.engine.torch_backend.static.build import Forwards, PreparedSteps, make_forwards
from lmi_bench.engine.torch_backend.static.forward import StepDifference
from lmi_bench.engine.torch_backend.weights import ModelSource, Progress, Tell, read_model
from lmi_bench.models.shape import ModelShape

Result = TypeVar("Result")


@dataclass(kw_only=True)
class ModelNumbers:
    """What an executor of this back end says about its model:

    model_shape         the model, named after its folder
    num_blocks          cache blocks of `block_size` tokens
    free_memory_bytes   free after loading the weights, before allocating the cache
    kv_cache_bytes      size of all blocks
    kv_dtype            number format of the cache
    weights_description formats of weights and arithmetic, for the start-up line
    weight_bytes        matrices, embeddings and head as stored in memory
    quantized           bytes before and after quantization; None without quantization
    prepared            result of preparing decode steps; None without prepared steps
    """

    model_shape: ModelShape
    block_size: int
    num_blocks: int
    free_memory_bytes: int
    kv_cache_bytes: int
    kv_dtype: str
    weights_description: str
    weight_bytes: int
    quantized: QuantizedBytes | None = None
    prepared: PreparedSteps | None = None


@dataclass(frozen=True, slots=True)
class Loaded:
    """Result of loading: the runner and the numbers to show.

    forwards  None if another back end has the weights
    """

    runner: ModelRunner
    numbers: ModelNumbers
    forwards: Forwards | None = None


class TorchExecutor(ModelNumbers):
    """Runs steps of one model; see `load`."""

    max_in_flight = 1  # on a CPU, planning takes less than 1 % of a step

    def __init__(
        self, loaded: Loaded, worker: ThreadPoolExecutor, *, owns_worker: bool = True
    ) -> None:
        super().__init__(**vars(loaded.numbers))
        self._runner = loaded.runner
        self._worker = worker
        self._owns_worker = owns_worker
        self._forwards = loaded.forwards

    @classmethod
    def load(
        cls,
        folder: Path,
        settings: LoadSettings = DEFAULT_LOAD,
        *,
        beside: "TorchExecutor | None" = None,
        progress: Progress | None = None,
        tell: Tell | None = None,
    ) -> "TorchExecutor":
        """Load a Hugging Face folder (config.json and safetensors) and allocate its cache.

        beside    executor whose thread is shared, and ended by its close: two thread pools would
                  slow each other down
        progress  called with (bytes read, bytes of all files) while loading, in the worker thread
        tell      called with the progress of calibration or compilation, in the worker thread
        Raises InputError for an unusable folder or setting, CapacityError if no block fits.
        """
        source = read_model(folder)
        load = partial(_load, source, settings, progress, tell)
        if beside is not None:
            # OpenMP keeps a thread pool per computing thread: use one worker for both
            loaded = beside._worker.submit(load).result()
            worker = beside._worker
        else:
            worker, loaded = start_worker("torch", settings.threads_in_use, load)
        return cls(loaded, worker, owns_worker=beside is None)

    async def execute(self, batch: StepBatch) -> list[StepOutput]:
        """Run one step in the worker thread. Raises EngineError if it fails."""
        try:
            return await self._in_worker(self._runner.run, batch)
        except LmiBenchError:
            raise
        except RuntimeError as exc:  # raised by torch, also when out of memory
            raise EngineError(f"step {batch.step_id} failed: {exc}") from exc

    async def score(self, given: Sequence[int], continuation: Sequence[int]) -> list[float]:
        """Natural log-probability of each token of `continuation` after `given`. Raises EngineError
        if the executor has sequences."""
        return await self._in_worker(self._runner.score, [*given, *continuation], len(given))

    async def compare_prepared(self) -> list[StepDifference]:
        """Compare prepared with ordinary steps, one for each shape; empty without prepared steps.
        Call only while the executor has no sequences."""
        return [] if self._forwards is None else await self._in_worker(self._forwards.compare)

    async def time_products(self, rows: int) -> float | None:
        """Seconds for the matrix products of a decode step with `rows` sequences; None if another
        back end has the weights. Call only while no step runs."""
        if self._forwards is None:
            return None
        return await self._in_worker(product_time_s, self._forwards.eager.model, rows)

    async def _in_worker(self, work: Callable[..., Result], *args: object) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._worker, work, *args)

    @property
    def step_counts(self) -> tuple[int, int] | None:
        """Numbers of prepared and other steps run; None without prepared steps."""
        static = None if self._forwards is None else self._forwards.static
        return None if static is None else (static.static_steps, static.other_steps)

    async def close(self) -> None:
        """Wait for the running step, then end the worker thread unless it is shared."""
        if self._owns_worker:
            await asyncio.to_thread(self._worker.shutdown)


def weights_name(config: Mapping[str, Any], quantize: QuantizeSettings) -> str:
    """Name of the weights' quantization: as requested, or as stored in the folder."""
    stored = config.get("quantization_config") or {}
    if quantize != NOT_QUANTIZED or not stored:
        return str(quantize)
    return f"stored {stored.get('quant_method')} {stored.get('bits', '')}".strip()


def start_worker(
    name: str, threads: int, work: Callable[[], Result]
) -> tuple[ThreadPoolExecutor, Result]:
    """A worker thread that computes with `threads` threads, and the result of its first work. The
    worker ends if that work fails."""
    worker = ThreadPoolExecutor(
        1,
        thread_name_prefix=f"lmi-bench-{name}",
        initializer=torch.set_num_threads,
        initargs=(threads,),
    )
    try:
        return worker, worker.submit(work).result()
    except BaseException:
        worker.shutdown(wait=True)
        raise


def _load(
    source: ModelSource, settings: LoadSettings, progress: Progress | None, tell: Tell | None
) -> Loaded:
    """Load weights and allocate the cache, in the thread that will compute."""
    place, shape = settings.place, source.shape
    if place.type == "cuda":  # this thread's device, for kernels and captures
        torch.cuda.set_device(place)
    precision = choose_precision(settings.dtype, place, parameters=shape.params_total)
    plan = prepare(Calibration(source, settings.quantize, settings.dtype, place, tell))
    model = build_model(source.folder, source.spec, precision, place, progress, plan=plan)
    layout = KvLayoutShape.of(shape, settings.block_size, settings.cache_dtype(precision.stored))
    free = free_memory_bytes(place)
    forwards = make_forwards(
        model,
        layout,
        settings.blocks_in(free, layout.bytes_per_block),
        place,
        precision,
        settings.steps,
        quantize=weights_name(source.config, settings.quantize),
        tell=tell,
    )
    numbers = ModelNumbers(
        model_shape=shape,
        block_size=settings.block_size,
        num_blocks=forwards.eager.num_blocks,
        free_memory_bytes=free,
        kv_cache_bytes=forwards.eager.cache.nbytes,
        kv_dtype=dtype_name(layout.dtype),
        weights_description=str(precision),
        weight_bytes=model.held_bytes,
        quantized=model.quantized,
        prepared=forwards.prepared,
    )
    runner = ModelRunner(forwards.forward, sampling_seed=settings.seed())
    return Loaded(runner, numbers, forwards)
