"""Ends stalled requests of a level without a time-out.

A slow server still completes an answer now and then. When none has completed for far longer than
any answer took, the requests in flight fail, even if bytes keep arriving.
"""

from __future__ import annotations

import asyncio

LEAST_S = 300.0
"""Nothing fails sooner: a model may be loading, a queue may be long."""
TIMES_LONGEST = 10.0
S_PER_TOKEN = 2.0


class StallGuard:
    """Follows the requests of one level on the running loop's clock.

    The requests in flight fail when none has ended for the longest of `least_s`, ten times the
    longest answer so far, and 2 s for each requested token of the longest request in flight.
    """

    def __init__(self, least_s: float = LEAST_S) -> None:
        self._least_s = least_s
        self._longest_s = 0.0
        self._quiet_since_s = 0.0
        self._in_flight: dict[asyncio.Timeout, int] = {}
        self._timer: asyncio.TimerHandle | None = None
        self.gave_up_after_s: float | None = None

    def began(self, limit: asyncio.Timeout, output_tokens: int) -> None:
        """A request was sent; `limit` can end it."""
        loop = asyncio.get_running_loop()
        if not self._in_flight:
            self._quiet_since_s = loop.time()
        self._in_flight[limit] = output_tokens
        if self._timer is None:
            self._timer = loop.call_at(self._quiet_since_s + self._limit_s(), self._look)

    def ended(self, limit: asyncio.Timeout, took_s: float) -> None:
        """A request ended, in success or failure."""
        self._in_flight.pop(limit, None)
        self._quiet_since_s = asyncio.get_running_loop().time()
        self._longest_s = max(self._longest_s, took_s)
        if not self._in_flight and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _limit_s(self) -> float:
        tokens = max(self._in_flight.values(), default=0)
        return max(self._least_s, TIMES_LONGEST * self._longest_s, S_PER_TOKEN * tokens)

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        due_s = self._quiet_since_s + self._limit_s()
        if loop.time() < due_s:
            self._timer = loop.call_at(due_s, self._look)
            return
        self._timer = None
        self.gave_up_after_s = self._limit_s()
        given_up, self._in_flight = self._in_flight, {}
        for limit in given_up:
            limit.reschedule(loop.time())
