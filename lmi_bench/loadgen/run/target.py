"""What a sweep measures: the interface between the load generator and everything that answers.

A target has `send`. What else it may have is looked up once for a level (`Resolved`), because
looking takes longer than sending a request.
"""

from collections.abc import Awaitable, Callable
from typing import Protocol

from lmi_bench.core.exchange import Exchange
from lmi_bench.core.workload import PlannedRequest
from lmi_bench.engine.scheduling.stats import EngineStats
from lmi_bench.loadgen.http.outcome import UndecodedAnswer
from lmi_bench.loadgen.http.receive_signals import ReceiveSignals

Send = Callable[[PlannedRequest], Awaitable[Exchange | UndecodedAnswer]]
"""Sends one request until its answer has ended; raises TargetError."""


class Target(Protocol):
    """Anything that answers a request with tokens and knows the arrival time of each."""

    async def send(self, request: PlannedRequest) -> Exchange:
        """Send one request and return its complete answer when it has ended.

        Times are on the running loop's clock. Raises TargetError if no complete answer came. A
        cancelled target may raise `loadgen.http.outcome.cancelled` with what had arrived.
        """


class Resolved:
    """What a target may have besides `send`, by the same names; None for what it lacks.

    send             its fastest way to send: `send_undecoded`, if it has that, returns an answer
                     undecoded, so that the loop stays free for sockets, and raises TargetError for
                     failures that show without decoding
    open_level       opens this many connections before the level's clock starts
    end_level        what its receiver observed since then; called when all answers are decoded
    engine_stats     the counts of an engine in this process at this moment
    max_connections  maximum requests in flight; more have to wait. None: no limit
    """

    def __init__(self, target: Target) -> None:
        self.send: Send = getattr(target, "send_undecoded", target.send)
        self.open_level: Callable[[int], Awaitable[None]] | None = getattr(target, "open_level", None)
        self.end_level: Callable[[], ReceiveSignals] = getattr(target, "end_level", ReceiveSignals)
        self.engine_stats: Callable[[], EngineStats] | None = getattr(target, "engine_stats", None)
        self.max_connections: int | None = getattr(target, "max_connections", None)
