"""Allocates KV-cache blocks and counts their references.

A block is `block_size` token slots. Sequences with a common prefix share blocks; a block is free
when its last reference is released. The manager hands out block numbers and knows neither tensors
nor sequences. Source of the paged cache: Kwon et al. 2023, arXiv:2309.06180.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from lmi_bench.core.errors import EngineError
from lmi_bench.engine.scheduling.prefix_cache import PrefixCache


@dataclass(slots=True, eq=False)
class BlockManager:
    """The blocks of one cache: every block is either free or referenced (it has holders).

    prefix_cache  remembers the content of free blocks; those are allocated last
    budget        blocks that may be in use at once; no block is free while more are in use
    most_used     peak number of blocks in use: freed blocks are reused last in, first out, so that
                  no more than this have ever been written
    num_copied    blocks that came from the host since the last step was planned
    """

    num_blocks: int
    block_size: int
    prefix_cache: PrefixCache | None = None
    budget: int = field(init=False)
    most_used: int = field(init=False, default=0)
    num_copied: int = field(init=False, default=0)
    _free: list[int] = field(init=False)  # a stack
    _holders: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.budget = self.num_blocks
        self._free = list(range(self.num_blocks - 1, -1, -1))
        self._holders = [0] * self.num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated: unused, and within the budget."""
        return max(0, self._unheld - (self.num_blocks - self.budget))

    @property
    def num_used(self) -> int:
        return self.num_blocks - self._unheld

    @property
    def _unheld(self) -> int:
        if self.prefix_cache is not None:
            return len(self._free) + self.prefix_cache.num_idle
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks needed for `num_tokens` token slots, rounded up."""
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> tuple[int, ...]:
        """Allocate `count` free blocks. The caller checks `num_free` first: raises EngineError if
        there are too few."""
        if count > self.num_free:
            raise EngineError(f"{count} KV blocks requested, {self.num_free} are free")
        if self.prefix_cache is not None:
            while len(self._free) < count:
                self._free.append(self.prefix_cache.evict())
        self.most_used = max(self.most_used, self.num_used + count)
        if count == 1:  # fast path: nearly every call adds one block to a growing sequence
            block_id = self._free.pop()
            self._holders[block_id] = 1
            return (block_id,)
        taken = tuple(self._free.pop() for _ in range(count))
        for block_id in taken:
            self._holders[block_id] = 1
        return taken

    def share(self, block_ids: Iterable[int]) -> None:
        """Add a reference to blocks that are in use or in the prefix cache. Raises EngineError for
        any other block."""
        for block_id in block_ids:
            if self.prefix_cache is not None and self.prefix_cache.is_idle(block_id):
                self.prefix_cache.reactivate(block_id)
            elif self._holders[block_id] < 1:
                raise EngineError(f"KV block {block_id} is free and cannot be shared")
            self._holders[block_id] += 1

    def release(self, block_ids: Iterable[int]) -> None:
        """Remove one reference from each block; a block without references becomes free.

        A sequence releases its blocks from last to first, so that the prefix cache evicts its
        tail before its head. Raises EngineError for a block that is already free.
        """
        for block_id in block_ids:
            holders = self._holders[block_id] - 1
            if holders < 0:
                raise EngineError(f"KV block {block_id} is already free")
            self._holders[block_id] = holders
            if holders == 0 and (self.prefix_cache is None or not self.prefix_cache.deactivate(block_id)):
                self._free.append(block_id)

    def audit(self, tables: Iterable[Iterable[int]]) -> None:
        """Check the reference counts against the block tables of all sequences.

        Raises EngineError if a count differs, or if a block is on the free list twice or is
        neither free nor referenced.
        """
        held = Counter(block_id for table in tables for block_id in table)
        free = Counter(self._free)
        if self.prefix_cache is not None:
            self.prefix_cache.audit([holders > 0 for holders in self._holders])
            free.update(b for b in range(self.num_blocks) if self.prefix_cache.is_idle(b))
        for block_id in range(self.num_blocks):
            in_books, in_tables = self._holders[block_id], held[block_id]
            if in_books != in_tables or free[block_id] != (in_books == 0):
                raise EngineError(
                    f"KV block {block_id}: {in_books} references counted, {in_tables} in the "
                    f"block tables, {free[block_id]} times on the free list"
                )
