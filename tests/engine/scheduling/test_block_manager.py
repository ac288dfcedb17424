from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmi_bench.core.errors import EngineError
from lmi_bench.engine.scheduling.block_manager import BlockManager


def test_a_partly_filled_block_counts_whole():
    blocks = BlockManager(num_blocks=10, block_size=16)
    assert [blocks.blocks_for(n) for n in (0, 1, 16, 17, 32)] == [0, 1, 1, 2, 2]


def test_blocks_handed_out_are_distinct_and_counted():
    blocks = BlockManager(num_blocks=4, block_size=16)
    taken = blocks.allocate(1) + blocks.allocate(3)
    assert sorted(taken) == [0, 1, 2, 3]
    assert (blocks.num_free, blocks.num_used) == (0, 4)


def test_a_shared_block_is_free_only_when_its_last_holder_gives_it_back():
    blocks = BlockManager(num_blocks=2, block_size=16)
    taken = blocks.allocate(1)
    blocks.share(taken)
    blocks.release(taken)
    assert blocks.num_free == 1
    blocks.audit([taken])
    blocks.release(taken)
    assert blocks.num_free == 2


def test_more_blocks_than_are_free_are_refused_with_both_numbers():
    blocks = BlockManager(num_blocks=2, block_size=16)
    with pytest.raises(EngineError, match="3 KV blocks requested, 2 are free"):
        blocks.allocate(3)


def test_giving_back_a_free_block_or_sharing_one_is_an_error():
    blocks = BlockManager(num_blocks=2, block_size=16)
    taken = blocks.allocate(1)
    blocks.release(taken)
    with pytest.raises(EngineError, match="already free"):
        blocks.release(taken)
    with pytest.raises(EngineError, match="cannot be shared"):
        blocks.share(taken)


@pytest.mark.parametrize("tables", [[], [(0,), (0,), (1,)], [(0, 1, 2)]], ids=["lost", "held twice", "not ours"])
def test_the_audit_sees_tables_that_disagree_with_the_books(tables):
    blocks = BlockManager(num_blocks=4, block_size=16)
    assert set(blocks.allocate(2)) == {0, 1}
    with pytest.raises(EngineError, match="references counted"):
        blocks.audit(tables)


@given(st.lists(st.tuples(st.sampled_from(["take", "share", "give"]), st.integers(0, 5))))
def test_any_order_of_taking_sharing_and_giving_back_keeps_the_books(actions):
    blocks = BlockManager(num_blocks=8, block_size=4)
    tables: list[tuple[int, ...]] = []
    for action, number in actions:
        if action == "take" and number <= blocks.num_free:
            tables.append(blocks.allocate(number))
        elif action == "share" and tables:
            shared = tables[number % len(tables)]
            blocks.share(shared)
            tables.append(shared)
        elif action == "give" and tables:
            blocks.release(tables.pop(number % len(tables)))
        blocks.audit(tables)
        assert blocks.num_used == len({block for table in tables for block in table})
        assert blocks.num_free + blocks.num_used == 8
