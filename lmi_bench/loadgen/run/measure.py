"""One request, measured: its answer, or the reason for its failure.

Times are on the running loop's clock. A target may return an answer undecoded: it is decoded when
the level is over, so that the loop stays free for sockets.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

from lmi_bench.core.errors import TargetError, timeout_message
from lmi_bench.core.exchange import Exchange
from lmi_bench.core.records import RequestRecord
from lmi_bench.core.workload import PlannedRequest
from lmi_bench.loadgen.http.outcome import UndecodedAnswer, arrived_before
from lmi_bench.loadgen.run.stall_guard import StallGuard
from lmi_bench.loadgen.run.target import Send


@dataclass(slots=True)
class Measured:
    """A request that ended: its record, made at once or on first use.

    ended_s     when its user was free again; never before it was due
    held_s      part of its dispatch delay that a cap asked for
    num_tokens  tokens that came, or the number of reads where nothing is decoded yet
    """

    request: PlannedRequest
    due_s: float
    ended_s: float
    num_tokens: int
    outcome: RequestRecord | UndecodedAnswer
    held_s: float = 0.0

    def hold(self, seconds: float) -> None:
        """Add the seconds that a cap made the request wait before it was sent."""
        self.held_s += seconds

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


async def measure(
    send: Send,
    request: PlannedRequest,
    due_s: float,
    *,
    timeout_s: float | None = 60.0,
    guard: StallGuard | None = None,
) -> Measured:
    """Send one request; a failure is a result, a cancellation from outside passes through.

    timeout_s  seconds from sending to the end of the answer; None: no limit
    guard      gives up requests when the whole level has stalled
    """
    loop = asyncio.get_running_loop()
    sent_s = loop.time()
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            if guard is not None:
                guard.began(limit, request.output_tokens)
            answer = await send(request)
            if isinstance(answer, UndecodedAnswer):
                return Measured(
                    request, due_s, max(answer.ended_s, due_s), answer.num_events, answer
                )
    except TimeoutError as exc:
        partial = arrived_before(exc.__cause__)
        error = TargetError("timeout", _why_late(timeout_s, guard, partial), exchange=partial)
        record = RequestRecord.failed(request, due_s, error, sent_s=sent_s)
    except TargetError as exc:
        record = RequestRecord.failed(request, due_s, exc, sent_s=sent_s)
    else:
        record = RequestRecord.completed(request, due_s, answer)
    finally:
        if guard is not None:
            guard.ended(limit, loop.time() - sent_s)
    if record.status == "timeout":  # it was in flight until now, whenever its last byte came
        record = replace(record, exchange=replace(record.exchange, ended_s=loop.time()))
    return Measured(
        request, due_s, _free_s(record, loop.time()), sum(record.exchange.token_counts), record
    )


def _why_late(timeout_s: float | None, guard: StallGuard | None, partial: Exchange | None) -> str:
    """The missed deadline: for the first token, or for the complete answer."""
    came = 0 if partial is None else sum(partial.token_counts)
    if guard is not None and guard.gave_up_after_s is not None:
        return (
            f"stuck after {came} tokens: no answer of the level ended for "
            f"{guard.gave_up_after_s:g} s; --timeout sets a limit of one's own"
        )
    assert timeout_s is not None  # or nothing was late
    return timeout_message(timeout_s, came)


def _free_s(record: RequestRecord, now_s: float) -> float:
    """When the request's user became free: at the answer's end, or now if it failed."""
    if not record.ok:
        return now_s
    if record.ended_s is not None:
        return record.ended_s
    return record.token_times_s[-1] if record.token_times_s else now_s
