"""The Triton kernels of a decode step, with one row per sequence.

Head sizes that are not powers of two are padded inside a kernel. With TRITON_INTERPRET=1, set
before this module is imported, the kernels run on a CPU, which allows comparing them with torch
without a GPU.
"""

# mypy: ignore-errors
# a kernel is written in Triton's own language with Python's grammar

import triton
import triton.language as tl


@triton.jit
def add_rms_norm_kernel(
    x_ptr, delta_ptr, weight_ptr, normed_ptr, features, eps, HAS_DELTA: tl.constexpr, BLOCK: tl.constexpr
):
    """One program per row: x += delta, if given; normed = rms_norm(x) * weight."""
    row = tl.program_id(0).to(tl.int64)  # offsets of a long prompt exceed 32 bits
    columns = tl.arange(0, BLOCK)
    inside = columns < features
    x = tl.load(x_ptr + row * features + columns, mask=inside, other=0.0)
    if HAS_DELTA:
        x += tl.load(delta_ptr + row * features + columns, mask=inside, other=0.0)
        tl.store(x_ptr + row * features + columns, x, mask=inside)
    wide = x.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, axis=0) / features + eps)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0)
    normed = (wide * scale).to(x.dtype) * weight
    tl.store(normed_ptr + row * features + columns, normed, mask=inside)


@triton.jit
def turn_and_store_kernel(
    qkv_ptr,
    norm_ptr,
    cos_ptr,
    sin_ptr,
    slots_ptr,
    turned_ptr,
    keys_ptr,
    values_ptr,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HAS_NORM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per (row, head): normalise queries and keys, if asked, and rotate them; store
    keys and values into the cache.

    qkv     (rows, HEADS + 2 * KV_HEADS, HEAD_DIM); norm (HEADS + KV_HEADS, HEAD_DIM)
    cos, sin (rows, HEAD_DIM), sines signed
    turned  (rows, HEADS + KV_HEADS, HEAD_DIM)
    slots   (rows, KV_HEADS), counted in head_dim vectors of keys and values
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    columns = tl.arange(0, BLOCK)
    inside = columns < HEAD_DIM
    source = qkv_ptr + (row * (HEADS + 2 * KV_HEADS) + head) * HEAD_DIM
    x = tl.load(source + columns, mask=inside, other=0.0)
    if head < HEADS + KV_HEADS:
        others = (columns + HEAD_DIM // 2) % HEAD_DIM
        other = tl.load(source + others, mask=inside, other=0.0)
        if HAS_NORM:
            wide = x.to(tl.float32)
            scale = 1.0 / tl.sqrt(tl.sum(wide * wide, axis=0) / HEAD_DIM + eps)
            norm = norm_ptr + head * HEAD_DIM
            x = (wide * scale).to(x.dtype) * tl.load(norm + columns, mask=inside, other=0.0)
            other = (other.to(tl.float32) * scale).to(x.dtype) * tl.load(norm + others, mask=inside, other=0.0)
        cos = tl.load(cos_ptr + row * HEAD_DIM + columns, mask=inside, other=0.0)
        sin = tl.load(sin_ptr + row * HEAD_DIM + columns, mask=inside, other=0.0)
        x = ((x * cos).to(tl.float32) + other.to(tl.float32) * sin.to(tl.float32)).to(x.dtype)
        target = turned_ptr + (row * (HEADS + KV_HEADS) + head) * HEAD_DIM
        tl.store(target + columns, x, mask=inside)
    if head >= HEADS:
        cache = keys_ptr
        kv_head = head - HEADS
        if kv_head >= KV_HEADS:
            cache = values_ptr
            kv_head -= KV_HEADS
        slot = tl.load(slots_ptr + row * KV_HEADS + kv_head)
        new = x
        if keys_ptr.dtype.element_ty == tl.float8e4nv:
            new = tl.minimum(tl.maximum(x.to(tl.float32), -448.0), 448.0)
        new = new.to(keys_ptr.dtype.element_ty)
        tl.store(cache + slot * HEAD_DIM + columns, new, mask=inside)


@triton.jit
def paged_attention_kernel(
    q_ptr,
    keys_ptr,
    values_ptr,
    tables_ptr,
    positions_ptr,
    sums_ptr,
    tops_ptr,
    weights_ptr,
    q_stride,
    pages,
    window,
    scale,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """One program per (row, KV head, split): attention over its share of the row's tokens, with a
    running maximum. A key is read once for all query heads of its group.

    q_stride values from a row of q (rows, HEADS, HEAD_DIM) to the next
    TILE     tokens read at once, part of a page, so that shared memory does not grow with the page
    window   tokens that a row sees, including itself; 0: all
    sums     (rows, KV_HEADS, SPLITS, group, HEAD_DIM) float32: values weighted by exp(score - top)
    tops, weights  (rows, KV_HEADS, SPLITS, group): each split's top score and sum of weights
    """
    row, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    group: tl.constexpr = HEADS // KV_HEADS
    heads = tl.arange(0, GROUP_BLOCK)
    columns = tl.arange(0, DIM_BLOCK)
    tokens = tl.arange(0, TILE)
    has_head = heads < group
    has_column = columns < HEAD_DIM
    query_rows = row * q_stride + (kv_head * group + heads) * HEAD_DIM
    q = tl.load(q_ptr + query_rows[:, None] + columns[None, :], mask=has_head[:, None] & has_column[None, :], other=0.0)
    context = tl.load(positions_ptr + row) + 1
    first_token = context * 0
    if window > 0:
        first_token = tl.maximum(context - window, 0)
    first_tile = first_token // TILE
    last_tile = (context + TILE - 1) // TILE
    share = (last_tile - first_tile + SPLITS - 1) // SPLITS
    start = first_tile + split * share
    stop = tl.minimum(start + share, last_tile)
    top = tl.full((GROUP_BLOCK,), -1.0e30, tl.float32)
    weight = tl.zeros((GROUP_BLOCK,), tl.float32)
    total = tl.zeros((GROUP_BLOCK, DIM_BLOCK), tl.float32)
    for tile in range(start, stop):
        position = tile * TILE + tokens
        block = tl.load(tables_ptr + row * pages + tile * TILE // PAGE)
        place = ((block * KV_HEADS + kv_head) * PAGE + position % PAGE) * HEAD_DIM
        at = place[:, None] + columns[None, :]
        key = tl.load(keys_ptr + at, mask=has_column[None, :], other=0.0).to(q.dtype)
        scores = tl.dot(q, tl.trans(key), input_precision="ieee") * scale
        seen = (position < context) & (position >= first_token)
        scores = tl.where(seen[None, :], scores, -1.0e30)
        higher = tl.maximum(top, tl.max(scores, axis=1))
        shrink = tl.exp(top - higher)
        share_of = tl.where(seen[None, :], tl.exp(scores - higher[:, None]), 0.0)
        value = tl.load(values_ptr + at, mask=has_column[None, :], other=0.0).to(q.dtype)
        total = total * shrink[:, None]
        total += tl.dot(share_of.to(q.dtype), value, input_precision="ieee")
        weight = weight * shrink + tl.sum(share_of, axis=1)
        top = higher
    at_split = ((row * KV_HEADS + kv_head) * SPLITS + split) * group + heads
    tl.store(tops_ptr + at_split, top, mask=has_head)
    tl.store(weights_ptr + at_split, weight, mask=has_head)
    tl.store(
        sums_ptr + at_split[:, None] * HEAD_DIM + columns[None, :], total, mask=has_head[:, None] & has_column[None, :]
    )


@triton.jit
def join_splits_kernel(
    sums_ptr,
    tops_ptr,
    weights_ptr,
    out_ptr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """One program per (row, head): rescale the splits' sums to one maximum, add, normalise."""
    row, head = tl.program_id(0), tl.program_id(1)
    group: tl.constexpr = HEADS // KV_HEADS
    splits = tl.arange(0, SPLITS)
    columns = tl.arange(0, DIM_BLOCK)
    has_column = columns < HEAD_DIM
    places = ((row * KV_HEADS + head // group) * SPLITS + splits) * group + head % group
    tops = tl.load(tops_ptr + places)
    factors = tl.exp(tops - tl.max(tops, axis=0))
    weight = tl.sum(tl.load(weights_ptr + places) * factors, axis=0)
    sums = tl.load(sums_ptr + places[:, None] * HEAD_DIM + columns[None, :], mask=has_column[None, :], other=0.0)
    out = tl.sum(sums * factors[:, None], axis=0) / weight
    tl.store(out_ptr + (row * HEADS + head) * HEAD_DIM + columns, out.to(out_ptr.dtype.element_ty), mask=has_column)


@triton.jit
def silu_multiply_kernel(gate_up_ptr, out_ptr, features, BLOCK: tl.constexpr):
    """out = silu(gate) * up; gate_up (rows, 2 * features), out (rows, features)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < features
    gate = tl.load(gate_up_ptr + row * 2 * features + columns, mask=inside, other=0.0)
    up = tl.load(gate_up_ptr + (row * 2 + 1) * features + columns, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    silu = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
    tl.store(out_ptr + row * features + columns, silu * up, mask=inside)
