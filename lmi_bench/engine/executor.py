"""What runs one step: the seam between deciding and doing."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from lmi_bench.core.errors import EngineError
from lmi_bench.engine.scheduling.batch import StepBatch, StepOutput


class Executor(Protocol):
    """Runs steps in the order in which they are given.

    It keeps each sequence's block table from the batches' `new_block_ids` and knows nothing of
    queues or requests. `execute` must leave the event loop free while it computes.

    Raises EngineError when it cannot go on.
    """

    @property
    def block_size(self) -> int:
        """Tokens of one KV-cache block."""
        ...

    @property
    def max_in_flight(self) -> int:
        """Steps that may be handed over before the first of them ended: 1 or 2."""
        ...

    async def execute(self, batch: StepBatch) -> list[StepOutput]:
        """Run one step; one output for each entry, in the batch's order."""
        ...

    async def close(self) -> None:
        """Give back what the executor holds; no step may follow."""
        ...


@runtime_checkable
class WatchedExecutor(Protocol):
    """An executor with parts that can end by themselves, such as processes."""

    async def lost(self) -> EngineError:
        """Return when a part that it cannot do without has ended, also between steps."""
        ...
