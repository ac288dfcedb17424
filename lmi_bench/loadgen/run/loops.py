"""The closed loop and the open loop of single requests.

Closed loop: each user sends its next request when its answer has ended; the time from then to the
send is the generator's own delay, which the self-check reports. Open loop: each request is sent
when it is due, however slow the answers are. Latency counts from the due time, so that a generator
or a server that falls behind cannot hide the delay that it caused (coordinated omission).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from lmi_bench.core.workload import ClosedLoop, PlannedRequest
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

    request_at  gives the request with a number
    spacing_s   seconds between the first sends of neighbouring users: a burst of all at once
                measures the server's accept queue
    on_ended    called as each request ends; False: send no more, let the rest finish
    """
    loop = asyncio.get_running_loop()
    ended: list[Measured] = []

    async def user(number: int) -> None:
        due_s = start_s + users.start_offset_s(number, spacing_s)
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
        for number in range(users.concurrency):
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
    try:
        async with asyncio.timeout(delay_s):
            await stop.wait()
    except TimeoutError:
        return stop.is_set()
    return True
