"""What a sweep is pointed at: the seam of the load generator."""

from __future__ import annotations

from typing import Protocol

from lmi_bench.core.exchange import Exchange
from lmi_bench.core.workload import PlannedRequest


class Target(Protocol):
    """Anything that answers one request with tokens and knows when each of them came."""

    async def send(self, request: PlannedRequest) -> Exchange:
        """Send one request and return what came back, whole, when it ended.

        Times are the running loop's clock. Raises TargetError when no complete answer came.
        """
        ...
