"""Executors with a real model, driven from a thread: on a single device, or over ranks."""

import asyncio
import ctypes
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import torch

from lmi_bench.core.errors import EngineError, InputError
from lmi_bench.engine import quantization
from lmi_bench.engine.scheduling.batch import StepBatch, StepOutput
from lmi_bench.engine.torch_backend import collectives
from lmi_bench.engine.torch_backend.load_settings import LoadSettings, place_of
from lmi_bench.engine.torch_backend.loading import check_degree
from lmi_bench.engine.torch_backend.precision import dtype_name
from lmi_bench.engine.torch_backend.quantization.calibration import Calibration, prepare
from lmi_bench.engine.torch_backend.rank import RankGroup, RankWorker, Request, T
from lmi_bench.engine.torch_backend.static.build import PreparedSteps
from lmi_bench.engine.torch_backend.static.forward import StepDifference
from lmi_bench.engine.torch_backend.weights import ModelSource, Progress, Tell, read_model
from lmi_bench.models.shape import ModelShape

Result = TypeVar("Result")
_ENDS_S = 5.0  # in which interrupted work ends; else it is interrupted again


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
    quantized: quantization.QuantizedBytes | None = None
    prepared: PreparedSteps | None = None


R = TypeVar("R", RankWorker, RankGroup)
"""The ranks that share a model, or the one rank that has all of it."""


class RanksExecutor(ModelNumbers, Generic[R]):
    """Runs the steps of one model on its ranks, from one thread, which may not be its own."""

    max_in_flight = 1  # on a CPU, planning takes less than 1 % of a step

    def __init__(self, numbers: ModelNumbers, ranks: R, worker: ThreadPoolExecutor, owns_worker: bool = True) -> None:
        super().__init__(**vars(numbers))
        self._ranks: R = ranks
        self._worker = worker
        self._owns_worker = owns_worker

    async def execute(self, batch: StepBatch) -> list[StepOutput]:
        """Run one step in the worker thread. Raises EngineError if it fails."""
        try:
            return await self._ask(partial(RankWorker.run, batch=batch))
        except RuntimeError as exc:  # raised by torch, also when out of memory
            raise EngineError(f"step {batch.step_id} failed: {exc}") from exc

    async def score(self, given: Sequence[int], continuation: Sequence[int]) -> list[float]:
        """Natural log-probability of each token of `continuation` after `given`. Raises EngineError
        if the executor has sequences."""
        tokens = (*given, *continuation)
        return await self._ask(partial(RankWorker.score, token_ids=tokens, num_given=len(given)))

    async def compare_prepared(self) -> list[StepDifference]:
        """Compare prepared with ordinary steps, one for each shape; empty without prepared steps.
        Call only while the executor has no sequences."""
        return await self._ask(RankWorker.compare)

    async def time_products(self, rows: int) -> float | None:
        """Seconds for the matrix products of a decode step with `rows` sequences; None if they
        cannot be timed apart. Call only while no step runs."""
        return await self._ask(partial(RankWorker.time_products, rows=rows))

    async def close(self) -> None:
        """Wait for the running step, then end the thread unless it is shared, and the ranks."""
        if self._owns_worker:
            await asyncio.to_thread(self._worker.shutdown)
        await asyncio.to_thread(self._ranks.close)

    @property
    def transport(self) -> str:
        """The means of the ranks' sums; empty for a single rank."""
        return "" if isinstance(self._ranks, RankWorker) else self._ranks.transport.value

    async def _ask(self, request: Request[T]) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._worker, self._ranks.ask, request)


class TorchExecutor(RanksExecutor[RankWorker]):
    """Runs steps of one model in this process; see `load`."""

    @classmethod
    def load(
        cls,
        folder: Path,
        settings: LoadSettings,
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
        rank = RankWorker(device_number=settings.first_device, report=progress, tell=tell)
        load = partial(load_model, rank, source, settings, tell=tell)
        if beside is not None:
            # OpenMP keeps a thread pool per computing thread: use one worker for both
            return cls(finished(beside._worker, load), rank, beside._worker, owns_worker=False)
        worker, numbers = start_worker("torch", settings.threads, load)
        return cls(numbers, rank, worker)

    @property
    def step_counts(self) -> tuple[int, int] | None:
        """Numbers of prepared and other steps run; None without prepared steps."""
        static = None if self._ranks.forwards is None else self._ranks.forwards.static
        return None if static is None else (static.static_steps, static.other_steps)


class ParallelExecutor(RanksExecutor[RankGroup]):
    """Runs steps of one model split over ranks; see `load`. Its numbers are of all ranks together:
    shared KV heads are counted on each, and memory that the ranks share once."""

    @classmethod
    def load(
        cls,
        folder: Path,
        settings: LoadSettings,
        *,
        tensor_parallel: int,
        progress: Progress | None = None,
        transport: collectives.Transport | None = None,
        tell: Tell | None = None,
    ) -> "ParallelExecutor":
        """Start `tensor_parallel` processes, each of which loads its part of a model folder.

        transport  None: shared memory on a CPU, NCCL between GPUs

        Other arguments as for TorchExecutor. Raises CapacityError if the model cannot be split that
        way, InputError if it cannot be loaded, EngineError if a rank does not start.
        """
        here = torch.cuda.device_count() if settings.device == "cuda" else tensor_parallel
        if here < settings.first_device + tensor_parallel:
            raise InputError(f"--tp {tensor_parallel} needs as many GPUs; {here} are here")
        source = read_model(folder)
        plain = weights_name(source.config, settings.quantize) == str(quantization.NOT_QUANTIZED)
        strategy = settings.group_query_attention
        check_degree(source.shape.name, source.spec, tensor_parallel, strategy, plain=plain)
        with ExitStack() as after_failure:
            worker = ThreadPoolExecutor(1, thread_name_prefix="lmi-bench-ranks")
            after_failure.callback(worker.shutdown)
            group = RankGroup(
                tensor_parallel,
                transport or usual_transport(tensor_parallel, settings.device),
                threads=max(1, settings.threads // tensor_parallel),
                first_device=settings.first_device,
            )
            after_failure.callback(group.close)
            numbers = load_model(group, source, settings, progress=progress, tell=tell)
            after_failure.pop_all()
        return cls(numbers, group, worker)

    async def lost(self) -> EngineError:
        """Return when a rank's process has ended, also between steps."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[int] = loop.create_future()

        def tell(rank: int) -> None:
            if not ended.done():
                ended.set_result(rank)

        sentinels = self._ranks.sentinels
        for rank, sentinel in sentinels.items():
            loop.add_reader(sentinel, tell, rank)
        try:
            rank = await ended
        finally:
            for sentinel in sentinels.values():
                loop.remove_reader(sentinel)
        return await asyncio.to_thread(self._ranks.end_of, rank)


def usual_transport(degree: int, device: str) -> collectives.Transport:
    """NCCL between GPUs; between CPU processes shared memory if it works, else gloo."""
    if device.startswith("cuda"):
        return collectives.Transport.NCCL
    if collectives.works_here() and collectives.room_for(degree):
        return collectives.Transport.SHARED_MEMORY
    return collectives.Transport.GLOO


def weights_name(config: Mapping[str, Any], quantize: quantization.QuantizeSettings) -> str:
    """Name of the weights' quantization: as requested, or as stored in the folder."""
    stored = config.get("quantization_config") or {}
    if quantize != quantization.NOT_QUANTIZED or not stored:
        return str(quantize)
    return f"stored {stored.get('quant_method')} {stored.get('bits', '')}".strip()


def start_worker(name: str, threads: int, work: Callable[[], Result]) -> tuple[ThreadPoolExecutor, Result]:
    """A worker thread that computes with `threads` threads, and the result of its first work. The
    worker ends if that work fails."""
    worker = ThreadPoolExecutor(
        1, thread_name_prefix=f"lmi-bench-{name}", initializer=torch.set_num_threads, initargs=(threads,)
    )
    try:
        return worker, finished(worker, work)
    except BaseException:
        worker.shutdown(wait=True)
        raise


def finished(worker: ThreadPoolExecutor, work: Callable[[], Result]) -> Result:
    """The work's result. Ctrl-C, which only the main thread hears, ends the work as well: to load
    or to compile takes minutes, and an exit waits for the thread."""
    ident = ctypes.c_ulong(worker.submit(threading.get_ident).result())
    future = worker.submit(work)
    try:
        return future.result()
    except KeyboardInterrupt as exc:
        while not future.done():
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(type(exc)))
            wait([future], timeout=_ENDS_S)
        raise


def load_model(
    ranks: RankWorker | RankGroup,
    source: ModelSource,
    settings: LoadSettings,
    *,
    progress: Progress | None = None,
    tell: Tell | None = None,
) -> ModelNumbers:
    """Load the weights on all ranks and allocate the cache; returns the numbers of all together."""
    parameters = source.shape.params_total
    precision = ranks.ask_first(partial(RankWorker.choose_precision, settings=settings, parameters=parameters))
    place = place_of(settings.device, settings.first_device)
    calibration = Calibration(source, settings.quantize, settings.dtype, place, tell)
    plan = prepare(calibration, degree=ranks.degree)
    load = partial(RankWorker.load, source=source, settings=settings, precision=precision, plan=plan)
    rooms = ranks.ask_each(load, progress)
    free = [room.free_bytes for room in rooms]
    shares_memory = settings.device == "cpu"
    each_free = min(free) // (ranks.degree if shares_memory else 1)
    blocks = settings.blocks_in(each_free, max(room.bytes_per_block for room in rooms))
    name = weights_name(source.config, settings.quantize)
    taken = ranks.ask_each(partial(RankWorker.take_cache, num_blocks=blocks, settings=settings, quantize=name))
    return ModelNumbers(
        model_shape=source.shape,
        block_size=settings.block_size,
        num_blocks=blocks,
        free_memory_bytes=free[0] if shares_memory else sum(free),
        kv_cache_bytes=sum(num_bytes for num_bytes, _ in taken),
        kv_dtype=dtype_name(settings.cache_dtype(precision.stored)),
        weights_description=f"{precision}{rooms[0].unread}",
        weight_bytes=sum(room.weight_bytes for room in rooms),
        quantized=quantization.sum_quantized([room.quantized for room in rooms]),
        prepared=taken[0][1],
    )


_BYTES_A_ROUND: Final = 32 << 20
_MOST_CALLS: Final = 100


def measure_all_reduces(
    ranks: int, transport: str, sizes_bytes: Sequence[int], *, rounds: int, groups: int
) -> list[float]:
    """Seconds of one all-reduce for each size, the median over `rounds` rounds of up to 100 calls;
    of several groups side by side that of the slowest rank.

    Raises InputError if shared memory does not work here, or there are too few GPUs.
    """
    device = "cpu"
    if transport == collectives.Transport.NCCL:
        device = "cuda"
        if torch.cuda.device_count() < ranks:
            raise InputError(f"--transport nccl: {ranks} ranks need as many GPUs; {torch.cuda.device_count()} are here")
    if transport == collectives.Transport.SHARED_MEMORY:
        if not collectives.works_here():
            raise InputError("shared memory needs an x86-64 processor here: use --transport gloo")
        if not collectives.room_for(ranks):
            raise InputError(
                f"the system's shared memory (/dev/shm) has no room for {ranks} ranks: enlarge it, "
                "or use --transport gloo"
            )
    with closing(RankGroup(ranks, collectives.Transport(transport), threads=1, groups=groups)) as group:
        calls = tuple(max(1, min(_MOST_CALLS, _BYTES_A_ROUND // size)) for size in sizes_bytes)
        timing = partial(RankWorker.time_all_reduces, sizes_bytes=sizes_bytes, calls=calls, rounds=rounds)
        by_rank = group.ask_each(partial(timing, device=device))
    return [max(times_s) for times_s in zip(*by_rank, strict=True)]
