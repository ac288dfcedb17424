"""Each Triton kernel, in Triton's interpreter, against torch's own operators."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional

from lmi_bench.engine.torch_backend.kv_cache import KvLayoutShape, slots_of
from lmi_bench.engine.torch_backend.layers import DenseMlp, ExpertMlp, PlainLinear, RmsNorm, Router
from lmi_bench.engine.triton_backend import experts as grouped
from lmi_bench.engine.triton_backend import ops

PAGE = 16
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" or not torch.cuda.is_available()


@pytest.fixture(autouse=True)
def on_the_device():
    with torch.device("cpu" if INTERPRETED else "cuda"):
        yield


def random(*size: int, seed: int = 0) -> torch.Tensor:
    numbers = torch.randn(*size, generator=torch.Generator().manual_seed(seed), device="cpu")
    return numbers.to(torch.get_default_device())


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("features", [64, 96])
def test_residuals_are_added_in_place_and_the_sum_is_normalised(features):
    x, delta, weight = random(3, features), random(3, features, seed=1), random(features, seed=2)
    norm = RmsNorm((weight,), 1e-5)
    expected = x + delta
    kept = x.clone()
    close(ops.add_rms_norm(x, delta, norm), functional.rms_norm(expected, (features,), weight, 1e-5))
    close(x, expected)
    close(ops.add_rms_norm(kept, None, norm), functional.rms_norm(kept, (features,), weight, 1e-5))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "window", "splits"),
    [(4, 4, None, 1), (4, 2, None, 4), (4, 2, 20, 1), (3, 1, None, 2), (3, 1, 20, 4)],
)
def test_paged_attention_is_softmax_over_what_each_row_sees(heads, kv_heads, window, splits):
    """Contexts of one token, of a page's border, and of several pages in scattered blocks."""
    head_dim, contexts = 24, (1, 16, 17, 60)
    cache = (20, kv_heads, PAGE, head_dim)
    keys, values = random(*cache), random(*cache, seed=1)
    order = torch.randperm(20, generator=torch.Generator().manual_seed(2), device="cpu")
    tables = order[:16].view(4, 4).to(torch.get_default_device())
    q = random(4, heads, head_dim, seed=3)
    got = ops.paged_attention(q, (keys, values), tables, torch.tensor(contexts) - 1, window=window, splits=splits)
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
        pages.view(2, 4, kv_heads, 16, head_dim).transpose(1, 2).reshape(2, kv_heads, 64, head_dim) for pages in small
    ]
    positions = torch.tensor([60, 17])
    for window, splits in ((None, 1), (None, 4), (20, 2)):
        got, expected = (
            ops.paged_attention(q, pages, tables, positions, window=window, splits=splits)
            for pages, tables in ((large, torch.tensor([[0], [1]])), (small, torch.arange(8).view(2, 4)))
        )
        close(got, expected)


@pytest.mark.parametrize("normed", [False, True])
def test_queries_and_keys_are_turned_and_cached_where_the_slots_say(normed):
    heads, kv_heads, head_dim = 4, 2, 8
    qkv = random(2, (heads + 2 * kv_heads) * head_dim)
    angles = random(2, head_dim // 2, seed=1)
    cos = torch.cat((angles.cos(), angles.cos()), dim=-1)
    sin = torch.cat((-angles.sin(), angles.sin()), dim=-1)
    keys, values = torch.zeros(2, 5, kv_heads, PAGE, head_dim)
    layout = KvLayoutShape(1, kv_heads, head_dim, PAGE, torch.float32)
    slots = slots_of(torch.tensor([1, 2]), torch.tensor([1, 5]), layout)
    norm = RmsNorm((random(heads + kv_heads, head_dim, seed=4),), 1e-3) if normed else None
    turned = ops.turn_and_store(qkv, norm, (cos, sin), slots, (keys, values), heads)
    each = qkv.view(2, -1, head_dim)
    before = each[:, : heads + kv_heads]
    if norm is not None:
        before = functional.rms_norm(before, (head_dim,), eps=norm.eps) * norm.tensors[0]
    first, second = before.chunk(2, dim=-1)
    cosine, sine = angles.cos()[:, None], angles.sin()[:, None]
    expected = torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)
    close(turned, expected)
    for row, (block, offset) in enumerate(((1, 1), (2, 5))):
        close(keys[block, :, offset], turned[row, heads:])
        close(values[block, :, offset], each[row, heads + kv_heads :])
    assert int((keys != 0).any(dim=-1).sum()) == 2 * kv_heads  # and nowhere else


def test_silu_multiply_is_swiglus_middle():
    gate_up = random(3, 2 * 40)
    gate, up = gate_up.chunk(2, dim=-1)
    close(ops.silu_multiply(gate_up), functional.silu(gate) * up)


@pytest.mark.parametrize(("rows", "few"), [(1, True), (3, True), (40, True), (200, False)])
def test_each_pair_of_a_row_and_its_expert_is_computed_once(monkeypatch, rows, few):
    """Experts of one, several and no row; more pairs than are listed or multiplied at once."""
    monkeypatch.setattr(grouped, "_LISTED_AT_ONCE", 16)
    if not few:  # in two stages, float32 fits too
        tile = grouped._TILES[False] | {"num_stages": 2}
        monkeypatch.setattr(grouped, "_TILES", {True: tile})
    hidden, inner, count, per_token = 48, 80, 6, 2
    experts = [
        DenseMlp(
            *(
                PlainLinear(random(*size, seed=10 * number + place) / 7)
                for place, size in enumerate([(inner, hidden)] * 2 + [(hidden, inner)])
            )
        )
        for number in range(count)
    ]
    spec = SimpleNamespace(experts_per_token=per_token, renormalise=True, routed_scale=1.0)
    router = Router(PlainLinear(random(count, hidden, seed=99)), spec)
    mlp = ExpertMlp(router, experts, lambda x: x)
    x, residual = random(rows, hidden, seed=5), random(rows, hidden, seed=6)
    expected = mlp.add(x, residual)
    mlp.grouped = grouped.StackedExperts(mlp)
    torch.testing.assert_close(mlp.add(x, residual), expected, rtol=1e-4, atol=1e-4)
    base = {
        getattr(expert, name).weight.untyped_storage().data_ptr()
        for expert in experts
        for name in ("gate", "up", "down")
    }
    assert len(base) == 2  # nothing is held twice
