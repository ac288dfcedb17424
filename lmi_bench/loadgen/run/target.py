"""What a sweep measures: the interface between the load generator and everything that answers.

A target has `send`. The other protocols are optional; `resolve` looks them up once for a level,
because a runtime protocol check takes longer than sending a request.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

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


@runtime_checkable
class DecodesLater(Protocol):
    """A target that can return an answer undecoded, so that the loop stays free for sockets."""

    async def send_undecoded(self, request: PlannedRequest) -> UndecodedAnswer:
        """Like `send`; raises TargetError for failures that show without decoding."""


@runtime_checkable
class LevelAware(Protocol):
    """A target that prepares for a level and reports afterwards what its receiver observed."""

    async def open_level(self, connections: int) -> None:
        """Open this many connections before the level's clock starts."""

    def end_level(self) -> ReceiveSignals:
        """Observations since `open_level`; called when all answers are decoded."""


@runtime_checkable
class EngineWatched(Protocol):
    """A target whose engine runs in this process and reports its counts."""

    def engine_stats(self) -> EngineStats:
        """The engine's counts at this moment."""


@dataclass(frozen=True, slots=True)
class Resolved:
    """A target with the optional protocols that it has; None for those it lacks.

    send             its fastest way to send: undecoded if it can
    max_connections  the target's attribute: maximum requests in flight; more have to wait. None, or
                     a target without it: no limit
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
        max_connections=getattr(target, "max_connections", None),
    )
