"""Worker processes: one level's plan over several cores, its samples merged exactly.

One core carries some 80,000 token events a second. Beyond it the plan is split by number
(`level_parts.Share`); all workers begin at one time of CLOCK_MONOTONIC, which is one clock for the
whole machine, so their times need no conversion.

A worker and the sweep send each other messages over a pipe, between levels and a few times a second
within one. The sweep handles Ctrl-C: a worker ends when it closes the pipe.
"""

import asyncio
import contextlib
import math
import multiprocessing
import pickle
import signal
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any, Literal, Self

from lmi_bench.core.errors import InputError, LmiBenchError
from lmi_bench.core.host import usable_cores
from lmi_bench.core.level import Level
from lmi_bench.core.records import LevelRun
from lmi_bench.core.workload import LevelSpec
from lmi_bench.loadgen.http.receive import run_on_sockets
from lmi_bench.loadgen.prompts.prompts import Prompts
from lmi_bench.loadgen.run.level_parts import LevelPart, Share, merge_parts
from lmi_bench.loadgen.run.level_runner import LevelOrder, LevelRunner, Progress
from lmi_bench.loadgen.run.target import Target

MAX_CORE_SHARE = 0.6
"""Share of a core above which `auto` takes another worker: beyond some 0.8 times become late."""
START_DELAY_S = 0.05
"""Seconds from the moment when all workers are ready to the level's start, so that the message
reaches each before."""
_JOIN_S = 2.0


@dataclass(frozen=True, slots=True)
class WorkerJob:
    """What every worker sends to, and what it sends; must be picklable."""

    open_target: Callable[[], AbstractAsyncContextManager[Target]]
    prompts: Prompts


@dataclass(frozen=True, slots=True)
class Start:
    """All workers are ready: the level begins at this time of CLOCK_MONOTONIC, seconds."""

    at_s: float


@dataclass(frozen=True, slots=True)
class Stop:
    """Another worker has reached a stop rule's limit: send nothing more."""

    reason: str


class Ready:
    """The worker's connections are open and its warm-up is over."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The level cannot go on."""

    message: str


Answer = Ready | Progress | LevelPart | Failed


def _tell(pipe: Connection, answer: Answer) -> None:
    """Send `answer`; if the sweep has ended, the closed pipe ends the worker."""
    with contextlib.suppress(OSError):
        pipe.send(answer)


def worker_main(pipe: Connection, job: WorkerJob) -> None:
    """Serve levels until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(asyncio.CancelledError):
        run_on_sockets(_serve(pipe, job))


async def _serve(pipe: Connection, job: WorkerJob) -> None:
    orders: asyncio.Queue[Any] = asyncio.Queue()
    loop, serving = asyncio.get_running_loop(), asyncio.current_task()
    assert serving is not None

    def receive() -> None:
        try:
            orders.put_nowait(pipe.recv())
        except (EOFError, OSError):  # the sweep is gone
            loop.remove_reader(pipe.fileno())
            serving.cancel()

    loop.add_reader(pipe.fileno(), receive)
    async with job.open_target() as target:
        while True:
            order = await orders.get()
            if not isinstance(order, LevelOrder):
                continue  # a stop that came when the level had ended here
            try:
                await _run_level(pipe, orders, order, target, job.prompts)
            except* LmiBenchError as group:
                _tell(pipe, Failed(str(group.exceptions[0])))


async def _run_level(
    pipe: Connection,
    orders: asyncio.Queue[Any],
    order: LevelOrder,
    target: Target,
    prompts: Prompts,
) -> None:
    loop = asyncio.get_running_loop()

    stopping: asyncio.Task[None] | None = None

    async def start() -> float:
        nonlocal stopping
        _tell(pipe, Ready())
        message = await orders.get()
        stopping = asyncio.create_task(stop_when_asked())
        await asyncio.sleep(message.at_s - loop.time())
        return float(message.at_s)

    async def stop_when_asked() -> None:
        runner.stop((await orders.get()).reason)

    def on_progress(state: Progress) -> None:
        if state.state == "running":
            _tell(pipe, state)

    runner = LevelRunner(order, target, prompts, on_progress)
    try:
        part = await runner.run_part(start)
    finally:
        if stopping is not None:
            stopping.cancel()
    _tell(pipe, part)


class _Worker:
    """One process and our end of its pipe."""

    def __init__(self, process: SpawnProcess, pipe: Connection) -> None:
        self.process = process
        self.pipe = pipe
        self.answers: asyncio.Queue[Answer | None] = asyncio.Queue()

    def receive(self) -> None:
        """The worker's message; None if it has exited."""
        try:
            self.answers.put_nowait(self.pipe.recv())
        except (EOFError, OSError):
            asyncio.get_running_loop().remove_reader(self.pipe.fileno())
            self.answers.put_nowait(None)


class WorkerPool:
    """Processes that send levels together; an async context manager.

    count  workers of every level, or "auto": as many as the level before shows to be needed. A
           level has at most one a user, and auto at most one a core
    """

    def __init__(self, job: WorkerJob, count: int | Literal["auto"] = "auto") -> None:
        try:
            pickle.dumps(job)
        except (pickle.PicklingError, TypeError, AttributeError) as exc:
            raise InputError(
                f"this target cannot be handed to worker processes ({exc}): leave --workers out"
            ) from exc
        self._job = job
        self._count = count
        self._workers: list[_Worker] = []

    def count_for(self, spec: LevelSpec, finished: Sequence[Level]) -> int:
        """Workers that a level should have, after the finished levels' lines."""
        most = spec.concurrency or spec.num_requests or 2**31
        if self._count != "auto":
            return min(self._count, most)
        return min(_needed(spec, finished), usable_cores(), most)

    async def run_level(
        self,
        order: LevelOrder,
        attempt: int,
        count: int,
        on_progress: Callable[[Progress], None],
        before_start: Callable[[], Awaitable[None]] | None = None,
    ) -> LevelRun:
        """Send a level with `count` workers.

        Raises LmiBenchError when a worker dies: the level is then lost, and the pool starts over.
        """
        limit = order.rules.max_error_share
        order = replace(order, rules=replace(order.rules, watch=None))  # which no pipe can carry
        try:
            self._spawn(count)
            parts = await self._collect(self._workers[:count], order, on_progress, before_start)
        except BaseException:
            self.close()
            raise
        return merge_parts(order.spec, attempt, parts, max_error_share=limit)

    async def _collect(
        self,
        workers: Sequence[_Worker],
        order: LevelOrder,
        on_progress: Callable[[Progress], None],
        before_start: Callable[[], Awaitable[None]] | None,
    ) -> list[LevelPart]:
        count = len(workers)
        for index, worker in enumerate(workers):
            worker.pipe.send(replace(order, share=Share(index, count)))
        for worker in workers:
            await self._expect(worker, Ready)
        if before_start is not None:
            await before_start()
        start = Start(asyncio.get_running_loop().time() + START_DELAY_S)
        for worker in workers:
            worker.pipe.send(start)
        states: dict[int, Progress] = {}
        stopped = False

        async def part_of(index: int, worker: _Worker) -> LevelPart:
            nonlocal stopped
            while True:
                answer = await self._expect(worker, Progress, LevelPart)
                if isinstance(answer, LevelPart):
                    return answer
                assert isinstance(answer, Progress)
                states[index] = answer
                on_progress(_sum(states.values(), order.spec))
                if answer.stopped_by is not None and not stopped:
                    stopped = True
                    for other in workers:
                        other.pipe.send(Stop(answer.stopped_by))

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(part_of(i, worker)) for i, worker in enumerate(workers)]
        return [task.result() for task in tasks]

    async def _expect(self, worker: _Worker, *kinds: type[Answer]) -> Answer:
        answer = await worker.answers.get()
        if answer is None:
            worker.process.join(_JOIN_S)
            raise LmiBenchError(
                f"worker process {worker.process.pid} died (exit code {worker.process.exitcode}): "
                "the level in flight is lost; continue with --resume"
            )
        if isinstance(answer, Failed):
            raise LmiBenchError(answer.message)
        if not isinstance(answer, kinds):
            raise LmiBenchError(f"a worker sent {type(answer).__name__} at the wrong moment")
        return answer

    def _spawn(self, count: int) -> None:
        """Have this many processes. Spawned, not forked: a fork would copy the loop and its
        sockets."""
        context = multiprocessing.get_context("spawn")
        loop = asyncio.get_running_loop()
        while len(self._workers) < count:
            ours, theirs = context.Pipe()
            process = context.Process(target=worker_main, args=(theirs, self._job), daemon=True)
            process.start()
            theirs.close()
            worker = _Worker(process, ours)
            self._workers.append(worker)
            loop.add_reader(ours.fileno(), worker.receive)

    def close(self) -> None:
        """End the workers: close their pipes, and terminate those that do not exit."""
        workers, self._workers = self._workers, []
        for worker in workers:
            with contextlib.suppress(RuntimeError):  # the loop is closed already
                asyncio.get_running_loop().remove_reader(worker.pipe.fileno())
            worker.pipe.close()
        for worker in workers:
            worker.process.join(0.2)
            if worker.process.is_alive():
                worker.process.terminate()
                worker.process.join(_JOIN_S)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()


def _needed(spec: LevelSpec, finished: Sequence[Level]) -> int:
    """Workers that keep each core's share below the limit, going by the last level."""
    if not finished:
        return 1
    last = finished[-1]
    share, workers = last.generator.cpu_share or 0.0, last.generator.workers or 1
    before = last.load.on(spec.load.axis)
    grown = spec.load.value / before if before else 1.0
    return max(1, math.ceil(share * workers * grown / MAX_CORE_SHARE))


def _sum(states: Collection[Progress], spec: LevelSpec) -> Progress:
    """The progress of all workers together."""
    return Progress(
        level=spec.index,
        label=spec.load.name,
        state="running",
        done=sum(state.done for state in states),
        total=spec.num_requests,
        errors=sum(state.errors for state in states),
        elapsed_s=max(state.elapsed_s for state in states),
        tokens=sum(state.tokens for state in states),
    )
