"""The ranks of a tensor-parallel group: each loads its part of a model and runs its steps.

Every rank runs the same steps over the same rows and samples the same tokens; only rank 0's answers
are used. There is one process per rank, connected to this one by a pipe. A request is a method of
`RankWorker` with its arguments, as a picklable partial. When the pipe closes, the rank ends; if a
process ends unexpectedly, the current request fails.
"""

import atexit
import os
import pickle
import select
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, Final, TypeVar

import torch

from lmi_bench.core.errors import EngineError, InputError, LmiBenchError
from lmi_bench.engine.quantization import QuantizedBytes
from lmi_bench.engine.scheduling.batch import StepBatch, StepOutput
from lmi_bench.engine.torch_backend.collectives import (
    LOOPBACK,
    Collectives,
    DistributedCollectives,
    Meeting,
    Segment,
    SegmentOwner,
    SharedMemoryCollectives,
    Transport,
)
from lmi_bench.engine.torch_backend.fork_server import fork_context
from lmi_bench.engine.torch_backend.kv_cache import KvCache, KvLayoutShape
from lmi_bench.engine.torch_backend.load_settings import LoadSettings, place_of
from lmi_bench.engine.torch_backend.measure import product_time_s
from lmi_bench.engine.torch_backend.memory import free_memory_bytes
from lmi_bench.engine.torch_backend.models.decoder import Decoder
from lmi_bench.engine.torch_backend.precision import Precision, choose_precision, time_s
from lmi_bench.engine.torch_backend.quantization.loader import QuantizePlan, build_model
from lmi_bench.engine.torch_backend.runner import ModelRunner, TorchForward
from lmi_bench.engine.torch_backend.static import build
from lmi_bench.engine.torch_backend.static.forward import StepDifference, compare_steps
from lmi_bench.engine.torch_backend.weights import ModelSource, Progress, Tell

T = TypeVar("T")
Request = Callable[["RankWorker"], T]

_REPORT_EVERY_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class RankAnswer:
    """A rank's message: a result, an error, or loading progress.

    progress  bytes read, and all bytes of this rank
    """

    result: Any = None
    error: LmiBenchError | None = None
    progress: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Room:
    """Memory after loading: free bytes on a rank's device, and bytes per block.

    weight_bytes  matrices, embeddings and head; quantized: bytes before and after quantization
    unread        as of a Decoder
    """

    free_bytes: int
    bytes_per_block: int
    weight_bytes: int = 0
    quantized: QuantizedBytes | None = None
    unread: str = ""


def run_rank(rank: int, degree: int, threads: int, device_number: int, connection: Connection) -> None:
    """Main function of a rank's process: answer requests until one is None or the pipe ends.

    device_number  number of its GPU, if it loads onto one
    """
    # the parent process handles signals to the group, and closes the pipe
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    torch.set_num_threads(threads)

    reported_s = 0.0

    def report(done_bytes: int, total_bytes: int) -> None:
        nonlocal reported_s
        now_s = time.monotonic()
        if done_bytes == total_bytes or now_s >= reported_s + _REPORT_EVERY_S:
            reported_s = now_s
            connection.send(RankAnswer(progress=(done_bytes, total_bytes)))

    progress, closed = report if rank == 0 else None, partial(is_closed, connection)
    worker = RankWorker(rank, degree, device_number, progress, orphaned=closed)
    try:
        _serve(worker, connection)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the parent process has ended
    finally:
        worker.close()


def is_closed(connection: Connection) -> bool:
    """True if the other end is closed, even if messages are still to be read: the next request
    arrives as soon as rank 0 has answered, when this rank may still be in the step before."""
    watcher = select.poll()
    watcher.register(connection, 0)  # POLLHUP is told unasked
    return bool(watcher.poll(0))


def _serve(worker: "RankWorker", connection: Connection) -> None:
    while True:
        request, answer_wanted = connection.recv()
        if request is None:
            return
        try:
            result = request(worker)
        except LmiBenchError as exc:
            connection.send(RankAnswer(error=exc))
        except Exception as exc:  # noqa: BLE001 - the parent process receives any error
            text = f"{type(exc).__name__}: {exc}"
            connection.send(RankAnswer(error=EngineError(text)))
        else:
            if answer_wanted:
                connection.send(RankAnswer(result))


@dataclass(eq=False)
class RankWorker:
    """One rank's model, cache and runner, or those of a whole model. Its public methods are the
    requests; `ask` and its like are for the only rank, which is in this process.

    device_number  this rank's GPU on its host
    report         called with loading progress: bytes read, and all bytes of this rank
    tell           called with the progress of compilation
    orphaned       True if the parent process has ended; asked while waiting in shared memory
    collectives    None: the whole model is here
    forwards       None before the cache is allocated, or if another back end has the weights
    """

    rank: int = 0
    degree: int = 1
    device_number: int = 0
    report: Progress | None = None
    tell: Tell | None = None
    orphaned: Callable[[], bool] = bool
    collectives: Collectives | None = None
    runner: ModelRunner | None = None
    forwards: build.Forwards | None = field(default=None, init=False)
    _model: Decoder = field(init=False)
    _layout: KvLayoutShape = field(init=False)

    def ask(self, request: Request[T]) -> T:
        return request(self)

    ask_first = ask

    def ask_each(self, request: Request[T], progress: Progress | None = None) -> list[T]:
        return [request(self)]

    def close(self) -> None:
        if self.collectives is not None:
            self.collectives.close()

    def join(self, where: Sequence[Segment] | Meeting) -> None:
        """Join the group of this rank: one of the segments, or of a meeting's groups."""
        if not isinstance(where, Meeting):
            group, place = divmod(self.rank, where[0].degree)
            self.collectives = SharedMemoryCollectives(where[group], place, self.orphaned)
            return
        if where.transport is Transport.NCCL:
            torch.cuda.set_device(self.device_number)
        else:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
        self.collectives = DistributedCollectives(where, self.rank, self.degree)

    def choose_precision(self, settings: LoadSettings, parameters: int) -> Precision:
        """Choose the number formats: one rank decides for all."""
        place = place_of(settings.device, self.device_number)
        return choose_precision(settings.dtype, place, parameters=parameters)

    def load(
        self, source: ModelSource, settings: LoadSettings, precision: Precision, plan: QuantizePlan | None
    ) -> Room:
        """Load this rank's part, on its own device."""
        place = place_of(settings.device, self.device_number)
        if place.type == "cuda":  # this thread's device, for kernels and captures
            torch.cuda.set_device(place)
        self._model = model = build_model(
            source.folder,
            source.spec,
            precision,
            place,
            self.report,
            collectives=self.collectives,
            plan=plan,
            strategy=settings.group_query_attention,
        )
        dtype = settings.cache_dtype(precision.stored)
        self._layout = layout = KvLayoutShape.of(model.shape, settings.block_size, dtype)
        free_bytes = free_memory_bytes(place)
        return Room(free_bytes, layout.bytes_per_block, model.held_bytes, model.quantized, model.unread)

    def take_cache(
        self, num_blocks: int, settings: LoadSettings, quantize: str
    ) -> tuple[int, build.PreparedSteps | None]:
        """Allocate the cache blocks and prepare decode steps; returns the cache's bytes, and the
        prepared steps."""
        blocks = num_blocks + (build.SPARE_BLOCKS if settings.steps.wanted else 0)
        cache = KvCache(self._layout, blocks, self._model.norm.tensors[0].device)
        eager = TorchForward(self._model, cache, num_blocks=num_blocks)
        self.forwards = build.with_prepared_steps(
            eager, settings.steps, tensor_parallel=self.degree, quantize=quantize, tell=self.tell
        )
        self.runner = ModelRunner(self.forwards.forward, sampling_seed=settings.sampling_seed)
        return cache.nbytes, self.forwards.prepared

    def run(self, batch: StepBatch) -> list[StepOutput]:
        return self._loaded().run(batch)

    def score(self, token_ids: Sequence[int], num_given: int) -> list[float]:
        """Log-probabilities of the tokens from `num_given` on."""
        return self._loaded().score(token_ids, num_given)

    def compare(self) -> list[StepDifference]:
        """Differences of prepared steps; empty without any."""
        if self.forwards is None or self.forwards.static is None:
            return []
        return compare_steps(self.forwards.static, self.forwards.eager)

    def time_products(self, rows: int) -> float | None:
        """Seconds for the matrix products of a decode step. None with ranks, where a product cannot
        be timed apart from the following sum, and if another back end has the weights."""
        if self.forwards is None or self.collectives is not None:
            return None
        return product_time_s(self.forwards.eager.model, rows)

    def time_all_reduces(
        self, sizes_bytes: Sequence[int], calls: Sequence[int], rounds: int, device: str
    ) -> list[float]:
        """Seconds per all-reduce of float32 arrays of each size: the median of `rounds` rounds of
        `calls` calls each. `device` is cpu, or cuda for the rank's own."""
        collectives = self.collectives
        assert collectives is not None, "ranks join before they are timed"
        times_s = []
        for size, count in zip(sizes_bytes, calls, strict=True):
            x = torch.ones(max(1, size // 4), device=place_of(device, self.device_number))
            sums = partial(_sum_often, collectives, x, count)
            sums()
            times_s.append(statistics.median(time_s(sums, x.device) for _ in range(rounds)) / count)
        return times_s

    def _loaded(self) -> ModelRunner:
        if self.runner is None:
            raise EngineError("no cache is allocated")
        return self.runner


def _sum_often(collectives: Collectives, x: torch.Tensor, calls: int) -> None:
    for _ in range(calls):
        collectives.all_reduce(x)


_STOP_S: Final = 5.0


class RankGroup:
    """`degree` connected rank processes."""

    def __init__(
        self, degree: int, transport: Transport, *, threads: int, first_device: int = 0, groups: int = 1
    ) -> None:
        """Start the processes and connect them.

        threads       threads per process
        first_device  GPU of rank 0; rank r has `first_device` + r
        groups        equal groups of neighbours, each with collectives of its own
        Raises EngineError if they do not start.
        """
        self.degree = degree
        self.transport = transport
        self._segments: list[SegmentOwner] = []
        self._connections: list[Connection] = []
        self._processes: list[ForkServerProcess] = []
        self._one_at_a_time = threading.Lock()
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
        until_s = time.monotonic() + _STOP_S
        left = [each for each in self._processes if self._exit_code(each, until_s) is None]
        for process in left:  # all at once; they ignore SIGTERM
            process.kill()
        for process in left:
            process.join()
        ended: list[Any] = [*self._processes, *self._connections, *self._segments]
        for each in ended:
            each.close()
        self._connections, self._processes, self._segments = [], [], []

    def _exit_code(self, process: ForkServerProcess, until_s: float) -> int | None:
        """The exit code if the process ends by then, else None. Python reads it once, from a pipe;
        of two threads that join at the same time, the later one would find 255."""
        with self._one_at_a_time:
            process.join(max(0.0, until_s - time.monotonic()))
            return process.exitcode

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
        if self.transport is Transport.SHARED_MEMORY:
            for _ in range(groups):
                self._segments.append(SegmentOwner(self.degree // groups))
            where = [owner.segment for owner in self._segments]
            self.ask_each(partial(RankWorker.join, where=where))
            for owner in self._segments:
                owner.unlink()
        else:
            with tempfile.TemporaryDirectory(prefix="lmi-bench-") as folder:
                meeting = Meeting(self.transport, str(Path(folder) / "meeting"), groups)
                self.ask_each(partial(RankWorker.join, where=meeting))

    def _collect(self, request: Request[T], answering: Sequence[int], progress: Progress | None = None) -> list[T]:
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
                if isinstance(answer.error, InputError):  # the user's
                    raise answer.error
                if answer.error is not None:
                    raise EngineError(f"rank {rank} of {self.degree}: {answer.error}")
                if answer.progress is None:
                    results[rank] = answer.result
                elif progress is not None:
                    progress(*answer.progress)
        return [results[rank] for rank in wanted]

    def end_of(self, rank: int) -> EngineError:
        """The error for a rank that has ended or is ending."""
        process = self._processes[rank]
        code = self._exit_code(process, time.monotonic() + _STOP_S)
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
