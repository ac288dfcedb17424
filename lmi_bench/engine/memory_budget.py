"""Limits the KV blocks in use to the machine's free memory while serving.

The system allocates a cache page on its first write, not when the cache is created. So the limit
is the blocks ever used plus those for which memory is free now, and changes with free memory.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from lmi_bench.engine.scheduling.scheduler import Scheduler

EVERY_S: Final = 1.0
_REPORTED_FRAC: Final = 0.05


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Computes how many blocks may be in use.

    free_bytes       the machine's free memory, read once per second
    bytes_per_block  bytes of a block in all layers
    keep_bytes       free memory to leave for other programs
    tell             called with a line when the budget has changed by 5 % of all blocks
    """

    free_bytes: Callable[[], int]
    bytes_per_block: int
    keep_bytes: int
    tell: Callable[[str], None]

    def blocks(self, most_used: int) -> int:
        """Blocks ever used, plus those that fit into free memory."""
        spare_bytes = max(0, self.free_bytes() - self.keep_bytes)
        return most_used + spare_bytes // self.bytes_per_block

    async def follow(self, scheduler: Scheduler, on_change: Callable[[], None]) -> None:
        """Adjust the scheduler's budget until cancelled; calls `on_change` after each change."""
        reported = scheduler.blocks.budget
        while True:
            before = scheduler.blocks.budget
            scheduler.set_block_budget(self.blocks(scheduler.blocks.most_used))
            budget = scheduler.blocks.budget
            if budget != before:
                on_change()
            if abs(budget - reported) > _REPORTED_FRAC * scheduler.config.num_blocks:
                self.tell(
                    f"KV budget {reported:,} -> {budget:,} of {scheduler.config.num_blocks:,} "
                    f"blocks: {self.free_bytes() / 2**30:.1f} GiB free, "
                    f"{self.keep_bytes / 2**30:.1f} GiB kept for other programs"
                )
                reported = budget
            await asyncio.sleep(EVERY_S)
