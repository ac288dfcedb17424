"""The running batch and its KV blocks: admission, growth and preemption."""

from bisect import bisect_right, insort
from collections import abc, deque
from itertools import islice

from lmi_bench.engine.scheduling.block_manager import BlockManager
from lmi_bench.engine.scheduling.config import KvLayout, SchedulerConfig
from lmi_bench.engine.scheduling.prefix_cache import PrefixCache
from lmi_bench.engine.scheduling.sequence import Sequence


class Residents:
    """The running sequences and their blocks, kept consistent.

    running      sequences admitted and not ended, in order of (arrival, index)
    num_filling  number of them with prompt tokens left to compute
    """

    __slots__ = ("_contiguous", "_prefixes", "_window", "blocks", "num_filling", "running")

    def __init__(self, config: SchedulerConfig) -> None:
        self._prefixes = PrefixCache(config.host_blocks) if config.prefix_caching else None
        self.blocks = BlockManager(config.num_blocks, config.block_size, self._prefixes)
        self.running: list[Sequence] = []
        self.num_filling = 0
        self._contiguous = config.kv_layout is KvLayout.CONTIGUOUS
        self._window = None if self._contiguous else config.attention_window

    def has_room_for(self, seq: Sequence) -> bool:
        """True if there are enough free blocks to admit a sequence.

        A paged cache must keep one free block per running sequence: otherwise the new one would
        be preempted, and its prompt lost, as soon as another grows.
        """
        headroom = 0 if self._contiguous else len(self.running)
        needed = self._blocks_at_admission(seq) + headroom
        num_free = self.blocks.num_free
        if needed <= num_free or self._prefixes is None:
            return needed <= num_free
        known = [block_id for block_id in self._known_blocks(seq) if block_id is not None]
        held = sum(not self._prefixes.is_idle(block_id) for block_id in known)
        return needed - held <= num_free  # an idle cached block counts as free until it is shared

    def can_take(self, waiting: deque[Sequence], number: float, config: SchedulerConfig) -> bool:
        """Whether the `number` oldest requests fit one prompt step, the batch and the free blocks.
        The prefix cache is not searched."""
        if number > min(len(waiting), config.max_running - len(self.running)):
            return False
        oldest = list(islice(waiting, int(number)))
        headroom = 0 if self._contiguous else len(self.running) + len(oldest) - 1
        blocks = sum(self._blocks_at_admission(seq) for seq in oldest) + headroom
        tokens = sum(seq.tokens_to_fill for seq in oldest)
        return tokens <= config.max_rolling_batch_prefill_tokens and blocks <= self.blocks.num_free

    def admit(self, seq: Sequence) -> None:
        """Allocate the blocks of a sequence's prompt, or of its whole length if contiguous. Blocks
        in the prefix cache are shared, or copied from the host; their tokens count as computed."""
        known = self._known_blocks(seq)
        # first, so that allocating the others evicts none of them, nor finds the host full
        self.blocks.share(block_id for block_id in known if block_id is not None)
        if (copied := known.count(None)) and self._prefixes is not None:
            self._prefixes.take_from_host(seq.digests(len(known), self.blocks.block_size))
        new_ids = iter(self.blocks.allocate(copied))
        seq.block_ids.extend(next(new_ids) if each is None else each for each in known)
        self.blocks.num_copied += copied
        seq.slot_capacity = seq.num_computed = len(known) * self.blocks.block_size
        seq.num_cached = seq.num_computed
        seq.num_inserted_blocks = 0 if copied else len(known)
        self.grow(seq, self._blocks_at_admission(seq) - len(known))
        seq.admitted = True
        insort(self.running, seq)
        self.num_filling += 1

    def grow(self, seq: Sequence, num_blocks: int) -> tuple[int, ...]:
        """Add blocks to a sequence's table; returns the new ones."""
        block_ids = self.blocks.allocate(num_blocks)
        seq.block_ids.extend(block_ids)
        seq.slot_capacity += num_blocks * self.blocks.block_size
        return block_ids

    def spare_blocks(self) -> int:
        """Free blocks beyond those needed for one more token of every decoding sequence; below 0:
        so many are missing."""
        needed = sum(seq.num_computed == seq.slot_capacity for seq in self.decoding())
        return self.blocks.num_free - needed

    def decoding(self) -> abc.Iterator[Sequence]:
        """Sequences for which one more token can be planned, oldest first. Excludes those with
        prompt left to compute and those whose last token is in flight."""
        for seq in self.running:
            if seq.num_computed >= seq.tokens_to_fill and not (seq.num_pending and not seq.num_left):
                yield seq

    def filling(self) -> list[Sequence]:
        """Sequences with prompt tokens left to compute, oldest first."""
        if not self.num_filling:
            return []
        return [seq for seq in self.running if seq.num_computed < seq.tokens_to_fill]

    def cache_full_blocks(self, seq: Sequence, num_tokens: int) -> None:
        """Add a sequence's full blocks to the prefix cache; `num_tokens` positions are final."""
        if self._prefixes is None:
            return
        size = self.blocks.block_size
        full = num_tokens // size
        if full > seq.num_inserted_blocks:
            digests = seq.digests(full, size)
            for number in range(seq.num_inserted_blocks, full):
                self._prefixes.insert(seq.block_ids[number], digests[number])
            seq.num_inserted_blocks = full

    def free_outside_window(self, seq: Sequence, num_tokens: int) -> None:
        """Free the blocks outside the attention window of every position from `num_tokens` on.
        Positions before `num_tokens` are final; any step in flight begins at or after it."""
        if self._window is None:
            return
        behind = max(0, num_tokens + 1 - self._window) // self.blocks.block_size
        if behind > seq.num_freed_blocks:
            self.blocks.release(reversed(seq.block_ids[seq.num_freed_blocks : behind]))
            seq.num_freed_blocks = behind

    def take_copied_tokens(self) -> int:
        """Tokens of the blocks that came from the host since the last call."""
        copied, self.blocks.num_copied = self.blocks.num_copied, 0
        return copied * self.blocks.block_size

    def _known_blocks(self, seq: Sequence) -> list[int | None]:
        """Cached blocks of the sequence's prefix, None for one on the host; at least one token is
        left to compute."""
        if self._prefixes is None or seq.sampling.prompt_logprobs:
            return []
        size = self.blocks.block_size
        return self._prefixes.find(seq.digests((seq.tokens_to_fill - 1) // size, size))

    def remove(self, seq: Sequence) -> None:
        """Take a sequence out of the batch; it keeps its blocks until `release`."""
        self.running.remove(seq)
        if seq.num_computed < seq.tokens_to_fill:
            self.num_filling -= 1

    def release(self, seq: Sequence) -> None:
        """Free the blocks of a sequence that has left the batch."""
        self.blocks.release(reversed(seq.held_block_ids))
        seq.block_ids = []
        seq.slot_capacity = 0
        seq.num_freed_blocks = 0

    def steps_that_fit(self, most: int) -> int:
        """Decode steps of all running sequences that the free blocks allow, up to `most`. A lower
        bound: blocks that leave the attention window in these steps are not counted."""
        num_free = self.blocks.num_free
        if self._blocks_for_steps(most) <= num_free:
            return most
        return bisect_right(range(most), num_free, key=self._blocks_for_steps) - 1

    def steps_until_window_frees(self) -> int | None:
        """Decode steps of all running sequences until one frees a block outside its window (in
        the last of them); None without a window."""
        if self._window is None:
            return None
        size, window = self.blocks.block_size, self._window
        return min(max(1, (seq.num_freed_blocks + 1) * size + window - 1 - seq.num_computed) for seq in self.running)

    def slots(self) -> tuple[int, int]:
        """Token slots reserved by the running sequences, and those of them with a token."""
        reserved = filled = 0
        for seq in self.running:
            freed = seq.num_freed_blocks * self.blocks.block_size
            reserved += seq.slot_capacity - freed
            filled += seq.num_computed - freed
        return reserved, filled

    def slots_over_steps(self, num_steps: int) -> tuple[int, int]:
        """`slots` summed over the next `num_steps` decode steps of all running sequences."""
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
        """Advance every running sequence by `num_steps` tokens, all `token_id`."""
        for seq in self.running:
            seq.num_computed += num_steps
            seq.output_token_ids.extend([token_id] * num_steps)
            if seq.num_computed > seq.slot_capacity:
                self.grow(seq, self.blocks.blocks_for(seq.num_computed) - len(seq.block_ids))
            self.cache_full_blocks(seq, seq.num_computed)
            self.free_outside_window(seq, seq.num_computed)

    def _sum_behind(self, num_tokens: int) -> int:
        """Slots of the blocks outside the window, summed over steps that reach 1, 2, ...,
        `num_tokens` tokens; the step to n tokens has freed those outside the window of n - 1."""
        size = self.blocks.block_size
        assert self._window is not None
        whole, rest = divmod(max(0, num_tokens - self._window), size)
        return size * (size * whole * (whole - 1) // 2 + whole * (rest + 1))

    def _sum_of_capacities(self, num_tokens: int) -> int:
        """Slots of the blocks needed for n tokens, summed over n = 1, 2, ..., `num_tokens`."""
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
