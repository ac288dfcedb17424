"""Results of a target besides an Exchange: an undecoded answer, or a cancelled one."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from lmi_bench.core.exchange import Exchange

Decoder = Callable[[], Exchange]
"""Gives the exchange of an answer that has ended, or raises TargetError."""


@dataclass(frozen=True, slots=True)
class UndecodedAnswer:
    """An answer that has ended and is not decoded yet.

    ended_s     when its last byte arrived
    num_events  number of reads, an estimate of the tokens while the level runs
    """

    ended_s: float
    num_events: int
    decode: Decoder


def cancelled(exchange: Exchange) -> asyncio.CancelledError:
    """The error that a cancelled target raises; its argument is what had arrived before.

    It is no subclass: `asyncio.timeout` (Python 3.11) only recognizes CancelledError itself.
    """
    return asyncio.CancelledError(exchange)


def arrived_before(exc: BaseException | None) -> Exchange | None:
    """What had arrived before a cancellation, if the target reported it."""
    value = exc.args[0] if isinstance(exc, asyncio.CancelledError) and exc.args else None
    return value if isinstance(value, Exchange) else None
