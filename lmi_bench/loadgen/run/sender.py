"""The requests of one level: sending, measuring, giving up, and the limit on requests in flight.

Times are on the running loop's clock. A request that waits for its turn waits neither for the
generator nor for the server, so the wait is recorded as held time and no time-out includes it. A
target may return an answer undecoded: it is decoded when the level is over, so that the loop stays
free for sockets.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace

from lmi_bench.core.errors import TargetError, timeout_message
from lmi_bench.core.exchange import Exchange
from lmi_bench.core.records import RequestRecord
from lmi_bench.core.workload import PlannedRequest
from lmi_bench.loadgen.http.outcome import UndecodedAnswer, arrived_before
from lmi_bench.loadgen.run.target import Send

LEAST_S = 300.0
"""Nothing fails sooner: a model may be loading, a queue may be long."""
TIMES_LONGEST = 10.0
S_PER_TOKEN = 2.0


class StallGuard:
    """Ends stalled requests of a level without a time-out.

    A slow server still completes an answer now and then. The requests in flight fail, even if bytes
    keep arriving, when none has ended for the longest of `LEAST_S`, ten times the longest answer so
    far, and 2 s for each requested token of the longest request in flight.
    """

    def __init__(self) -> None:
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
        return max(LEAST_S, TIMES_LONGEST * self._longest_s, S_PER_TOKEN * tokens)

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


@dataclass(slots=True)
class Measured:
    """A request that ended: its record, made at once or on first use.

    ended_s     when its user could send again; never before it was due
    held_s      part of its dispatch delay that a limit on requests in flight caused
    num_tokens  tokens that came, or the number of reads where nothing is decoded yet
    """

    request: PlannedRequest
    due_s: float
    ended_s: float
    num_tokens: int
    outcome: RequestRecord | UndecodedAnswer
    held_s: float = 0.0

    @property
    def known_status(self) -> str:
        """The status, as far as known without decoding."""
        return self.outcome.status if isinstance(self.outcome, RequestRecord) else "ok"

    def record(self) -> RequestRecord:
        """The record; decodes the answer if that has not been done."""
        if isinstance(self.outcome, UndecodedAnswer):
            try:
                exchange = self.outcome.decode()
            except TargetError as exc:
                self.outcome = RequestRecord.failed(self.request, self.due_s, exc)
            else:
                self.outcome = RequestRecord.completed(self.request, self.due_s, exchange)
        if not self.held_s:
            return self.outcome
        exchange = self.outcome.exchange
        held_s = exchange.held_s + self.held_s
        return replace(self.outcome, exchange=replace(exchange, held_s=held_s))


@dataclass(eq=False)
class Sender:
    """Sends and measures the requests of one level.

    timeout_s      seconds from sending to the end of the answer; None: no limit
    guard          gives up requests when the whole level has stalled
    max_in_flight  maximum requests in flight; the others wait, first come first served
    """

    send: Send
    timeout_s: float | None = 60.0
    guard: StallGuard | None = None
    max_in_flight: int | None = None

    def __post_init__(self) -> None:
        most = self.max_in_flight
        self._gate = None if most is None else asyncio.Semaphore(most)

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
        measured.held_s += held_s
        return measured

    async def _measure(self, request: PlannedRequest, due_s: float) -> Measured:
        """Send one request; a failure is a result, a cancellation from outside passes through."""
        loop = asyncio.get_running_loop()
        sent_s = loop.time()
        limit = asyncio.timeout(self.timeout_s)
        try:
            async with limit:
                if self.guard is not None:
                    self.guard.began(limit, request.output_tokens)
                answer = await self.send(request)
                if isinstance(answer, UndecodedAnswer):
                    free_s = max(answer.ended_s, due_s)
                    return Measured(request, due_s, free_s, answer.num_events, answer)
        except TimeoutError as exc:
            partial = arrived_before(exc.__cause__ or exc.__context__)  # context: Python 3.11.2
            error = TargetError("timeout", self._why_late(partial), exchange=partial)
            record = RequestRecord.failed(request, due_s, error, sent_s=sent_s)
        except TargetError as exc:
            record = RequestRecord.failed(request, due_s, exc, sent_s=sent_s)
        else:
            record = RequestRecord.completed(request, due_s, answer)
        finally:
            if self.guard is not None:
                self.guard.ended(limit, loop.time() - sent_s)
        if record.status == "timeout":  # it was in flight until now, whenever its last byte came
            record = replace(record, exchange=replace(record.exchange, ended_s=loop.time()))
        tokens = sum(record.exchange.token_counts)
        # its user is free at the answer's end, or now if it failed
        has_end = record.ok and (record.ended_s is not None or record.token_times_s)
        free_s = record.exchange.last_s if has_end else loop.time()
        return Measured(request, due_s, free_s, tokens, record)

    def _why_late(self, partial: Exchange | None) -> str:
        """The missed deadline: for the first token, or for the complete answer."""
        came = 0 if partial is None else sum(partial.token_counts)
        if self.guard is not None and self.guard.gave_up_after_s is not None:
            return (
                f"stuck after {came} tokens: no answer of the level ended for "
                f"{self.guard.gave_up_after_s:g} s; set a limit with --timeout"
            )
        assert self.timeout_s is not None  # or nothing was late
        return timeout_message(self.timeout_s, came)
