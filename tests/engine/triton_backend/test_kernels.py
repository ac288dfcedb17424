"""Each Triton kernel, in Triton's interpreter, against torch's own operators."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from lmi_bench.engine.triton_backend import ops

PAGE = 16


def random(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("features", [64, 96])
def test_residuals_are_added_in_place_and_the_sum_is_normalised(features):
    x, delta, weight = random(3, features), random(3, features, seed=1), random(features, seed=2)
    expected = x + delta
    kept = x.clone()
    close(
        ops.add_rms_norm(x, delta, weight, 1e-5),
        functional.rms_norm(expected, (features,), weight, 1e-5),
    )
    close(x, expected)
    close(
        ops.add_rms_norm(kept, None, weight, 1e-5),
        functional.rms_norm(kept, (features,), weight, 1e-5),
    )


@pytest.mark.parametrize(
    ("heads", "kv_heads", "window", "splits"),
    [(4, 4, None, 1), (4, 2, None, 4), (4, 2, 20, 1), (3, 1, None, 2), (3, 1, 20, 4)],
)
def test_paged_attention_is_softmax_over_what_each_row_sees(heads, kv_heads, window, splits):
    """Contexts of one token, of a page's border, and of several pages in scattered blocks."""
    head_dim, contexts = 24, (1, 16, 17, 60)
    cache = (20, kv_heads, PAGE, head_dim)
    keys, values = random(*cache), random(*cache, seed=1)
    tables = torch.randperm(20, generator=torch.Generator().manual_seed(2))[:16].view(4, 4)
    q = random(4, heads, head_dim, seed=3)
    got = ops.paged_attention(
        q, (keys, values), tables, torch.tensor(contexts) - 1, window=window, splits=splits
    )
    for row, context in enumerate(contexts):
        first = 0 if window is None else max(0, context - window)
        seen = [
            pages[tables[row]].transpose(0, 1).reshape(kv_heads, -1, head_dim)[:, first:context]
            for pages in (keys, values)
        ]
        expected = functional.scaled_dot_product_attention(
            q[row][:, None], *(each.repeat_interleave(heads // kv_heads, dim=0) for each in seen)
        )
        close(got[row], expected.reshape(-1))


def test_a_page_is_read_in_tiles(monkeypatch):
    """Pages of 64 tokens, 16 at a time: what comes out is what pages of 16 give."""
    monkeypatch.setattr(ops, "_TILE", 16)
    q, kv_heads, head_dim = random(2, 4, 24, seed=3), 2, 24
    small = random(8, kv_heads, 16, head_dim), random(8, kv_heads, 16, head_dim, seed=1)
    large = [
        pages.view(2, 4, kv_heads, 16, head_dim).transpose(1, 2).reshape(2, kv_heads, 64, head_dim)
        for pages in small
    ]
    positions = torch.tensor([60, 17])
    for window, splits in ((None, 1), (None, 4), (20, 2)):
        got, expected = (
            ops.paged_attention(q, pages, tables, positions, window=window, splits=splits)
            for pages, tables in (
                (large, torch.tensor([[0], [1]])),
                (small, torch.arange(8).view(2, 4)),
            )
        )
        close(got, expected)


def test_queries_and_keys_are_turned_and_cached_where_the_table_says():
    heads, kv_heads, head_dim = 4, 2, 8
    qkv = random(2, (heads + 2 * kv_heads) * head_dim)
    angles = random(2, head_dim // 2, seed=1)
    cos = torch.cat((angles.cos(), angles.cos()), dim=-1)
    sin = torch.cat((-angles.sin(), angles.sin()), dim=-1)
    keys, values = torch.zeros(2, 5, kv_heads, PAGE, head_dim)
    tables, positions = torch.tensor([[3, 1], [2, 4]]), torch.tensor([17, 5])
    q = ops.turn_and_store(qkv, (cos, sin), positions, tables, (keys, values), heads)
    each = qkv.view(2, -1, head_dim)
    first, second = each.chunk(2, dim=-1)
    cosine, sine = angles.cos()[:, None], angles.sin()[:, None]
    turned = torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)
    close(q, turned[:, :heads])
    for row, (block, offset) in enumerate(((1, 1), (2, 5))):
        close(keys[block, :, offset], turned[row, heads : heads + kv_heads])
        close(values[block, :, offset], each[row, heads + kv_heads :])
    assert int((keys != 0).any(dim=-1).sum()) == 2 * kv_heads  # and nowhere else


def test_silu_multiply_is_swiglus_middle():
    gate_up = random(3, 2 * 40)
    gate, up = gate_up.chunk(2, dim=-1)
    close(ops.silu_multiply(gate_up), functional.silu(gate) * up)


@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 64, 7), (2, 1100, 9)])
def test_a_product_of_few_rows_is_the_matrix_product(rows, inputs, outputs):
    x, weight = random(rows, inputs), random(outputs, inputs, seed=1)
    torch.testing.assert_close(ops.skinny_linear(x, weight), x @ weight.T, rtol=1e-4, atol=1e-4)


def test_of_equal_logits_the_first_token_is_likeliest():
    """Equal ones in one part of the vocabulary and in two."""
    logits = torch.zeros(3, 9000)
    logits[0, [7, 4000]] = 1.0
    logits[1, [5000, 8999]] = 2.0
    logits[2, 8999] = 3.0
    assert ops.likeliest(logits).tolist() == [7, 5000, 8999]
