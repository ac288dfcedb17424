"""A cap on the requests in flight: one that is due beyond it waits its turn, first come first.

The wait is not the generator's fault, so it is kept apart from its own delay.
"""

from __future__ import annotations

import asyncio

from lmi_bench.loadgen.measure import Measured, measure
from lmi_bench.loadgen.stall_guard import StallGuard
from lmi_bench.loadgen.target import Target
from lmi_bench.workload import PlannedRequest


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
    ) -> Measured:
        """Like `measure`, when it is this request's turn; the time-out counts from the send."""
        loop = asyncio.get_running_loop()
        asked_s = loop.time()
        async with self._gate:
            held_s = loop.time() - asked_s
            measured = await measure(target, request, due_s, timeout_s=timeout_s, guard=guard)
        measured.hold(held_s)
        return measured
