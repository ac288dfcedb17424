"""Who is in the batch and holds blocks: admission, growth and eviction over one cache."""

from __future__ import annotations

from bisect import insort
from collections import abc
from operator import attrgetter
from typing import Final

from lmi_bench.engine.scheduling.block_manager import BlockManager
from lmi_bench.engine.scheduling.config import KvLayout, SchedulerConfig
from lmi_bench.engine.scheduling.prefix_cache import PrefixCache
from lmi_bench.engine.scheduling.sequence import Sequence

_ORDER: Final = attrgetter("order")


class Residents:
    """The running sequences and their blocks, kept sound together.

    running      admitted and not ended, in order of (arrival, index)
    num_filling  how many of them have prompt tokens left to compute
    """

    __slots__ = ("_contiguous", "_prefixes", "_window", "blocks", "num_filling", "running")

    def __init__(self, config: SchedulerConfig) -> None:
        self._prefixes = PrefixCache() if config.prefix_caching else None
        self.blocks = BlockManager(config.num_blocks, config.block_size, self._prefixes)
        self.running: list[Sequence] = []
        self.num_filling = 0
        self._contiguous = config.kv_layout is KvLayout.CONTIGUOUS
        self._window = None if self._contiguous else config.attention_window

    def has_room_for(self, seq: Sequence) -> bool:
        """Whether blocks are free for a newcomer.

        Paged, it must leave one block for each running sequence: else it would be preempted, its
        prompt lost, as soon as one of them grows.
        """
        headroom = 0 if self._contiguous else len(self.running)
        needed = self._blocks_at_admission(seq) + headroom
        num_free = self.blocks.num_free
        if needed <= num_free or self._prefixes is None:
            return needed <= num_free
        held = sum(not self._prefixes.is_idle(block_id) for block_id in self._known_blocks(seq))
        return needed - held <= num_free  # an idle block counts as free until it is shared

    def admit(self, seq: Sequence) -> None:
        """Give a sequence the blocks of its prompt, or of its whole length if contiguous.

        Those that the prefix cache knows are shared, and their tokens count as computed.
        """
        known = self._known_blocks(seq)
        self.blocks.share(known)  # first, so that none of them is evicted for the others
        seq.block_ids.extend(known)
        seq.slot_capacity = seq.num_computed = len(known) * self.blocks.block_size
        seq.num_cached = seq.num_computed
        seq.num_learnt = len(known)
        self.grow(seq, self._blocks_at_admission(seq) - len(known))
        seq.admitted = True
        insort(self.running, seq, key=_ORDER)
        self.num_filling += 1

    def grow(self, seq: Sequence, num_blocks: int) -> tuple[int, ...]:
        """Add blocks to a sequence's table; returns the new ones."""
        block_ids = self.blocks.allocate(num_blocks)
        seq.block_ids.extend(block_ids)
        seq.slot_capacity += num_blocks * self.blocks.block_size
        return block_ids

    def missing_blocks(self) -> int:
        """Blocks that are too few for one more token of every sequence that decodes."""
        needed = sum(seq.num_computed == seq.slot_capacity for seq in self.decoding())
        return max(0, needed - self.blocks.num_free)

    def spare_blocks(self) -> int:
        """Free blocks beside those that one more token of every decoding sequence takes."""
        needed = sum(seq.num_computed == seq.slot_capacity for seq in self.decoding())
        return max(0, self.blocks.num_free - needed)

    def missing_for(self, seq: Sequence, num_tokens: int) -> int:
        """Blocks that a sequence lacks for this many more tokens."""
        return max(0, self.blocks.blocks_for(seq.num_computed + num_tokens) - len(seq.block_ids))

    def decoding(self) -> abc.Iterator[Sequence]:
        """Sequences that may have one more token planned, oldest first.

        Not those with prompt left to compute, nor those whose last token is in flight.
        """
        for seq in self.running:
            if seq.num_computed >= seq.tokens_to_fill and not (
                seq.num_pending and not seq.num_left
            ):
                yield seq

    def filling(self) -> list[Sequence]:
        """Sequences with prompt tokens left to compute, oldest first."""
        if not self.num_filling:
            return []
        return [seq for seq in self.running if seq.num_computed < seq.tokens_to_fill]

    def learn(self, seq: Sequence, num_tokens: int) -> None:
        """The first `num_tokens` positions of a sequence are computed for good."""
        if self._prefixes is None:
            return
        size = self.blocks.block_size
        full = num_tokens // size
        if full > seq.num_learnt:
            digests = seq.digests(full, size)
            for number in range(seq.num_learnt, full):
                self._prefixes.learn(seq.block_ids[number], digests[number])
            seq.num_learnt = full

    def forget(self, seq: Sequence, num_tokens: int) -> None:
        """Give back the blocks that no position from `num_tokens` on sees.

        The positions before it are computed for good; a step in flight begins at or behind it.
        """
        behind = self._blocks_behind(num_tokens)
        if behind > seq.num_forgotten:
            self.blocks.release(reversed(seq.block_ids[seq.num_forgotten : behind]))
            seq.num_forgotten = behind

    def _known_blocks(self, seq: Sequence) -> list[int]:
        """Blocks that hold the sequence's beginning; at least one token is left to compute."""
        if self._prefixes is None:
            return []
        size = self.blocks.block_size
        return self._prefixes.find(seq.digests((seq.tokens_to_fill - 1) // size, size))

    def evict_youngest(self) -> Sequence:
        """Take the blocks from the youngest sequence; it has to begin anew."""
        seq = self.running[-1]
        self.remove(seq)
        self.blocks.release(reversed(seq.held_block_ids))
        seq.restart()
        return seq

    def remove(self, seq: Sequence) -> None:
        """Take a sequence out of the batch; its blocks stay with it until `release`."""
        self.running.remove(seq)
        if seq.num_computed < seq.tokens_to_fill:
            self.num_filling -= 1

    def release(self, seq: Sequence) -> None:
        """Give back the blocks of a sequence that has left."""
        self.blocks.release(reversed(seq.held_block_ids))
        seq.block_ids = []
        seq.slot_capacity = 0
        seq.num_forgotten = 0

    def drop_finished(self) -> None:
        """Take everyone who finished with a token out of the batch."""
        self.running = [seq for seq in self.running if seq.finish_reason is None]

    def steps_that_fit(self, most: int) -> int:
        """How many decode steps of all running sequences the free blocks allow, up to `most`.

        Blocks that fall behind a window in these steps are not counted on: it may be more.
        """
        if self._blocks_for_steps(most) <= self.blocks.num_free:
            return most
        low, high = 0, most  # the blocks suffice for `low` steps, not for `high`
        while high - low > 1:
            middle = (low + high) // 2
            if self._blocks_for_steps(middle) <= self.blocks.num_free:
                low = middle
            else:
                high = middle
        return low

    def steps_until_forgotten(self) -> int | None:
        """Decode steps of all running sequences until one gives blocks back, with the last of them;
        None where no block ever falls behind a window."""
        if self._window is None:
            return None
        size, window = self.blocks.block_size, self._window
        return min(
            max(1, (seq.num_forgotten + 1) * size + window - 1 - seq.num_computed)
            for seq in self.running
        )

    def slots(self) -> tuple[int, int]:
        """Token slots that the running sequences hold, and those of them with a token."""
        reserved = filled = 0
        for seq in self.running:
            forgotten = seq.num_forgotten * self.blocks.block_size
            reserved += seq.slot_capacity - forgotten
            filled += seq.num_computed - forgotten
        return reserved, filled

    def slots_over_steps(self, num_steps: int) -> tuple[int, int]:
        """`slots` summed over as many decode steps of all running sequences from now on."""
        reserved = filled = 0
        for seq in self.running:
            first = seq.num_computed
            filled += num_steps * first + num_steps * (num_steps + 1) // 2
            inside = min(num_steps, seq.slot_capacity - first)  # steps before a new block
            reserved += inside * seq.slot_capacity
            reserved += self._sum_of_capacities(first + num_steps)
            reserved -= self._sum_of_capacities(first + inside)
            if self._window is not None:
                behind = self._sum_behind(first + num_steps) - self._sum_behind(first)
                reserved -= behind
                filled -= behind
        return reserved, filled

    def take_steps(self, num_steps: int, token_id: int) -> None:
        """Let every running sequence have decoded `token_id` this many times."""
        for seq in self.running:
            seq.num_computed += num_steps
            seq.output_token_ids.extend([token_id] * num_steps)
            if seq.num_computed > seq.slot_capacity:
                self.grow(seq, self.blocks.blocks_for(seq.num_computed) - len(seq.block_ids))
            self.forget(seq, seq.num_computed)

    def _blocks_behind(self, num_tokens: int) -> int:
        """Blocks at a table's head that a token at position `num_tokens` does not see."""
        if self._window is None:
            return 0
        return max(0, num_tokens + 1 - self._window) // self.blocks.block_size

    def _sum_behind(self, num_tokens: int) -> int:
        """Slots of the blocks behind the window in a step to 1 token, to 2, and so on up to
        `num_tokens`, summed: the step to n tokens has those behind position n - 1 given back."""
        size = self.blocks.block_size
        assert self._window is not None
        whole, rest = divmod(max(0, num_tokens - self._window), size)
        return size * (size * whole * (whole - 1) // 2 + whole * (rest + 1))

    def _sum_of_capacities(self, num_tokens: int) -> int:
        """Slots of the blocks for 1 token, for 2, and so on up to `num_tokens`, summed."""
        size = self.blocks.block_size
        whole, rest = divmod(num_tokens, size)
        return size * (size * whole * (whole + 1) // 2 + rest * (whole + 1))

    def _blocks_for_steps(self, num_steps: int) -> int:
        size = self.blocks.block_size
        return sum(
            -((seq.slot_capacity - seq.num_computed - num_steps) // size)
            for seq in self.running
            if seq.num_computed + num_steps > seq.slot_capacity
        )

    def _blocks_at_admission(self, seq: Sequence) -> int:
        if self._contiguous:
            return self.blocks.blocks_for(seq.num_prompt_tokens + seq.sampling.max_new_tokens)
        return self.blocks.blocks_for(seq.tokens_to_fill)
