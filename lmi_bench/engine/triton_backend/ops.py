"""The kernels as functions of tensors, which choose grids and allocate results.

Launches depend only on shapes, never on data, so that all of them can be captured in a graph.
"""

import math
from typing import Any, Final

import torch
import triton
from torch import Tensor

from lmi_bench.engine.torch_backend.layers import Norm
from lmi_bench.engine.triton_backend import kernels

_LEAST_DOT: Final = 16  # minimum side of a tensor core's operand
_TILE: Final = 64
_SILU_BLOCK: Final = 1024
_PROGRAMS: Final = 512
"""Attention programs that keep a large GPU busy; more splits only add joining cost."""

_next_power: Any = triton.next_power_of_2


def add_rms_norm(x: Tensor, delta: Tensor | None, norm: Norm) -> Tensor:
    """x += delta in place, then its RMS norm; x, delta and the result (rows, features)."""
    rows, features = x.shape
    normed = torch.empty_like(x)
    kernels.add_rms_norm_kernel[(rows,)](
        x,
        x if delta is None else delta,
        norm.tensors[0],
        normed,
        features,
        norm.eps,
        HAS_DELTA=delta is not None,
        BLOCK=_next_power(features),
    )
    return normed


def turn_and_store(
    qkv: Tensor,
    norm: Norm | None,
    turn: tuple[Tensor, Tensor],
    slots: Tensor,
    pages: tuple[Tensor, Tensor],
    num_heads: int,
) -> Tensor:
    """Normalise and rotate queries and keys, and store keys and values into their pages.

    qkv    shape (rows, (heads + 2 * kv_heads) * head_dim)
    norm   an RMS norm with weights of shape (heads + kv_heads, head_dim)
    turn   cosines and signed sines, shape (rows, head_dim) each
    slots  shape (rows * kv_heads,), from `slots_of`
    pages  keys and values, shape (blocks, kv_heads, page, head_dim)
    returns  queries and keys, shape (rows, heads + kv_heads, head_dim)
    """
    _, kv_heads, _, head_dim = pages[0].shape
    rows = qkv.shape[0]
    turned = qkv.new_empty(rows, num_heads + kv_heads, head_dim)
    weight, eps = (qkv, 0.0) if norm is None else (norm.tensors[0], norm.eps)
    kernels.turn_and_store_kernel[(rows, num_heads + 2 * kv_heads)](
        qkv,
        weight,
        *turn,
        slots,
        turned,
        *pages,
        eps,
        HEADS=num_heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        HAS_NORM=norm is not None,
        BLOCK=_next_power(head_dim),
    )
    return turned


def splits_for(rows: int, kv_heads: int, pages: int) -> int:
    """Number of programs per row's context: a power of two, fixed for a shape."""
    wanted = max(1, _PROGRAMS // (rows * kv_heads))
    return 1 << int(math.log2(min(wanted, pages, 64)))


def paged_attention(
    q: Tensor, pages: tuple[Tensor, Tensor], block_tables: Tensor, positions: Tensor, *, window: int | None, splits: int
) -> Tensor:
    """Attention of each row over its own context, through its block table: (rows, heads *
    head_dim).

    q             shape (rows, heads, head_dim), a row's heads side by side
    pages         keys and values, shape (blocks, kv_heads, page, head_dim), page a power of two
                  >= 16
    block_tables  shape (rows, pages per row)
    positions     shape (rows,): each row sees tokens up to its own position
    splits        a power of two
    """
    rows, heads, head_dim = q.shape
    _, kv_heads, page, _ = pages[0].shape
    group = heads // kv_heads
    sums = torch.empty(rows, kv_heads, splits, group, head_dim, device=q.device)
    tops = torch.empty(rows, kv_heads, splits, group, device=q.device)
    weights = torch.empty_like(tops)
    dim_block = max(_LEAST_DOT, _next_power(head_dim))
    sizes = {"HEADS": heads, "KV_HEADS": kv_heads, "HEAD_DIM": head_dim}
    kernels.paged_attention_kernel[(rows, kv_heads, splits)](
        q,
        *pages,
        block_tables,
        positions,
        sums,
        tops,
        weights,
        q.stride(0),
        block_tables.shape[1],
        window or 0,
        head_dim**-0.5,
        **sizes,
        PAGE=page,
        TILE=min(page, _TILE),
        GROUP_BLOCK=max(_LEAST_DOT, _next_power(group)),
        DIM_BLOCK=dim_block,
        SPLITS=splits,
    )
    out = q.new_empty(q.shape)
    kernels.join_splits_kernel[(rows, heads)](sums, tops, weights, out, **sizes, DIM_BLOCK=dim_block, SPLITS=splits)
    return out.view(rows, -1)


def silu_multiply(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for rows of [gate, up]: (rows, 2 * features) to (rows, features)."""
    rows, both = gate_up.shape
    features = both // 2
    out = gate_up.new_empty(rows, features)
    kernels.silu_multiply_kernel[(rows, triton.cdiv(features, _SILU_BLOCK))](gate_up, out, features, BLOCK=_SILU_BLOCK)
    return out
