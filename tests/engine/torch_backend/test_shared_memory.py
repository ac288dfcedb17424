"""Sums and joins through shared memory, the ranks being threads of this process."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from lmi_bench.core.errors import EngineError
from lmi_bench.engine.torch_backend.collectives import REGION_BYTES, SegmentOwner, SharedMemoryCollectives, works_here

pytestmark = pytest.mark.skipif(not works_here(), reason="needs a processor that keeps stores in order")


def never():
    return False


def on_ranks(degree, work, *, orphaned=never):
    """What `work(collectives)` returns on each rank."""
    owner = SegmentOwner(degree)
    ranks = [SharedMemoryCollectives(owner.segment, rank, orphaned) for rank in range(degree)]
    owner.unlink()
    try:
        with ThreadPoolExecutor(degree) as pool:
            return list(pool.map(work, ranks))
    finally:
        for rank in ranks:
            rank.close()
        owner.close()


FLOATS = REGION_BYTES // 4


@pytest.mark.parametrize("degree", [2, 3, 4])
@pytest.mark.parametrize("size", [1, 7, FLOATS, FLOATS + 1, 3 * FLOATS - 5])
def test_the_sum_holds_every_rank_once_whatever_the_size(degree, size):
    """Rank r brings (r + 1) * i at place i; the sum is n (n + 1) / 2 * i, exact in float32 here."""

    def work(collectives):
        x = torch.arange(size, dtype=torch.float32) % 1000 * (collectives.rank + 1)
        return collectives.all_reduce(x.view(1, -1))

    expected = torch.arange(size, dtype=torch.float32) % 1000 * (degree * (degree + 1) // 2)
    for result in on_ranks(degree, work):
        assert torch.equal(result[0], expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_rank_gets_the_same_bits(dtype):
    def work(collectives):
        chance = torch.Generator().manual_seed(collectives.rank)
        x = torch.randn(64, 96, generator=chance).to(dtype)
        return collectives.all_reduce(x)

    first, *rest = on_ranks(4, work)
    assert all(torch.equal(first, other) for other in rest)


def test_many_calls_of_changing_size_never_mix():
    """2,000 calls on three threads: a slot used too early would show a number of another call."""
    chance = random.Random(0)
    sizes = [chance.choice([1, 3, 1000, 5000]) for _ in range(2000)]

    def work(collectives):
        wrong = 0
        for call, size in enumerate(sizes):
            x = torch.full((size,), float(call * (collectives.rank + 1)))
            collectives.all_reduce(x)
            wrong += int(not bool((x == 6.0 * call).all()))
        return wrong

    assert on_ranks(3, work) == [0, 0, 0]


@pytest.mark.parametrize(("rows", "columns"), [(1, 3), (5, 70_000), (2, FLOATS + 11), (0, 5)])
def test_columns_stand_in_the_order_of_the_ranks(rows, columns):
    def work(collectives):
        numbers = torch.arange(rows * columns, dtype=torch.float32).view(rows, columns)
        return collectives.gather_columns(numbers + 0.25 * collectives.rank)

    numbers = torch.arange(rows * columns, dtype=torch.float32).view(rows, columns)
    expected = torch.cat([numbers + 0.25 * rank for rank in range(2)], dim=1)
    for result in on_ranks(2, work):
        assert torch.equal(result, expected)


def test_a_rank_that_waits_in_vain_is_called_off():
    owner = SegmentOwner(2)
    alone = SharedMemoryCollectives(owner.segment, 0, never)
    try:
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(alone.all_reduce, torch.ones(4))
            owner.abort()
            with pytest.raises(EngineError, match="aborted"):
                waiting.result(timeout=60)
    finally:
        alone.close()
        owner.close()


def test_a_rank_whose_process_in_charge_is_gone_gives_up():
    owner = SegmentOwner(2)
    alone = SharedMemoryCollectives(owner.segment, 1, lambda: True)
    try:
        with pytest.raises(EngineError, match="aborted"):
            alone.all_reduce(torch.ones(4))
    finally:
        alone.close()
        owner.close()
