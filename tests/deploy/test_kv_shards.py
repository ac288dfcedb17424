from __future__ import annotations

from dataclasses import replace

import pytest

from lmi_bench.catalog.models import find_model
from lmi_bench.core.errors import InputError
from lmi_bench.deploy.kv_shards import STRATEGIES, shard_map
from lmi_bench.models.shape import split_heads
from tests.end_to_end.commands import lmi_bench

LLAMA_3 = find_model("llama-3-8b")  # 32 query heads, 8 KV heads: four queries read one


def kept(degree, strategy):
    return [heads.kv_heads for heads, _ in shard_map(LLAMA_3, degree, strategy)]


def test_heads_are_dealt_out_until_there_are_more_devices_than_heads():
    assert kept(4, "shard-over-heads") == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert kept(16, "shard-over-heads")[:4] == [(0,), (0,), (1,), (1,)]


def test_a_cache_over_heads_shrinks_with_the_degree_only_down_to_one_head():
    shares = [shard_map(LLAMA_3, degree, "shard-over-heads")[0][1] for degree in (1, 8, 16)]
    assert shares == [1, 1 / 8, 1 / 8]


def test_replicated_heads_undo_the_grouping():
    """32 KV heads instead of 8: four times the cache in all, spread over the devices."""
    devices = shard_map(LLAMA_3, 4, "replicated-heads")
    assert devices[0][0].kv_heads == (0, 0, 0, 0, 1, 1, 1, 1)
    assert sum(share for _, share in devices) == 4


def test_over_the_batch_every_device_keeps_every_head():
    devices = shard_map(LLAMA_3, 4, "shard-over-batch")
    assert all(heads.kv_heads == tuple(range(8)) for heads, _ in devices)
    assert sum(share for _, share in devices) == 1


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("degree", [1, 2, 4, 8, 16, 32])
def test_every_query_head_finds_its_keys_where_it_is(degree, strategy):
    heads = [each for each, _ in shard_map(LLAMA_3, degree, strategy)]
    assert [query for each in heads for query in each.query_heads] == list(range(32))
    assert all(query // 4 in each.kv_heads for each in heads for query in each.query_heads)


def test_cores_that_do_not_divide_the_heads_are_filled_with_padding():
    """24 cores for 32 heads as transformers-neuronx pads them: 48 query heads, 24 KV heads, three
    cores for each of the 8 KV heads, of which the third has only padding."""
    devices = shard_map(LLAMA_3, 24, "replicated-heads")
    queries = [tuple(heads.query_heads) for heads, _ in devices]
    assert queries[:4] == [(0, 1), (2, 3), (), (4, 5)]
    assert {heads.query_slots for heads, _ in devices} == {2}
    assert sum(heads.kv_slots for heads, _ in devices) == 24
    assert sum(share for _, share in devices) == pytest.approx(3)
    with pytest.raises(InputError, match="8 KV heads"):
        shard_map(LLAMA_3, 24, "shard-over-heads")


def test_a_model_without_grouping_pads_keys_and_values_with_its_queries():
    devices = shard_map(find_model("llama-2-7b"), 24, "shard-over-heads")
    assert devices[15][0].kv_heads == (30, 31)
    assert [heads.kv_heads for heads, _ in devices[16:]] == [()] * 8


def test_24_kv_heads_over_32_cores_are_one_a_core():
    """The case that transformers-neuronx names: 72 query heads become 96, three to a core."""
    heads = split_heads(replace(LLAMA_3, num_heads=72, num_kv_heads=24), 32, "replicated-heads")
    assert [each.kv_heads for each in heads] == [(rank,) for rank in range(24)] + [()] * 8
    assert {(each.query_slots, each.kv_slots) for each in heads} == {(3, 1)}


def test_the_table_is_printed_and_heads_that_do_not_divide_are_refused():
    done = lmi_bench("deploy", "shards", "--model", "llama-3-8b", "--tp", "4")
    assert "shard-over-heads" in done.stdout
    assert "6-7" in done.stdout
    done = lmi_bench(
        *("deploy", "shards", "--model", "falcon-7b", "--tp", "8"), *("--strategy", "shard-over-heads"), expect=2
    )
    assert "71" in done.stderr
    with pytest.raises(InputError, match="one of shard-over-heads"):
        shard_map(LLAMA_3, 4, "over-everything")
