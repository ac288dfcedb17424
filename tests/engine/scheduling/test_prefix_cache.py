"""What is computed once is not computed again, and is given up when its memory is needed."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmi_bench.core.errors import EngineError
from lmi_bench.engine.scheduling.batch import StepBatch, StepOutput
from lmi_bench.engine.scheduling.block_manager import BlockManager
from lmi_bench.engine.scheduling.config import SchedulerConfig
from lmi_bench.engine.scheduling.prefix_cache import PrefixCache, block_digest
from lmi_bench.engine.scheduling.sampling import SamplingParams
from lmi_bench.engine.scheduling.scheduler import Scheduler


def scheduler(**settings) -> Scheduler:
    defaults = {"num_blocks": 20, "block_size": 4, "prefix_caching": True}
    return Scheduler(SchedulerConfig(**defaults | settings))


def run(scheduler, seq_id, prompt, num_tokens=1):
    """One request from its arrival to its end; the first entry that it got."""
    scheduler.add(seq_id, prompt, SamplingParams(max_new_tokens=num_tokens), float(seq_id))
    first = None
    while isinstance(batch := scheduler.plan(0.0), StepBatch):
        first = first or batch.entries[0]
        outputs = [StepOutput(entry.seq_id, (9,)) for entry in batch.entries]
        scheduler.commit(batch, outputs, 0.0)
        scheduler.audit()
    return first


class TestPrompts:
    def test_a_repeated_prompt_computes_only_its_last_block(self):
        """12 tokens are 3 blocks of 4; of the last one a token has to be computed for its logits,
        so that only the first two are taken."""
        shared = scheduler()
        run(shared, 0, range(12))
        entry = run(shared, 1, range(12))
        assert (entry.first_position, list(entry.token_ids)) == (8, [8, 9, 10, 11])
        assert list(entry.cached_token_ids) == list(range(8))
        assert entry.begins
        assert (shared.stats.prefix_tokens, shared.stats.prefix_hit_tokens) == (24, 8)
        assert shared.stats.prompt_tokens == 12 + 4

    def test_the_blocks_are_those_that_hold_the_beginning(self):
        shared = scheduler()
        first = run(shared, 0, range(12))
        again = run(shared, 1, range(13))
        assert again.first_position == 12
        assert again.new_block_ids[:3] == first.new_block_ids

    def test_another_beginning_shares_nothing_although_the_rest_is_equal(self):
        shared = scheduler()
        run(shared, 0, (1, 2, 3, 4, 5, 6, 7, 8, 9))
        entry = run(shared, 1, (0, 2, 3, 4, 5, 6, 7, 8, 9))
        assert entry.first_position == 0

    def test_generated_tokens_are_found_in_the_next_prompt(self):
        """As in a chat: prompt of 4, then seven tokens 9, of which the last is never an input."""
        shared = scheduler()
        run(shared, 0, (1, 2, 3, 4), num_tokens=7)
        entry = run(shared, 1, (1, 2, 3, 4, 9, 9, 9, 9, 9, 9, 9, 5))
        assert entry.first_position == 8

    def test_a_request_that_runs_shares_its_blocks_with_one_that_comes(self):
        shared = scheduler(num_blocks=6)
        for seq_id in (0, 1):
            shared.add(seq_id, range(16), SamplingParams(max_new_tokens=4), 0.0)
            batch = shared.plan(0.0)
            assert [entry.seq_id for entry in batch.entries] == [seq_id]
            shared.commit(batch, [StepOutput(seq_id, (9,))], 0.0)
            shared.audit()
        assert shared.num_running == 2  # 4 blocks each, 3 of them the same, in a cache of 6
        assert shared.blocks.num_used == 5

    def test_a_preempted_sequence_finds_what_it_had_computed(self):
        shared = scheduler(num_blocks=7, max_rolling_batch_size=2)
        for seq_id, start in ((0, 0), (1, 100)):
            prompt = range(start, start + 9)
            shared.add(seq_id, prompt, SamplingParams(max_new_tokens=12), 0.0)
        computed = 0
        while isinstance(batch := shared.plan(0.0), StepBatch):
            computed += batch.shape.prefill_tokens
            outputs = [StepOutput(entry.seq_id, (9,)) for entry in batch.entries]
            shared.commit(batch, outputs, 0.0)
            shared.audit()
        assert shared.stats.preemptions > 0
        assert shared.stats.prefix_hit_tokens >= 8
        assert computed < 18 + 9  # less than a whole prompt was computed twice

    def test_off_means_that_nothing_is_shared(self):
        apart = scheduler(prefix_caching=False)
        run(apart, 0, range(12))
        assert run(apart, 1, range(12)).first_position == 0
        assert apart.stats.prefix_tokens == 0


class TestEviction:
    def test_the_prompt_that_was_used_longest_ago_is_given_up_first_and_its_tail_before_its_head(self):
        """5 blocks: prompts of two full blocks and a started one leave 2 + 2 idle ones."""
        shared = scheduler(num_blocks=5)
        run(shared, 0, range(9))
        run(shared, 1, range(100, 109))
        run(shared, 2, (50, 51))  # takes the block that nobody knows
        assert shared.stats.prefix_hit_tokens == 0
        run(shared, 3, range(60, 65))  # takes that one and the tail of prompt 0
        assert run(shared, 4, range(9)).first_position == 4
        assert run(shared, 5, range(100, 109)).first_position == 4  # its tail went to prompt 0

    def test_known_blocks_keep_nobody_out(self):
        shared = scheduler(num_blocks=5)
        run(shared, 0, range(16))
        assert shared.blocks.num_free == 5
        assert run(shared, 1, range(100, 116)).first_position == 0


class TestBooks:
    def test_a_block_that_is_neither_held_nor_known_cannot_be_shared(self):
        blocks = BlockManager(2, 4, PrefixCache())
        (block_id,) = blocks.allocate(1)
        blocks.release([block_id])
        with pytest.raises(EngineError, match="is free and cannot be shared"):
            blocks.share([block_id])

    def test_the_first_of_two_equal_blocks_is_the_known_one(self):
        cache = PrefixCache()
        digest = block_digest(b"", (1, 2))
        cache.insert(4, digest)
        cache.insert(7, digest)
        assert cache.find([digest]) == [4]
        assert (cache.deactivate(7), cache.deactivate(4)) == (False, True)

    def test_digests_depend_on_tokens_order_and_what_came_before(self):
        digests = {
            block_digest(b"", (1, 2)),
            block_digest(b"", (2, 1)),
            block_digest(block_digest(b"", (1, 2)), (1, 2)),
            block_digest(b"", range(1, 2)),
        }
        assert len(digests) == 4
        assert block_digest(b"", (0, 1)) == block_digest(b"", range(2))


@settings(max_examples=150)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 24)), min_size=1, max_size=25))
def test_hits_are_those_of_a_cache_that_never_forgets_where_memory_suffices(prompts):
    """The second method: a set of all beginnings of whole blocks seen so far."""
    shared = scheduler(num_blocks=300)
    seen, hits = set(), 0
    for seq_id, (start, length) in enumerate(prompts):
        prompt = tuple(range(start, start + length))
        usable = [prompt[: 4 * n] for n in range(1, (length - 1) // 4 + 1)]
        hits += 4 * sum(beginning in seen for beginning in usable)
        run(shared, seq_id, prompt)
        seen |= {prompt[: 4 * n] for n in range(1, length // 4 + 1)}
        assert shared.stats.prefix_hit_tokens == hits
    assert shared.blocks.num_used == 0
