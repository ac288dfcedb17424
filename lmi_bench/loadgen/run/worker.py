"""A worker process: sends its share of each level.

It talks with the sweep over a pipe, between levels and a few times a second within one. Ctrl-C is
the sweep's task: the worker ends on its message or when the pipe closes.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from lmi_bench.core.errors import LmiBenchError
from lmi_bench.loadgen.http.receive import run_on_sockets
from lmi_bench.loadgen.prompts.prompts import Prompts
from lmi_bench.loadgen.run.level_parts import LevelPart
from lmi_bench.loadgen.run.level_runner import LevelOrder, LevelRunner, Progress
from lmi_bench.loadgen.run.target import Target


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
    """Send `answer`; a sweep that has gone hears nothing, and the closed pipe ends the worker."""
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

    obeying: asyncio.Task[None] | None = None

    async def start() -> float:
        nonlocal obeying
        _tell(pipe, Ready())
        message = await orders.get()
        obeying = asyncio.create_task(obey())
        await asyncio.sleep(message.at_s - loop.time())
        return float(message.at_s)

    async def obey() -> None:
        runner.stop((await orders.get()).reason)

    def on_progress(state: Progress) -> None:
        if state.state == "running":
            _tell(pipe, state)

    runner = LevelRunner(order, target, prompts, on_progress)
    try:
        part = await runner.run_part(start)
    finally:
        if obeying is not None:
            obeying.cancel()
    _tell(pipe, part)
