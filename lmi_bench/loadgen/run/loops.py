"""The closed loop and the open loop of a level, of single requests and of conversations.

Closed loop: each user sends its next request, or begins its next conversation, when the one before
has ended; the time from then to the send is the generator's own delay, which the self-check
reports. Open loop: each begins when it is due, however slow the answers are. Latency counts from
the due time, so that a generator or a server that falls behind cannot hide the delay that it caused
(coordinated omission). A turn of a conversation is due a pause after the answer before it, never
sooner; the wait that a limit caused is recorded separately.
"""

import asyncio
import contextlib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from lmi_bench.core.workload import ClosedLoop, PlannedRequest
from lmi_bench.loadgen.prompts.dialogues import Following, Talk
from lmi_bench.loadgen.run.sender import Measured, Sender


async def run_closed_loop(
    sender: Sender,
    users: ClosedLoop,
    request_at: Callable[[int], PlannedRequest],
    *,
    start_s: float,
    spacing_s: float = 0.0,
    on_ended: Callable[[Measured], bool] = lambda _: True,
) -> list[Measured]:
    """Run the users until their requests are done; returns them in request order.

    spacing_s   seconds between the first sends of neighbouring users: a burst of all at once
                measures the server's accept queue
    on_ended    called as each request ends; False: send no more, let the rest finish
    """
    loop = asyncio.get_running_loop()
    ended: list[Measured] = []

    async def user(number: int) -> None:
        due_s = start_s + number * spacing_s
        delay_s = due_s - loop.time()
        if delay_s > 0:
            await asyncio.sleep(delay_s)
        while (index := users.next_index(loop.time() - start_s)) is not None:
            measured = await sender.measure(request_at(index), due_s, lambda: users.is_stopped)
            if measured is None:
                return
            ended.append(measured)
            if not on_ended(measured):
                users.stop()
            due_s = measured.ended_s

    async with asyncio.TaskGroup() as group:
        busy = users.concurrency if users.num_requests is None else min(users.concurrency, users.num_requests)
        for number in range(busy):  # those beyond would find no request left
            group.create_task(user(number))
    return sorted(ended, key=lambda measured: measured.request.request_id)


async def run_open_loop(
    sender: Sender,
    plan: Iterable[PlannedRequest],
    *,
    start_s: float,
    on_ended: Callable[[Measured], bool] = lambda _: True,
    stop: asyncio.Event | None = None,
) -> list[Measured]:
    """Send the plan's requests at `start_s` + their arrival; returns those sent, in its order.

    Due times are absolute, so one late send does not push the next.

    plan      in order of arrival; read lazily
    on_ended  called as each request ends; False: send no more, let those in flight finish
    stop      set from outside: the same
    """
    loop = asyncio.get_running_loop()
    stop = stop or asyncio.Event()

    async def one(request: PlannedRequest, due_s: float) -> Measured | None:
        measured = await sender.measure(request, due_s, stop.is_set)
        if measured is not None and not on_ended(measured):
            stop.set()
        return measured

    tasks: list[asyncio.Task[Measured | None]] = []
    async with asyncio.TaskGroup() as group:
        for request in plan:
            due_s = start_s + request.arrival_s
            if await stopped_before(stop, due_s - loop.time()):
                break
            tasks.append(group.create_task(one(request, due_s)))
    return [measured for task in tasks if (measured := task.result()) is not None]


async def stopped_before(stop: asyncio.Event, delay_s: float) -> bool:
    """Wait `delay_s`, or until the level is stopped; True if it was stopped."""
    if delay_s <= 0:
        await asyncio.sleep(0)
        return stop.is_set()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(delay_s):
            await stop.wait()
    return stop.is_set()


Begin = Callable[[], Talk]  # begins a conversation


@dataclass(eq=False)
class SessionLoop:
    """The conversations of one level.

    sender      decodes each answer at once, since the next turn needs it
    duration_s  turns due later than this are not sent
    on_ended    called as each request ends; False: send no more
    """

    sender: Sender
    start_s: float
    duration_s: float | None
    on_ended: Callable[[Measured], bool]
    _stop: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _ended: list[Measured] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self._end_s = math.inf if self.duration_s is None else self.start_s + self.duration_s

    def stop(self) -> None:
        """Send nothing more."""
        self._stop.set()

    async def run_closed(
        self, sessions: Iterable[Begin], users: int, *, first_s: float, spacing_s: float
    ) -> list[Measured]:
        """Let each user hold one conversation after another.

        first_s, spacing_s  when the first user begins after the level's start, and each next one
        """
        supply = iter(sessions)

        async def user(number: int) -> None:
            due_s = self.start_s + first_s + number * spacing_s
            while not self._stop.is_set() and due_s < self._end_s:
                begin = next(supply, None)
                if begin is None:
                    return
                due_s = await self._converse(begin(), due_s)

        async with asyncio.TaskGroup() as group:
            for number in range(users):
                group.create_task(user(number))
        return self._in_order()

    async def run_open(self, sessions: Iterable[tuple[Begin, float]], max_sessions: int | None) -> list[Measured]:
        """Begin each so many seconds after the level's start, at most `max_sessions` at once."""
        loop = asyncio.get_running_loop()
        gate = contextlib.nullcontext() if max_sessions is None else asyncio.Semaphore(max_sessions)

        async def one(begin: Begin, due_s: float) -> None:
            async with gate:
                await self._converse(begin(), due_s, held_s=max(0.0, loop.time() - due_s))

        async with asyncio.TaskGroup() as group:
            for begin, arrival_s in sessions:
                due_s = self.start_s + arrival_s
                if await stopped_before(self._stop, due_s - loop.time()):
                    break
                group.create_task(one(begin, due_s))
        return self._in_order()

    async def _converse(self, talk: Talk, due_s: float, *, held_s: float = 0.0) -> float:
        """One conversation, to its end or first failure; returns when its user is free again.

        After a failure nothing more is sent, and only what is in flight is waited for.
        """
        loop = asyncio.get_running_loop()
        free_s, failed = due_s, False
        waiting: set[asyncio.Task[Any]] = set()  # for their due times

        async def one(each: Following, due_s: float, held_s: float = 0.0) -> None:
            nonlocal free_s, failed
            if due_s >= self._end_s:
                free_s = max(free_s, due_s)
                return
            task = asyncio.current_task()
            assert task is not None
            waiting.add(task)
            stopped = await stopped_before(self._stop, due_s - loop.time())
            waiting.remove(task)
            if stopped or failed:
                return
            measured = await self.sender.measure(each.request, due_s, lambda: failed or self._stop.is_set())
            if measured is None:
                return
            measured.held_s += held_s
            self._ended.append(measured)
            if not self.on_ended(measured):
                self._stop.set()
            record = measured.record()
            free_s = max(free_s, measured.ended_s)
            if failed := failed or not record.ok:
                for sibling in waiting:
                    sibling.cancel()
            else:
                for following in talk.after(each.request, record.exchange):
                    group.create_task(one(following, measured.ended_s + following.pause_s))

        async with asyncio.TaskGroup() as group:
            for each in talk.begin():
                group.create_task(one(each, due_s + each.pause_s, held_s))
        return loop.time() if failed else free_s  # a sibling may have waited for its turn since

    def _in_order(self) -> list[Measured]:
        return sorted(self._ended, key=lambda measured: measured.request.request_id)
