"""Closed loop: a fixed number of users; each sends its next request when its answer has ended.

A request is due when its user is free. The time from then to the send is the generator's own
delay, which the self-check reports.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from lmi_bench.core.workload import ClosedLoop, PlannedRequest
from lmi_bench.loadgen.run.measure import Measured
from lmi_bench.loadgen.run.sender import Sender


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
