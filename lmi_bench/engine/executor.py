"""The interface of an executor, which runs the steps that the scheduler plans."""

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, Protocol, runtime_checkable

from lmi_bench.core.errors import EngineError
from lmi_bench.engine.scheduling.batch import StepBatch, StepOutput


class Executor(Protocol):
    """Runs steps in the given order.

    It builds each sequence's block table from the batches' `new_block_ids` and knows nothing of
    queues or requests. `execute` must not block the event loop while it computes.

    Raises EngineError when it cannot continue.

    block_size     tokens of one KV-cache block
    max_in_flight  steps that may be submitted before the first of them ends: 1 or 2
    """

    block_size: int
    max_in_flight: int

    async def execute(self, batch: StepBatch) -> list[StepOutput]:
        """Run one step; one output per entry, in batch order."""

    async def close(self) -> None:
        """Release the executor's resources; no step may follow."""


@runtime_checkable
class WatchedExecutor(Protocol):
    """An executor with parts that can end on their own, such as processes."""

    async def lost(self) -> EngineError:
        """Return when a required part has ended, even between steps."""


async def first_of(waiting: Iterable[Coroutine[Any, Any, EngineError]]) -> EngineError:
    """The result of the first one to return; the others are cancelled."""
    futures = [asyncio.ensure_future(each) for each in waiting]
    try:
        done, _ = await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
        return done.pop().result()
    finally:
        for future in futures:
            future.cancel()
