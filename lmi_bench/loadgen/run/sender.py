"""The requests of one level: how each is sent, when it is given up, and how many may be in flight.

A request that waits for its turn waits neither for the generator nor for the server. The wait is
therefore recorded as held time, and no time-out includes it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from lmi_bench.core.workload import PlannedRequest
from lmi_bench.loadgen.run.measure import Measured, measure
from lmi_bench.loadgen.run.stall_guard import StallGuard
from lmi_bench.loadgen.run.target import Send


class Sender:
    """Sends and measures the requests of one level.

    timeout_s      seconds from sending to the end of the answer; None: no limit
    guard          gives up requests when the whole level has stalled
    max_in_flight  maximum requests in flight; the others wait, first come first served
    """

    def __init__(
        self,
        send: Send,
        *,
        timeout_s: float | None = 60.0,
        guard: StallGuard | None = None,
        max_in_flight: int | None = None,
    ) -> None:
        self._send = send
        self._timeout_s = timeout_s
        self._guard = guard
        self._gate = None if max_in_flight is None else asyncio.Semaphore(max_in_flight)

    async def measure(
        self, request: PlannedRequest, due_s: float, is_stopped: Callable[[], bool] = lambda: False
    ) -> Measured | None:
        """Send a request when it is its turn; None if the level was stopped before that."""
        if self._gate is None:
            return await self._measure(request, due_s)
        loop = asyncio.get_running_loop()
        asked_s, waits = loop.time(), self._gate.locked()
        async with self._gate:
            if is_stopped():
                return None
            held_s = loop.time() - asked_s if waits else 0.0
            measured = await self._measure(request, due_s)
        measured.hold(held_s)
        return measured

    async def _measure(self, request: PlannedRequest, due_s: float) -> Measured:
        return await measure(
            self._send, request, due_s, timeout_s=self._timeout_s, guard=self._guard
        )
