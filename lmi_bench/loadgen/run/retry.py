"""Retries in the standard mode of AWS's SDKs: an option, never the default.

A benchmark that retries silently hides the failures that it should count. Here each retry is
counted, and latency runs from the first send, as the application behind the SDK would see it.

Source: botocore/retries/standard.py (1.40): three attempts, back-off random(0, 1) * 2 ** (attempt
- 1) of at most 20 s, and a quota of 500 that a retry takes 5 from and a success gives back to.
"""

import asyncio
import random
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from lmi_bench.core.errors import TargetError
from lmi_bench.core.exchange import Exchange
from lmi_bench.core.workload import PlannedRequest
from lmi_bench.loadgen.http.outcome import UndecodedAnswer, arrived_before, cancelled
from lmi_bench.loadgen.http.target import HttpTarget

MAX_ATTEMPTS = 3
MAX_BACK_OFF_S = 20.0
_QUOTA, _RETRY_COST, _SUCCESS_GAIN = 500, 5, 1
_PASSED_ON = ("max_connections", "open_level", "end_level")
_TRANSIENT_KINDS = ("connect", "throttled", "overloaded")
_TRANSIENT_STATUS = re.compile(r"HTTP (500|502|504)\b")

T = TypeVar("T")


@dataclass(eq=False)
class RetryingTarget:
    """A target that retries transient failures of another, and is otherwise like it.

    draw  gives random numbers from 0 to 1
    """

    target: HttpTarget
    draw: Callable[[], float] = random.random
    _quota: int = _QUOTA  # so that a server that fails every request gets few of them thrice

    def __post_init__(self) -> None:
        for face in _PASSED_ON:
            if hasattr(self.target, face):
                setattr(self, face, getattr(self.target, face))

    async def send(self, request: PlannedRequest) -> Exchange:
        """Send a request until it is answered or out of retries. Raises TargetError."""
        exchange, first_s, retries = await self._retried(lambda: self.target.send(request))
        return _from_first(exchange, first_s, retries)

    async def send_undecoded(self, request: PlannedRequest) -> UndecodedAnswer:
        """The same, without decoding the answer."""
        answer, first_s, retries = await self._retried(lambda: self.target.send_undecoded(request))
        if not retries:
            return answer

        def decode() -> Exchange:
            try:
                return _from_first(answer.decode(), first_s, retries)
            except TargetError as exc:
                _mark(exc, first_s, retries)
                raise

        return replace(answer, decode=decode)

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
                back_off_s = min(self.draw() * 2**retries, MAX_BACK_OFF_S)
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


def _with_retries(exc: asyncio.CancelledError, first_s: float, retries: int) -> asyncio.CancelledError:
    """The cancellation to raise, so that the record of an abandoned request counts its retries."""
    known = arrived_before(exc)
    if not retries and known is None:
        return asyncio.CancelledError(*exc.args)
    return cancelled(_from_first(known or Exchange(first_s), first_s, retries))


def _mark(exc: TargetError, first_s: float, retries: int) -> None:
    if retries:
        exc.exchange = _from_first(exc.exchange or Exchange(first_s), first_s, retries)
