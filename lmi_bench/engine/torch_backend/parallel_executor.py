"""The executor over several ranks, which each have a process of their own."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Final

import torch

from lmi_bench.core.errors import EngineError, InputError
from lmi_bench.engine.quantization import NOT_QUANTIZED
from lmi_bench.engine.torch_backend import collectives
from lmi_bench.engine.torch_backend.executor import RanksExecutor, load_model, weights_name
from lmi_bench.engine.torch_backend.load_settings import DEFAULT_LOAD, LoadSettings
from lmi_bench.engine.torch_backend.loading import check_degree
from lmi_bench.engine.torch_backend.rank import RankGroup, RankWorker
from lmi_bench.engine.torch_backend.weights import Progress, Tell, read_model


def usual_transport(degree: int, device: str) -> collectives.Transport:
    """NCCL between GPUs; between CPU processes shared memory if it works, else gloo."""
    if device.startswith("cuda"):
        return collectives.Transport.NCCL
    if collectives.works_here() and collectives.room_for(degree):
        return collectives.Transport.SHARED_MEMORY
    return collectives.Transport.GLOO


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
            raise InputError(
                f"--transport nccl: {ranks} ranks need as many GPUs; "
                f"{torch.cuda.device_count()} are here"
            )
    if transport == collectives.Transport.SHARED_MEMORY:
        if not collectives.works_here():
            raise InputError("shared memory needs an x86-64 processor here: use --transport gloo")
        if not collectives.room_for(ranks):
            raise InputError(
                f"the system's shared memory (/dev/shm) has no room for {ranks} ranks: enlarge it, "
                "or use --transport gloo"
            )
    with closing(
        RankGroup(ranks, collectives.Transport(transport), threads=1, groups=groups)
    ) as group:
        calls = tuple(max(1, min(_MOST_CALLS, _BYTES_A_ROUND // size)) for size in sizes_bytes)
        sizes = tuple(sizes_bytes)
        timing = partial(RankWorker.time_all_reduces, sizes_bytes=sizes, calls=calls)
        by_rank = group.ask_each(partial(timing, rounds=rounds, device=device))
    return [max(times_s) for times_s in zip(*by_rank, strict=True)]


class ParallelExecutor(RanksExecutor[RankGroup]):
    """Runs steps of one model split over ranks; see `load`. Its numbers are of all ranks together:
    shared KV heads are counted on each, and memory that the ranks share once."""

    @classmethod
    def load(
        cls,
        folder: Path,
        settings: LoadSettings = DEFAULT_LOAD,
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
        _check_gpus(settings, tensor_parallel)
        source = read_model(folder)
        plain = weights_name(source.config, settings.quantize) == str(NOT_QUANTIZED)
        strategy = settings.group_query_attention
        check_degree(source.shape.name, source.spec, tensor_parallel, strategy, plain=plain)
        with ExitStack() as after_failure:
            worker = ThreadPoolExecutor(1, thread_name_prefix="lmi-bench-ranks")
            after_failure.callback(worker.shutdown)
            group = RankGroup(
                tensor_parallel,
                transport or usual_transport(tensor_parallel, settings.device),
                threads=max(1, settings.threads_in_use // tensor_parallel),
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


def _check_gpus(settings: LoadSettings, tensor_parallel: int) -> None:
    """Raise InputError if this machine has fewer GPUs than the copy needs."""
    if settings.device != "cuda":
        return
    here = torch.cuda.device_count()
    if here < settings.first_device + tensor_parallel:
        raise InputError(f"--tp {tensor_parallel} needs as many GPUs; {here} are here")
