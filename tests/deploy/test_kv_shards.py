from __future__ import annotations

import pytest

from lmi_bench.catalog.models import find_model
from lmi_bench.core.errors import InputError
from lmi_bench.deploy.kv_shards import STRATEGIES, shard_map
from tests.end_to_end.commands import lmi_bench

LLAMA_3 = find_model("llama-3-8b")  # 32 query heads, 8 KV heads: four queries read one


def kept(degree, strategy):
    return [device.kv_heads for device in shard_map(LLAMA_3, degree, strategy)]


def test_heads_are_dealt_out_until_there_are_more_devices_than_heads():
    assert kept(4, "shard-over-heads") == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert kept(16, "shard-over-heads")[:4] == [(0,), (0,), (1,), (1,)]


def test_a_cache_over_heads_shrinks_with_the_degree_only_down_to_one_head():
    shares = [
        shard_map(LLAMA_3, degree, "shard-over-heads")[0].cache_share for degree in (1, 8, 16)
    ]
    assert shares == [1, 1 / 8, 1 / 8]


def test_replicated_heads_undo_the_grouping():
    """32 KV heads instead of 8: four times the cache in all, spread over the devices."""
    devices = shard_map(LLAMA_3, 4, "replicated-heads")
    assert devices[0].kv_heads == (0, 0, 0, 0, 1, 1, 1, 1)
    assert sum(device.cache_share for device in devices) == 4


def test_over_the_batch_every_device_keeps_every_head():
    devices = shard_map(LLAMA_3, 4, "shard-over-batch")
    assert all(device.kv_heads == tuple(range(8)) for device in devices)
    assert sum(device.cache_share for device in devices) == 1


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("degree", [1, 2, 4, 8, 16, 32])
def test_every_query_head_finds_its_keys_where_it_is(degree, strategy):
    devices = shard_map(LLAMA_3, degree, strategy)
    assert [query for device in devices for query in device.query_heads] == list(range(32))
    assert all(query // 4 in device.kv_heads for device in devices for query in device.query_heads)


def test_the_table_is_printed_and_heads_that_do_not_divide_are_refused():
    done = lmi_bench("deploy", "shards", "--model", "llama-3-8b", "--tp", "4")
    assert "shard-over-heads" in done.stdout
    assert "6-7" in done.stdout
    done = lmi_bench("deploy", "shards", "--model", "falcon-7b", "--tp", "8", expect=2)
    assert "71" in done.stderr
    with pytest.raises(InputError, match="one of shard-over-heads"):
        shard_map(LLAMA_3, 4, "over-everything")
