"""Tiled attention is the same attention, with the bytes of the score matrix spared."""

import pytest
import torch

from lmi_bench.engine.torch_backend.measure import AttentionShape, attend_in_tiles, attend_whole, measure_attention


def test_both_ways_are_the_causal_softmax_row_by_row():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 33, 8, dtype=torch.float64) for _ in range(3))
    by_row = torch.empty_like(q)
    for head in range(2):
        for row in range(33):
            seen = slice(0, row + 1)
            scores = k[0, head, seen] @ q[0, head, row] / 8**0.5
            weights = scores.exp() / scores.exp().sum()
            by_row[0, head, row] = weights @ v[0, head, seen]
    masked = torch.ones(33, 33, dtype=torch.bool).triu(1)
    torch.testing.assert_close(attend_whole(q, k, v, masked), by_row)
    torch.testing.assert_close(attend_in_tiles(q.float(), k.float(), v.float()), by_row.float())


def test_bytes_and_operations_by_hand():
    """2 heads of 4 values, 3 tokens, float32: Q, K, V, O of 3 * 2 * 4 * 4 bytes each; 2 * 9 scores
    of 4 bytes, passed 4 times; 2 * 6 unmasked scores of 4 * 4 operations."""
    shape = AttentionShape(tokens=3, heads=2, head_dim=4)
    assert shape.tiled_bytes(4) == 4 * 96
    assert shape.whole_bytes(4) == 4 * 96 + 4 * 72
    assert shape.flop == 12 * 16


def test_the_threads_of_others_are_left_as_they_were():
    before = torch.get_num_threads()
    times = measure_attention(AttentionShape(16, 1, 8), rounds=1, threads=before + 1)
    assert torch.get_num_threads() == before
    assert times.worst_difference == pytest.approx(0, abs=1e-5)
