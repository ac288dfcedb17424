"""What a sweep measures: the interface to everything that answers, and one that retries.

A target has `send`. The other protocols are optional; `resolve` looks them up once for a level,
because a runtime protocol check takes longer than sending a request.

A benchmark that retries silently hides the failures that it should count. Here each retry is
counted, and latency runs from the first send, as the application behind the SDK would see it.

Source: botocore/retries/standard.py (1.40): three attempts, back-off random(0, 1) * 2 ** (attempt
- 1) of at most 20 s, and a quota of 500 that a retry takes 5 from and a success gives back to.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Protocol, Self, TypeVar, runtime_checkable

from lmi_bench.core.errors import TargetError
from lmi_bench.core.exchange import Exchange
from lmi_bench.core.workload import PlannedRequest
from lmi_bench.engine.scheduling.stats import EngineStats
from lmi_bench.loadgen.http.outcome import UndecodedAnswer, arrived_before, cancelled
from lmi_bench.loadgen.http.receive_signals import ReceiveSignals
from lmi_bench.loadgen.http.target import HttpTarget

Send = Callable[[PlannedRequest], Awaitable[Exchange | UndecodedAnswer]]
"""Sends one request until its answer has ended; raises TargetError."""


class Target(Protocol):
    """Anything that answers a request with tokens and knows the arrival time of each."""

    async def send(self, request: PlannedRequest) -> Exchange:
        """Send one request and return its complete answer when it has ended.

        Times are on the running loop's clock. Raises TargetError if no complete answer came. A
        cancelled target may raise `loadgen.http.outcome.cancelled` with what had arrived.
        """
        ...


@runtime_checkable
class DecodesLater(Protocol):
    """A target that can return an answer undecoded, so that the loop stays free for sockets."""

    async def send_undecoded(self, request: PlannedRequest) -> UndecodedAnswer:
        """Like `send`; raises TargetError for failures that show without decoding."""
        ...


@runtime_checkable
class LevelAware(Protocol):
    """A target that prepares for a level and reports afterwards what its receiver observed."""

    async def open_level(self, connections: int) -> None:
        """Open this many connections before the level's clock starts."""
        ...

    def end_level(self) -> ReceiveSignals:
        """Observations since `open_level`; called when all answers are decoded."""
        ...


@runtime_checkable
class Connected(Protocol):
    """A target that may have a limited number of connections."""

    @property
    def max_connections(self) -> int | None:
        """Maximum requests in flight; more have to wait. None: no limit."""
        ...


@runtime_checkable
class EngineWatched(Protocol):
    """A target whose engine runs in this process and reports its counts."""

    def engine_stats(self) -> EngineStats:
        """The engine's counts at this moment."""
        ...


@dataclass(frozen=True, slots=True)
class Resolved:
    """A target with the optional protocols that it has; None for those it lacks.

    send  its fastest way to send: undecoded if it can
    """

    send: Send
    level: LevelAware | None
    engine: EngineWatched | None
    max_connections: int | None


def resolve(target: Target) -> Resolved:
    """Look up the optional protocols of a target."""
    return Resolved(
        send=target.send_undecoded if isinstance(target, DecodesLater) else target.send,
        level=target if isinstance(target, LevelAware) else None,
        engine=target if isinstance(target, EngineWatched) else None,
        max_connections=target.max_connections if isinstance(target, Connected) else None,
    )


MAX_ATTEMPTS = 3
MAX_BACK_OFF_S = 20.0
_QUOTA, _RETRY_COST, _SUCCESS_GAIN = 500, 5, 1
_TRANSIENT_KINDS = ("connect", "throttled", "overloaded")
_TRANSIENT_STATUS = re.compile(r"HTTP (500|502|504)\b")

T = TypeVar("T")


class RetryingTarget:
    """A target that retries transient failures of another; an async context manager.

    draw  gives random numbers from 0 to 1
    """

    def __init__(self, target: HttpTarget, draw: Callable[[], float] = random.random) -> None:
        self._target = target
        self._draw = draw
        self._quota = _QUOTA  # so that a server that fails every request gets few of them thrice

    @property
    def max_connections(self) -> int | None:
        """Maximum requests in flight; None: no limit."""
        return self._target.max_connections

    async def send(self, request: PlannedRequest) -> Exchange:
        """Send a request until it is answered or out of retries. Raises TargetError."""
        exchange, first_s, retries = await self._retried(lambda: self._target.send(request))
        return _from_first(exchange, first_s, retries)

    async def send_undecoded(self, request: PlannedRequest) -> UndecodedAnswer:
        """The same, without decoding the answer."""
        answer, first_s, retries = await self._retried(lambda: self._target.send_undecoded(request))
        if not retries:
            return answer

        def decode() -> Exchange:
            try:
                return _from_first(answer.decode(), first_s, retries)
            except TargetError as exc:
                _mark(exc, first_s, retries)
                raise

        return replace(answer, decode=decode)

    async def open_level(self, connections: int) -> None:
        """Prepare for a level."""
        await self._target.open_level(connections)

    def end_level(self) -> ReceiveSignals:
        """Observations of the receiver."""
        return self._target.end_level()

    async def __aenter__(self) -> Self:
        await self._target.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self._target.__aexit__(kind, exc, tb)

    async def _retried(self, attempt: Callable[[], Awaitable[T]]) -> tuple[T, float, int]:
        """An attempt's result, when the first attempt was sent, and the number of retries."""
        first_s = asyncio.get_running_loop().time()
        retries = 0
        back_off_s: float | None = None
        while True:
            try:
                if back_off_s is not None:
                    await asyncio.sleep(back_off_s)
                    retries += 1
                result = await attempt()
            except asyncio.CancelledError as exc:
                raise _with_retries(exc, first_s, retries) from exc
            except TargetError as exc:
                if not retries and exc.exchange is not None:
                    first_s = exc.exchange.sent_s
                last = retries + 1 >= MAX_ATTEMPTS
                if last or not _is_transient(exc) or self._quota < _RETRY_COST:
                    _mark(exc, first_s, retries)
                    raise
                self._quota -= _RETRY_COST
                back_off_s = min(self._draw() * 2**retries, MAX_BACK_OFF_S)
            else:
                gain = _RETRY_COST if retries else _SUCCESS_GAIN
                self._quota = min(_QUOTA, self._quota + gain)
                return result, first_s, retries


def _is_transient(exc: TargetError) -> bool:
    """Whether another attempt may succeed; an answer that has begun is not requested again."""
    if exc.exchange is not None and exc.exchange.token_times_s:
        return False
    return exc.kind in _TRANSIENT_KINDS or _TRANSIENT_STATUS.match(str(exc)) is not None


def _from_first(exchange: Exchange, first_s: float, retries: int) -> Exchange:
    return replace(exchange, sent_s=first_s, retries=retries) if retries else exchange


def _with_retries(
    exc: asyncio.CancelledError, first_s: float, retries: int
) -> asyncio.CancelledError:
    """The cancellation to raise, so that the record of an abandoned request counts its retries."""
    known = arrived_before(exc)
    if not retries and known is None:
        return asyncio.CancelledError(*exc.args)
    return cancelled(_from_first(known or Exchange(first_s), first_s, retries))


def _mark(exc: TargetError, first_s: float, retries: int) -> None:
    if retries:
        exc.exchange = _from_first(exc.exchange or Exchange(first_s), first_s, retries)
