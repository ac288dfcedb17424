"""The executor over several ranks: one process each, driven from a thread of this process."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch

from lmi_bench.core.errors import EngineError, InputError
from lmi_bench.engine.quantization import sum_quantized
from lmi_bench.engine.scheduling.batch import StepBatch, StepOutput
from lmi_bench.engine.torch_backend.collectives import Transport
from lmi_bench.engine.torch_backend.executor import ModelNumbers, weights_name
from lmi_bench.engine.torch_backend.launched import LaunchedRanks, launch_of
from lmi_bench.engine.torch_backend.load_settings import DEFAULT_LOAD, LoadSettings
from lmi_bench.engine.torch_backend.loading import check_degree
from lmi_bench.engine.torch_backend.precision import dtype_name
from lmi_bench.engine.torch_backend.quantization.calibration import prepare
from lmi_bench.engine.torch_backend.rank import RankWorker, Request, T
from lmi_bench.engine.torch_backend.rank_group import RankGroup, usual_transport
from lmi_bench.engine.torch_backend.static.forward import StepDifference
from lmi_bench.engine.torch_backend.weights import ModelSource, Progress, Told, read_model


class ParallelExecutor(ModelNumbers):
    """Runs steps of one model split over ranks; see `load`. Its numbers are of all ranks together:
    shared KV heads are counted on each, and memory that the ranks share once."""

    max_in_flight = 1

    def __init__(
        self, numbers: ModelNumbers, group: RankGroup | LaunchedRanks, worker: ThreadPoolExecutor
    ) -> None:
        super().__init__(**vars(numbers))
        self._group = group
        self._worker = worker
        self.transport = group.transport

    @classmethod
    def load(
        cls,
        folder: Path,
        settings: LoadSettings = DEFAULT_LOAD,
        *,
        tensor_parallel: int,
        progress: Progress | None = None,
        transport: Transport | None = None,
        told: Told | None = None,
    ) -> ParallelExecutor:
        """Start `tensor_parallel` processes, each of which loads its part of a model folder.

        transport  None: shared memory on a CPU, NCCL between GPUs

        Other arguments as for TorchExecutor. Raises CapacityError if the model cannot be split that
        way, InputError if it cannot be loaded, EngineError if a rank does not start.
        """
        if tensor_parallel < 1:
            raise InputError(f"tensor_parallel must be at least 1, got {tensor_parallel}")
        launch = launch_of(os.environ)
        if launch is None:
            _check_gpus(settings, tensor_parallel)
        source = read_model(folder)
        check_degree(source.shape.name, source.spec, tensor_parallel)
        worker = ThreadPoolExecutor(1, thread_name_prefix="lmi-bench-ranks")
        group: RankGroup | LaunchedRanks | None = None
        try:
            if launch is not None:
                group = LaunchedRanks(launch, settings.device, threads=settings.threads_in_use)
            else:
                group = RankGroup(
                    tensor_parallel,
                    transport or usual_transport(tensor_parallel, settings.device),
                    threads=max(1, settings.threads_in_use // tensor_parallel),
                    first_device=settings.first_device,
                )
            return cls._loaded(source, settings, group, worker, tensor_parallel, progress, told)
        except BaseException:
            if group is not None:
                group.close()
            worker.shutdown()
            raise

    @classmethod
    def _loaded(
        cls,
        source: ModelSource,
        settings: LoadSettings,
        group: RankGroup | LaunchedRanks,
        worker: ThreadPoolExecutor,
        degree: int,
        progress: Progress | None,
        told: Told | None,
    ) -> ParallelExecutor:
        """The executor over started ranks: each loads its part and allocates its cache."""
        precision = group.ask_first(
            partial(
                RankWorker.choose_precision,
                settings=settings,
                parameters=source.shape.params_total,
            )
        )
        prepare_here = partial(prepare, source, settings.quantize, degree=degree)
        plan = worker.submit(
            prepare_here, dtype=settings.dtype, device=settings.place, told=told
        ).result()
        load = partial(
            RankWorker.load, source=source, settings=settings, precision=precision, plan=plan
        )
        rooms = group.ask_each(load, progress)
        free = [room.free_bytes for room in rooms]
        shares_memory = settings.device == "cpu"
        each_free = min(free) // (degree if shares_memory else 1)
        blocks = settings.blocks_in(each_free, max(room.bytes_per_block for room in rooms))
        taken = group.ask_each(
            partial(
                RankWorker.take_cache,
                num_blocks=blocks,
                sampling_seed=settings.seed(),
                steps=settings.steps,
                quantize=weights_name(source.config, settings.quantize),
            )
        )
        numbers = ModelNumbers(
            model_shape=source.shape,
            block_size=settings.block_size,
            num_blocks=blocks,
            free_memory_bytes=free[0] if shares_memory else sum(free),
            kv_bytes_per_block=sum(room.bytes_per_block for room in rooms),
            kv_cache_bytes=sum(each.num_bytes for each in taken),
            kv_dtype=dtype_name(settings.cache_dtype(precision.stored)),
            weights_description=str(precision),
            weight_bytes=sum(room.weight_bytes for room in rooms),
            quantized=sum_quantized([room.quantized for room in rooms]),
            prepared=taken[0].prepared,
        )
        return cls(numbers, group, worker)

    @property
    def process_ids(self) -> tuple[int, ...]:
        """Process ids in rank order."""
        return self._group.process_ids

    async def execute(self, batch: StepBatch) -> list[StepOutput]:
        """Run one step on all ranks. Raises EngineError with the number of a failed rank."""
        return await self._ask(partial(RankWorker.run, batch=batch))

    async def score(self, given: Sequence[int], continuation: Sequence[int]) -> list[float]:
        """As TorchExecutor.score."""
        tokens = (*given, *continuation)
        return await self._ask(partial(RankWorker.score, token_ids=tokens, num_given=len(given)))

    async def compare_prepared(self) -> list[StepDifference]:
        """As TorchExecutor.compare_prepared; all ranks run the steps together."""
        return await self._ask(RankWorker.compare)

    async def _ask(self, request: Request[T]) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._worker, self._group.ask, request)

    async def time_products(self, rows: int) -> float | None:
        """None: with ranks, a product cannot be timed apart from the following sum."""
        return None

    async def lost(self) -> EngineError:
        """Return when a rank's process has ended, also between steps."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[int] = loop.create_future()

        def tell(rank: int) -> None:
            if not ended.done():
                ended.set_result(rank)

        sentinels = self._group.sentinels
        for rank, sentinel in sentinels.items():
            loop.add_reader(sentinel, tell, rank)
        try:
            rank = await ended
        finally:
            for sentinel in sentinels.values():
                loop.remove_reader(sentinel)
        return await asyncio.to_thread(self._group.end_of, rank)

    async def close(self) -> None:
        """Wait for the running step, then end the ranks."""
        await asyncio.to_thread(self._worker.shutdown)
        await asyncio.to_thread(self._group.close)


def _check_gpus(settings: LoadSettings, tensor_parallel: int) -> None:
    """Raise InputError if this machine has fewer GPUs than the copy needs."""
    if settings.device != "cuda":
        return
    here = torch.cuda.device_count()
    if here < settings.first_device + tensor_parallel:
        raise InputError(f"--tp {tensor_parallel} needs as many GPUs; {here} are here")
