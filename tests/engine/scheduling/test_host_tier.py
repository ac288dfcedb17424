"""Blocks that the device gives up go to the host and come back; each is in one place."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmi_bench.core.errors import EngineError
from lmi_bench.engine.scheduling.batch import StepBatch, StepOutput
from lmi_bench.engine.scheduling.block_manager import BlockManager
from lmi_bench.engine.scheduling.config import SchedulerConfig
from lmi_bench.engine.scheduling.prefix_cache import PrefixCache
from lmi_bench.engine.scheduling.sampling import SamplingParams
from lmi_bench.engine.scheduling.scheduler import Scheduler

SIZE = 4


def scheduler(**settings) -> Scheduler:
    defaults = {"num_blocks": 5, "block_size": SIZE, "prefix_caching": True, "host_blocks": 10}
    return Scheduler(SchedulerConfig(**defaults | settings))


def finished(scheduler):
    """Runs all steps; those planned."""
    batches = []
    while isinstance(batch := scheduler.plan(0.0), StepBatch):
        batches.append(batch)
        outputs = [StepOutput(entry.seq_id, (9,) * entry.samples) for entry in batch.entries]
        scheduler.commit(batch, outputs, 0.0)
        scheduler.audit()
    return batches


def run(scheduler, seq_id, prompt, num_tokens=1):
    scheduler.add(seq_id, prompt, SamplingParams(max_new_tokens=num_tokens), float(seq_id))
    return finished(scheduler)[0]


def test_an_evicted_block_is_copied_back_instead_of_computed():
    """A prompt of 17 tokens needs all 5 blocks, so that the next one pushes its 4 full ones out."""
    both = scheduler()
    run(both, 0, range(17))
    other = run(both, 1, range(100, 117))
    assert other.shape.copied_tokens == 0
    again = run(both, 2, range(17))
    assert (again.entries[0].first_position, again.shape.prefill_tokens) == (16, 1)
    assert again.shape.copied_tokens == 16
    assert len(set(again.entries[0].new_block_ids)) == 5
    assert (both.stats.prefix_hit_tokens, both.stats.host_hit_tokens) == (16, 16)


def test_only_what_the_device_lacks_is_copied():
    """The other prompt of 9 tokens takes 3 of 5 blocks: of the first one's 4 its head is left."""
    both = scheduler()
    run(both, 0, range(17))
    run(both, 1, range(100, 109))
    again = run(both, 2, range(17))
    assert again.entries[0].first_position == 16
    assert again.shape.copied_tokens == 8


def test_a_full_tier_forgets_what_was_evicted_first():
    """A tail is evicted before its head: of 4 blocks the host's 2 keep the head."""
    both = scheduler(host_blocks=2)
    run(both, 0, range(17))
    run(both, 1, range(100, 117))
    again = run(both, 2, range(17))
    assert (again.entries[0].first_position, again.shape.copied_tokens) == (8, 8)


def test_a_block_that_returns_makes_room_on_the_host_for_the_one_that_it_replaces():
    """Prompts of 4 full blocks, one on the device and two on the host: none is ever forgotten."""
    both = scheduler(host_blocks=8)
    for seq_id, text in enumerate((0, 1, 2, 1, 0, 2, 0, 1)):
        first = run(both, seq_id, range(100 * text, 100 * text + 17)).entries[0].first_position
        assert first == (0 if seq_id < 3 else 16)


def test_copied_blocks_are_shared_like_computed_ones():
    both = scheduler(num_blocks=7)
    run(both, 0, range(17))
    run(both, 1, range(100, 127))
    for seq_id in (2, 3):
        both.add(seq_id, range(17), SamplingParams(max_new_tokens=3), 0.0)
    first, second, *_ = finished(both)
    assert [entry.seq_id for entry in first.entries] == [2]  # the next one waits for two blocks
    assert first.shape.copied_tokens == 16
    assert second.entries[-1].seq_id == 3
    assert (second.entries[-1].first_position, second.shape.copied_tokens) == (16, 0)


def test_a_request_that_is_cancelled_in_its_step_leaves_sound_books():
    both = scheduler()
    run(both, 0, range(17))
    run(both, 1, range(100, 117))
    both.add(2, range(17), SamplingParams(max_new_tokens=3), 0.0)
    batch = both.plan(0.0)
    both.finish(2, "cancelled")
    both.commit(batch, [StepOutput(2, (9,))], 0.0)
    both.audit()
    assert both.blocks.num_used == 0


def test_a_block_in_two_places_fails_the_audit():
    cache = PrefixCache(host_blocks=4)
    blocks = BlockManager(2, SIZE, cache)
    for digest in (b"a", b"b"):
        (block_id,) = blocks.allocate(1)
        cache.insert(block_id, digest)
        blocks.release([block_id])
    blocks.allocate(1)  # evicts a
    cache._on_host[b"b"] = None
    with pytest.raises(EngineError, match="on the device and on the host"):
        blocks.audit([[0], []])


prompts = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(1, 24)), min_size=1, max_size=40).map(
    lambda rows: [
        tuple(range(100 * head, 100 * head + min(length, 9)))
        + tuple(range(1000 * tail, 1000 * tail + max(0, length - 9)))
        for head, tail, length in rows
    ]
)


@settings(max_examples=150)
@given(prompts, st.integers(7, 12), st.sampled_from([0, 1, 3, 8, 200]))
def test_a_host_tier_never_loses_a_hit_and_with_room_for_all_none_is_lost(asked, device, host):
    tiers = {blocks: scheduler(num_blocks=device, host_blocks=blocks) for blocks in (0, host, 400)}
    seen, possible = set(), 0
    for seq_id, prompt in enumerate(asked):
        usable = [prompt[: SIZE * n] for n in range(1, (len(prompt) - 1) // SIZE + 1)]
        possible += SIZE * sum(beginning in seen for beginning in usable)
        seen |= {prompt[: SIZE * n] for n in range(1, len(prompt) // SIZE + 1)}
        for each in tiers.values():
            run(each, seq_id, prompt)
    hits = {blocks: each.stats.prefix_hit_tokens for blocks, each in tiers.items()}
    assert hits[0] <= hits[host] <= hits[400] == possible
    assert tiers[0].stats.host_hit_tokens == 0
    for each in tiers.values():
        assert each.blocks.num_used == 0
        assert each.blocks.num_free == device


arrivals = st.lists(
    st.tuples(st.integers(0, 4), st.integers(1, 30), st.integers(1, 12), st.integers(0, 3)), min_size=1, max_size=20
)


@settings(max_examples=150)
@given(arrivals, st.integers(11, 20), st.integers(0, 12), st.booleans(), st.sampled_from([None, 6]))
def test_whatever_runs_together_every_block_is_in_one_place(asked, device, host, chunks, window):
    """With preemptions, windows and prompts in chunks; the audit follows every step."""
    both = scheduler(
        num_blocks=device,
        host_blocks=host,
        chunked_prefill=chunks,
        attention_window=window,
        max_rolling_batch_prefill_tokens=16,
        max_rolling_batch_size=4,
    )
    copied = 0
    for seq_id, (text, length, output, steps) in enumerate(asked):
        prompt = range(100 * text, 100 * text + length)
        both.add(seq_id, prompt, SamplingParams(max_new_tokens=output), float(seq_id))
        for _ in range(steps):
            if not isinstance(batch := both.plan(0.0), StepBatch):
                break
            copied += batch.shape.copied_tokens
            outputs = [StepOutput(entry.seq_id, (9,) * entry.samples) for entry in batch.entries]
            both.commit(batch, outputs, 0.0)
            both.audit()
            assert len(both.blocks.prefix_cache._on_host) <= host
    copied += sum(batch.shape.copied_tokens for batch in finished(both))
    assert both.stats.host_hit_tokens == copied <= both.stats.prefix_hit_tokens
    assert (both.blocks.num_used, both.blocks.num_free) == (0, device)
