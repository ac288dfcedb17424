"""One process of a tensor-parallel group: join the others, load its part, run steps.

Every rank runs the same steps over the same rows and samples the same tokens; only rank 0's answers
are used. Requests come over a pipe; when it closes, the rank ends.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, Protocol

import torch

from lmi_bench.core.errors import EngineError, LmiBenchError
from lmi_bench.engine.quantization import QuantizedBytes
from lmi_bench.engine.scheduling.batch import StepBatch, StepOutput
from lmi_bench.engine.torch_backend.collectives import (
    Collectives,
    DistributedCollectives,
    Meeting,
    Segment,
    SharedMemoryCollectives,
    Transport,
    loopback_interface,
)
from lmi_bench.engine.torch_backend.kv_cache import KvCache, KvLayoutShape
from lmi_bench.engine.torch_backend.memory import free_memory_bytes
from lmi_bench.engine.torch_backend.models.decoder import Decoder
from lmi_bench.engine.torch_backend.precision import Precision, choose_precision
from lmi_bench.engine.torch_backend.quantization.loader import QuantizePlan, build_model
from lmi_bench.engine.torch_backend.runner import Forward, ModelRunner, TorchForward
from lmi_bench.engine.torch_backend.static.build import (
    NOTHING_PREPARED,
    SPARE_BLOCKS,
    PreparedSteps,
    StepSettings,
    with_prepared_steps,
)
from lmi_bench.engine.torch_backend.static.forward import (
    StaticForward,
    StepDifference,
    compare_steps,
)
from lmi_bench.models.spec import DecoderSpec

_REPORT_EVERY_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class Answer:
    """A rank's message: a result, an error, or loading progress.

    progress  bytes read, and all bytes of this rank
    """

    result: Any = None
    error: LmiBenchError | None = None
    progress: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Join:
    """Connect to the other ranks."""

    where: Segment | Meeting


@dataclass(frozen=True, slots=True)
class ChoosePrecision:
    """Choose the number formats: one rank decides for all."""

    dtype: str
    device: str
    parameters: int


@dataclass(frozen=True, slots=True)
class LoadWeights:
    """Load this rank's part. `device` is cpu, or cuda for the rank's own device.

    cache_dtype  None: the weights' format
    """

    folder: Path
    spec: DecoderSpec
    precision: Precision
    device: str
    block_size: int
    cache_dtype: torch.dtype | None
    plan: QuantizePlan | None = None


@dataclass(frozen=True, slots=True)
class Room:
    """Memory after loading: free bytes on a rank's device, and bytes per block.

    weight_bytes  matrices, embeddings and head; quantized: bytes before and after quantization
    """

    free_bytes: int
    bytes_per_block: int
    weight_bytes: int = 0
    quantized: QuantizedBytes | None = None


@dataclass(frozen=True, slots=True)
class TakeCache:
    """Allocate the cache blocks and prepare decode steps; the answer is a TakenCache."""

    num_blocks: int
    sampling_seed: int
    steps: StepSettings = NOTHING_PREPARED
    quantize: str = "none"


@dataclass(frozen=True, slots=True)
class TakenCache:
    """Bytes of a rank's cache, and the result of preparing its decode steps."""

    num_bytes: int
    prepared: PreparedSteps | None


@dataclass(frozen=True, slots=True)
class CompareSteps:
    """Compare prepared with eager steps; the answer is a list of StepDifference."""


@dataclass(frozen=True, slots=True)
class RunStep:
    """Run a step; the answer is its outputs."""

    batch: StepBatch


@dataclass(frozen=True, slots=True)
class Score:
    """Log-probabilities of the tokens from `num_given` on; the answer is a list of them."""

    token_ids: tuple[int, ...]
    num_given: int


@dataclass(frozen=True, slots=True)
class TimeAllReduce:
    """Time all-reduces of float32 arrays; the answer is seconds per call for each size, the median
    of `rounds` rounds of `calls` calls each. `device` as in LoadWeights."""

    sizes_bytes: tuple[int, ...]
    calls: tuple[int, ...]
    rounds: int
    device: str = "cpu"


@dataclass(frozen=True, slots=True)
class Stop:
    """End the rank; there is no answer."""


def run_rank(
    rank: int, degree: int, threads: int, device_number: int, connection: Connection
) -> None:
    """Main function of a rank's process: answer requests until `Stop` or the end of the pipe.

    device_number  number of its GPU, if it loads onto one
    """
    # the parent process handles signals to the group, and closes the pipe
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    torch.set_num_threads(threads)
    worker = RankWorker(rank, degree, connection, device_number=device_number)
    try:
        worker.serve()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the parent process has ended
    finally:
        worker.close()


class Line(Protocol):
    """A rank's connection to its parent process."""

    def send(self, answer: Answer, /) -> None: ...

    def recv(self) -> Any: ...

    def poll(self) -> bool: ...


class RankWorker:
    """One rank's model, cache and runner; handles requests."""

    def __init__(
        self, rank: int, degree: int, connection: Line, *, device_number: int | None = None
    ) -> None:
        """device_number  this rank's GPU on its host; None: the rank's number"""
        self._rank = rank
        self._degree = degree
        self._connection = connection
        self._device_number = rank if device_number is None else device_number
        self._collectives: Collectives | None = None
        self._device = torch.device("cpu")
        self._model: Decoder | None = None
        self._layout: KvLayoutShape | None = None
        self._precision: Precision | None = None
        self._runner: ModelRunner | None = None
        self._compare: Callable[[], list[StepDifference]] = list
        self._reported_s = 0.0

    def serve(self) -> None:
        """Handle requests until `Stop`."""
        while True:
            request, answer_wanted = self._connection.recv()
            if isinstance(request, Stop):
                return
            try:
                result = self.do(request)
            except LmiBenchError as exc:
                self._connection.send(Answer(error=exc))
            except Exception as exc:  # noqa: BLE001 - the parent process receives any error
                text = f"{type(exc).__name__}: {exc}"
                self._connection.send(Answer(error=EngineError(text)))
            else:
                if answer_wanted:
                    self._connection.send(Answer(result))

    def close(self) -> None:
        """Release the connection between the ranks."""
        if self._collectives is not None:
            self._collectives.close()

    def use(self, collectives: Collectives) -> None:
        """Use these collectives to reach the other ranks."""
        self._collectives = collectives

    def do(self, request: object) -> Any:
        """The answer to a request."""
        match request:
            case RunStep(batch):
                return self._run(batch)
            case Score(token_ids, num_given):
                return self._loaded().score(token_ids, num_given)
            case Join(where):
                return self._join(where)
            case ChoosePrecision():
                return self._choose(request)
            case LoadWeights():
                return self._load(request)
            case TakeCache():
                return self._take_cache(request)
            case CompareSteps():
                return self._compare()
            case TimeAllReduce():
                return self._time(request)
        raise EngineError(f"unknown request to a rank: {type(request).__name__}")

    def _join(self, where: Segment | Meeting) -> None:
        if isinstance(where, Segment):
            # nothing is sent during a step: readable input means that the pipe is closed
            self._collectives = SharedMemoryCollectives(where, self._rank, self._connection.poll)
            return
        if where.transport is Transport.NCCL:
            torch.cuda.set_device(self._device_number)
        else:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback_interface())
        self._collectives = DistributedCollectives(where, self._rank, self._degree)

    def _choose(self, request: ChoosePrecision) -> Precision:
        place = self._place(request.device)
        return choose_precision(
            request.dtype,
            place,
            parameters=request.parameters,
            free_bytes=free_memory_bytes(place),
        )

    def _load(self, request: LoadWeights) -> Room:
        self._device = self._place(request.device)
        self._precision = request.precision
        self._model = build_model(
            request.folder,
            request.spec,
            request.precision,
            self._device,
            self._report if self._rank == 0 else None,
            collectives=self._joined(),
            plan=request.plan,
        )
        self._layout = KvLayoutShape.of(
            self._model.shape,
            request.block_size,
            request.cache_dtype or request.precision.stored,
        )
        return Room(
            free_memory_bytes(self._device),
            self._layout.bytes_per_block,
            self._model.held_bytes,
            self._model.quantized,
        )

    def _report(self, done_bytes: int, total_bytes: int) -> None:
        now_s = time.monotonic()
        if done_bytes == total_bytes or now_s >= self._reported_s + _REPORT_EVERY_S:
            self._reported_s = now_s
            self._connection.send(Answer(progress=(done_bytes, total_bytes)))

    def _take_cache(self, request: TakeCache) -> TakenCache:
        if self._model is None or self._layout is None or self._precision is None:
            raise EngineError("no weights are loaded")
        steps = request.steps
        spare = SPARE_BLOCKS if steps.wanted else 0
        cache = KvCache(self._layout, request.num_blocks + spare, self._device)
        eager = TorchForward(self._model, cache, self._precision, num_blocks=request.num_blocks)
        forward: Forward = eager
        prepared = None
        if steps.wanted:
            forward, prepared = with_prepared_steps(
                eager,
                self._model,
                cache,
                self._precision,
                steps,
                tensor_parallel=self._degree,
                quantize=request.quantize,
            )
        self._runner = ModelRunner(forward, sampling_seed=request.sampling_seed)
        if isinstance(forward, StaticForward):
            self._compare = partial(compare_steps, forward, eager)
        return TakenCache(cache.nbytes, prepared)

    def _run(self, batch: StepBatch) -> list[StepOutput]:
        return self._loaded().run(batch)

    def _time(self, request: TimeAllReduce) -> list[float]:
        collectives = self._joined()
        times_s = []
        for size, calls in zip(request.sizes_bytes, request.calls, strict=True):
            x = torch.ones(max(1, size // 4), device=self._place(request.device))
            collectives.all_reduce(x)
            rounds_s = [_time_calls(collectives, x, calls) for _ in range(request.rounds)]
            times_s.append(sorted(rounds_s)[len(rounds_s) // 2])
        return times_s

    def _place(self, device: str) -> torch.device:
        return (
            torch.device("cuda", self._device_number) if device == "cuda" else torch.device(device)
        )

    def _loaded(self) -> ModelRunner:
        if self._runner is None:
            raise EngineError("no cache is allocated")
        return self._runner

    def _joined(self) -> Collectives:
        if self._collectives is None:
            raise EngineError("this rank is not connected to the others")
        return self._collectives


def _time_calls(collectives: Collectives, x: torch.Tensor, calls: int) -> float:
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
    start_s = time.perf_counter()
    for _ in range(calls):
        collectives.all_reduce(x)
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
    return (time.perf_counter() - start_s) / calls
