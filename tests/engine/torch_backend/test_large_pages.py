"""Memory that is read in long streams lies in large pages."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lmi_bench.core.errors import CapacityError
from lmi_bench.engine.torch_backend.kv_cache import KvCache, KvLayoutShape
from lmi_bench.engine.torch_backend.memory import LARGE_PAGE, zeroed_bytes

POLICY = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def bytes_in_large_pages(address: int) -> int:
    """Of the mapping that holds `address`, as the kernel counts them."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head, _, rest = line.partition(" ")
        if "-" in head and ":" not in head:
            first, end = (int(bound, 16) for bound in head.split("-"))
            inside = first <= address < end
        elif inside and head == "AnonHugePages:":
            return int(rest.split()[0]) * 1024
    return 0


def test_bytes_are_zero_and_begin_at_a_large_page_but_for_a_few():
    for size in (0, 1, 4096, LARGE_PAGE // 4, 3 * LARGE_PAGE + 5):
        memory = zeroed_bytes(size)
        assert (memory.numel(), memory.count_nonzero()) == (size, 0)
        assert memory.data_ptr() % LARGE_PAGE == 0 or size < LARGE_PAGE // 4


@pytest.mark.skipif(not POLICY.is_file() or "[never]" in POLICY.read_text(), reason="the system has no large pages")
def test_what_is_written_is_backed_by_large_pages():
    """Memory that could be shared gets none on a usual Linux. Half is enough: there may be none
    left."""
    memory = zeroed_bytes(8 * LARGE_PAGE)
    memory.fill_(1)
    assert bytes_in_large_pages(memory.data_ptr()) >= 4 * LARGE_PAGE


@pytest.mark.skipif(not POLICY.is_file() or "[never]" in POLICY.read_text(), reason="the system has no large pages")
def test_a_cache_lies_in_them():
    shape = KvLayoutShape(num_layers=1, num_kv_heads=4, head_dim=64, block_size=64, dtype=torch.bfloat16)
    cache = KvCache(shape, 64, torch.device("cpu"))
    cache.keys[0].fill_(1)
    assert bytes_in_large_pages(cache.keys[0].data_ptr()) >= cache.keys[0].nbytes // 2


def test_more_than_the_system_has_is_refused_in_one_line():
    """2^56 bytes: no processor addresses so much."""
    with pytest.raises(CapacityError, match=r"72,057,594,037,927,936 bytes .* lower --num-blocks"):
        zeroed_bytes(1 << 56)
