"""Closed loop: a fixed number of users, each of whom sends again as soon as its answer ended.

A request is due when its user is free. What lies between due and sent is the generator's own
delay, which the self-check reports.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from lmi_bench.core.workload import ClosedLoop, PlannedRequest
from lmi_bench.loadgen.run.in_flight import InFlightCap
from lmi_bench.loadgen.run.measure import Measured, measure
from lmi_bench.loadgen.run.stall_guard import StallGuard
from lmi_bench.loadgen.run.target import Target


async def run_closed_loop(
    target: Target,
    users: ClosedLoop,
    request_at: Callable[[int], PlannedRequest],
    *,
    start_s: float,
    spacing_s: float = 0.0,
    timeout_s: float | None = 60.0,
    guard: StallGuard | None = None,
    cap: InFlightCap | None = None,
    on_ended: Callable[[Measured], bool] = lambda _: True,
) -> list[Measured]:
    """Let the users work through their requests; returns them in request order.

    request_at  the request of a number
    spacing_s   seconds between the first sends of neighbouring users: a burst of all at once
                measures the server's accept queue
    cap         on the requests in flight, below the number of users
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
            request = request_at(index)
            measured: Measured | None
            if cap is None:
                measured = await measure(target, request, due_s, timeout_s=timeout_s, guard=guard)
            else:
                measured = await cap.measure(
                    target,
                    request,
                    due_s,
                    timeout_s=timeout_s,
                    guard=guard,
                    stopped=lambda: users.is_stopped,
                )
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
