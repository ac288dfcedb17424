"""The executor over several ranks, and the processes that it starts, drives, watches and ends.

There is one process per rank, connected to this one by a pipe. A request is a method of the rank's
worker (`rank.py`), pickled. If a process ends unexpectedly, the current request fails.
"""

import asyncio
import atexit
import pickle
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, Final

import torch

from lmi_bench.core.errors import EngineError, InputError
from lmi_bench.engine.quantization import NOT_QUANTIZED
from lmi_bench.engine.torch_backend import collectives
from lmi_bench.engine.torch_backend.executor import RanksExecutor, load_model, weights_name
from lmi_bench.engine.torch_backend.fork_server import fork_context
from lmi_bench.engine.torch_backend.load_settings import DEFAULT_LOAD, LoadSettings
from lmi_bench.engine.torch_backend.loading import check_degree
from lmi_bench.engine.torch_backend.rank import RankAnswer, RankWorker, Request, T, run_rank
from lmi_bench.engine.torch_backend.weights import Progress, Tell, read_model

_STOP_S: Final = 5.0


def usual_transport(degree: int, device: str) -> collectives.Transport:
    """NCCL between GPUs; between CPU processes shared memory if it works, else gloo."""
    if device.startswith("cuda"):
        return collectives.Transport.NCCL
    if collectives.works_here() and collectives.room_for(degree):
        return collectives.Transport.SHARED_MEMORY
    return collectives.Transport.GLOO


class ExitCodes:
    """Exit codes of processes, read by one thread at a time.

    Python reads the code once, from a pipe; if two threads join at the same time, the later one
    finds it empty, and both then report 255.
    """

    def __init__(self) -> None:
        self._one_at_a_time = threading.Lock()

    def of(self, process: ForkServerProcess) -> int | None:
        """The exit code if the process ends within 5 s, else None."""
        with self._one_at_a_time:
            process.join(_STOP_S)
            return process.exitcode


class RankGroup:
    """`degree` connected rank processes."""

    def __init__(
        self,
        degree: int,
        transport: collectives.Transport,
        *,
        threads: int,
        first_device: int = 0,
        groups: int = 1,
    ) -> None:
        """Start the processes and connect them.

        threads       threads per process
        first_device  GPU of rank 0; rank r has `first_device` + r
        groups        equal groups of neighbours, each with collectives of its own
        Raises EngineError if they do not start.
        """
        if degree < 2:
            raise InputError(f"a tensor-parallel group has at least 2 ranks, got {degree}")
        self.degree = degree
        self.transport = transport
        self._segments: list[collectives.SegmentOwner] = []
        self._connections: list[Connection] = []
        self._processes: list[ForkServerProcess] = []
        self._exits = ExitCodes()
        atexit.register(self.close)  # before multiprocessing, which would wait for its processes
        try:
            self._start(threads, first_device, groups)
        except BaseException:
            self.close()
            raise

    def ask(self, request: Request[T]) -> T:
        """Send every rank a request and return rank 0's answer; the others send none."""
        return self._collect(request, (0,))[0]

    def ask_each(self, request: Request[T], progress: Progress | None = None) -> list[T]:
        """Send every rank a request and return all answers in rank order.

        progress  called with rank 0's own progress
        """
        return self._collect(request, range(self.degree), progress)

    def ask_first(self, request: Request[T]) -> T:
        """Send only rank 0 a request that needs no other rank."""
        self._send(0, pickle.dumps((request, True)))
        first: T = self._receive([0], None)[0]
        return first

    @property
    def sentinels(self) -> dict[int, int]:
        """Descriptors that become readable when a rank's process ends, by rank."""
        return {rank: process.sentinel for rank, process in enumerate(self._processes)}

    def close(self) -> None:
        """End every process, by request, else by force. May be called again."""
        atexit.unregister(self.close)
        stop = pickle.dumps((None, False))
        for connection in self._connections:
            try:
                connection.send_bytes(stop)
            except OSError:  # this rank has already ended
                continue
        for segment in self._segments:
            segment.abort()  # for a rank that waits inside a step
        for process in self._processes:
            if self._exits.of(process) is None:
                process.terminate()
            if self._exits.of(process) is None:
                process.kill()
                process.join()
            process.close()
        for connection in self._connections:
            connection.close()
        for segment in self._segments:
            segment.close()
        self._connections, self._processes, self._segments = [], [], []

    def _start(self, threads: int, first_device: int, groups: int) -> None:
        context = fork_context()
        for rank in range(self.degree):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=run_rank,
                args=(rank, self.degree, threads, first_device + rank, theirs),
                name=f"lmi-bench-rank-{rank}",
                daemon=True,
            )
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)
        if self.transport is collectives.Transport.SHARED_MEMORY:
            for _ in range(groups):
                self._segments.append(collectives.SegmentOwner(self.degree // groups))
            where = [owner.segment for owner in self._segments]
            self.ask_each(partial(RankWorker.join, where=where))
            for owner in self._segments:
                owner.unlink()
        else:
            with tempfile.TemporaryDirectory(prefix="lmi-bench-") as folder:
                meeting = collectives.Meeting(self.transport, str(Path(folder) / "meeting"), groups)
                self.ask_each(partial(RankWorker.join, where=meeting))

    def _collect(
        self, request: Request[T], answering: Sequence[int], progress: Progress | None = None
    ) -> list[T]:
        messages = {wanted: pickle.dumps((request, wanted)) for wanted in (True, False)}
        for rank in range(self.degree):
            self._send(rank, messages[rank in answering])
        return self._receive(answering, progress)

    def _send(self, rank: int, message: bytes) -> None:
        if not self._processes:
            raise EngineError("the tensor-parallel group has been closed")
        try:
            self._connections[rank].send_bytes(message)
        except OSError as exc:
            raise self.end_of(rank) from exc

    def _receive(self, wanted: Sequence[int], progress: Progress | None) -> list[Any]:
        """The answers of the wanted ranks; raises at any rank's error or end."""
        results: dict[int, Any] = {}
        rank_of: dict[object, int] = {c: rank for rank, c in enumerate(self._connections)}
        while len(results) < len(wanted):
            # a rank that ended has closed its pipe after its last message
            for ready in wait(list(self._connections)):
                rank = rank_of[ready]
                try:
                    answer: RankAnswer = self._connections[rank].recv()
                except (EOFError, OSError):
                    raise self.end_of(rank) from None
                answer.check(rank, self.degree)
                if answer.progress is None:
                    results[rank] = answer.result
                elif progress is not None:
                    progress(*answer.progress)
        return [results[rank] for rank in wanted]

    def end_of(self, rank: int) -> EngineError:
        """The error for a rank that has ended or is ending."""
        process = self._processes[rank]
        code = self._exits.of(process)
        if code is None:
            how = "closed its pipe"
        elif code < 0:
            how = f"was killed by signal {-code}"
        else:
            how = f"ended with exit code {code}"
        return EngineError(
            f"rank {rank} of {self.degree} (process {process.pid}) {how}: the engine cannot go on "
            "without it, start it again"
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
