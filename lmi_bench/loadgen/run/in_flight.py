"""A cap on the requests in flight: one that is due beyond it waits its turn, first come first.

The wait is not the generator's fault, so it is kept apart from its own delay, and it is not the
server's, so no time-out counts it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from lmi_bench.core.workload import PlannedRequest
from lmi_bench.loadgen.run.measure import Measured, measure
from lmi_bench.loadgen.run.stall_guard import StallGuard
from lmi_bench.loadgen.run.target import Target


class InFlightCap:
    """At most `most` requests of a level at once."""

    def __init__(self, most: int) -> None:
        self._gate = asyncio.Semaphore(most)

    async def measure(
        self,
        target: Target,
        request: PlannedRequest,
        due_s: float,
        *,
        timeout_s: float | None,
        guard: StallGuard | None = None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> Measured | None:
        """Like `measure`, when it is this request's turn; the time-out counts from the send.

        stopped  asked when it is: if the level has ended meanwhile nothing is sent, and None comes
        """
        loop = asyncio.get_running_loop()
        asked_s, waits = loop.time(), self._gate.locked()
        async with self._gate:
            if stopped():
                return None
            held_s = loop.time() - asked_s if waits else 0.0
            measured = await measure(target, request, due_s, timeout_s=timeout_s, guard=guard)
        measured.hold(held_s)
        return measured
