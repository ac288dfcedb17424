"""Conversations: a turn is due a pause after the answer before it, never sooner.

Closed loop: each user holds one conversation after another. Open loop: conversations begin when
they are due, however many are in progress. Latency counts from a turn's due time; the wait that a
cap caused is recorded separately.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from lmi_bench.core.exchange import Exchange
from lmi_bench.core.workload import PlannedRequest
from lmi_bench.loadgen.prompts.dialogues import Dialogue
from lmi_bench.loadgen.run.loops import stopped_before
from lmi_bench.loadgen.run.sender import Measured, Sender, StallGuard
from lmi_bench.loadgen.run.target import Target


@dataclass(frozen=True, slots=True)
class PlannedSession:
    """A conversation that may begin `arrival_s` after the level's start."""

    begin: Callable[[], Dialogue]
    arrival_s: float = 0.0


class SessionLoop:
    """The conversations of one level.

    max_in_flight  maximum requests in flight; None: no limit
    duration_s  turns due later than this are not sent
    on_ended    called as each request ends; False: send no more
    """

    def __init__(
        self,
        target: Target,
        *,
        start_s: float,
        timeout_s: float | None,
        guard: StallGuard | None = None,
        max_in_flight: int | None = None,
        duration_s: float | None = None,
        on_ended: Callable[[Measured], bool] = lambda _: True,
    ) -> None:
        self._target = target
        self._sender = Sender(
            self._send, timeout_s=timeout_s, guard=guard, max_in_flight=max_in_flight
        )
        self._replies: dict[int, Exchange] = {}
        self._start_s = start_s
        self._end_s = float("inf") if duration_s is None else start_s + duration_s
        self._on_ended = on_ended
        self._stop = asyncio.Event()
        self._ended: list[Measured] = []

    def stop(self) -> None:
        """Send nothing more."""
        self._stop.set()

    async def run_closed(
        self,
        sessions: Iterable[PlannedSession],
        users: int,
        *,
        first_s: float = 0.0,
        spacing_s: float = 0.0,
    ) -> list[Measured]:
        """Let each user hold one conversation after another.

        first_s, spacing_s  when the first user begins after the level's start, and each next one
        """
        supply = iter(sessions)

        async def user(number: int) -> None:
            due_s = self._start_s + first_s + number * spacing_s
            while not self._stop.is_set() and due_s < self._end_s:
                planned = next(supply, None)
                if planned is None:
                    return
                due_s = await self._converse(planned.begin(), due_s)

        async with asyncio.TaskGroup() as group:
            for number in range(users):
                group.create_task(user(number))
        return self._in_order()

    async def run_open(
        self, sessions: Iterable[PlannedSession], *, max_sessions: int | None = None
    ) -> list[Measured]:
        """Begin each conversation when it is due, at most `max_sessions` at once."""
        loop = asyncio.get_running_loop()
        gate = contextlib.nullcontext() if max_sessions is None else asyncio.Semaphore(max_sessions)

        async def one(planned: PlannedSession, due_s: float) -> None:
            async with gate:
                await self._converse(planned.begin(), due_s, held_s=max(0.0, loop.time() - due_s))

        async with asyncio.TaskGroup() as group:
            for planned in sessions:
                due_s = self._start_s + planned.arrival_s
                if await stopped_before(self._stop, due_s - loop.time()):
                    break
                group.create_task(one(planned, due_s))
        return self._in_order()

    async def _converse(self, dialogue: Dialogue, due_s: float, *, held_s: float = 0.0) -> float:
        """One conversation, to its end or first failure; returns when its user is free again."""
        loop = asyncio.get_running_loop()
        reply: Exchange | None = None
        while due_s < self._end_s:
            if await stopped_before(self._stop, due_s - loop.time()):
                break
            request = dialogue.next(reply)
            if request is None:
                break
            measured = await self._sender.measure(request, due_s, self._stop.is_set)
            if measured is None:
                break
            measured.add_held(held_s)
            held_s = 0.0
            self._ended.append(measured)
            if not self._on_ended(measured):
                self._stop.set()
            reply = self._replies.pop(request.request_id, None)
            due_s = measured.ended_s
            if not measured.record().ok:
                break
            due_s += dialogue.pause_s
        return due_s

    async def _send(self, request: PlannedRequest) -> Exchange:
        """Send a request and keep its answer, which the next turn needs."""
        exchange = await self._target.send(request)
        self._replies[request.request_id] = exchange
        return exchange

    def _in_order(self) -> list[Measured]:
        return sorted(self._ended, key=lambda measured: measured.request.request_id)
