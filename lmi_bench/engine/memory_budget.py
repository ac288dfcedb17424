"""A KV cache that grows only into memory which is free while it serves.

The cache's pages are taken from the system when they are first written to, not when the cache is
made. So the blocks that were ever in use, and those for which memory is left now, are what may be
in use at once; as the machine's free memory changes, so does that number.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from lmi_bench.engine.scheduling.scheduler import Scheduler

EVERY_S: Final = 1.0
_TOLD_FRAC: Final = 0.05


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """What decides how many blocks may be in use.

    free_bytes       asked each second
    bytes_per_block  of all layers
    keep_bytes       left to others: the cache grows no further below it
    told             told a line when the budget has changed by a twentieth
    """

    free_bytes: Callable[[], int]
    bytes_per_block: int
    keep_bytes: int
    told: Callable[[str], None]

    def blocks(self, most_used: int) -> int:
        """Blocks that were in use already, and as many more as there is memory for."""
        spare_bytes = max(0, self.free_bytes() - self.keep_bytes)
        return most_used + spare_bytes // self.bytes_per_block

    async def follow(self, scheduler: Scheduler, on_change: Callable[[], None]) -> None:
        """Adjust the scheduler's budget for ever; `on_change` is called where it has changed."""
        last_told = scheduler.block_budget
        while True:
            before = scheduler.block_budget
            scheduler.set_block_budget(self.blocks(scheduler.most_used_blocks))
            budget = scheduler.block_budget
            if budget != before:
                on_change()
            if abs(budget - last_told) > _TOLD_FRAC * scheduler.config.num_blocks:
                self.told(
                    f"KV budget {last_told:,} -> {budget:,} of {scheduler.config.num_blocks:,} "
                    f"blocks: {self.free_bytes() / 2**30:.1f} GiB are free, "
                    f"{self.keep_bytes / 2**30:.1f} GiB are left to others"
                )
                last_told = budget
            await asyncio.sleep(EVERY_S)
