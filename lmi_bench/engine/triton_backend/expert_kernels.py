"""The Triton kernels of a mixture of experts: each expert's rows, and its products over them.

A pair is a row with one of its chosen experts: pair p is row p // experts per token.
"""

# mypy: ignore-errors
# a kernel is written in Triton's own language with Python's grammar

import triton
import triton.language as tl


@triton.jit
def list_pairs_kernel(chosen_ptr, listed_ptr, counts_ptr, pairs, BLOCK: tl.constexpr):
    """One program per expert: the pairs that chose it, in order, and their number.

    chosen  (pairs,); listed (experts, pairs); counts (experts,)
    """
    expert = tl.program_id(0)
    found = expert * 0
    for start in range(0, pairs, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        own = (tl.load(chosen_ptr + ids, mask=ids < pairs, other=-1) == expert).to(tl.int32)
        place = found + tl.cumsum(own, axis=0) - 1
        tl.store(listed_ptr + expert * pairs + place, ids, mask=own == 1)
        found += tl.sum(own, axis=0)
    tl.store(counts_ptr + expert, found)


@triton.jit
def expert_product_kernel(
    x_ptr,
    weight_ptr,
    factors_ptr,
    listed_ptr,
    counts_ptr,
    out_ptr,
    pairs,
    outputs,
    inputs,
    PAIRS_A_ROW: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
):
    """One program per (expert, block of outputs): the products of the expert's pairs.

    Gated: out = silu(x @ gate.T) * (x @ up.T), with up's rows behind gate's; else out =
    (x @ weight.T) * the pair's factor. x (pairs / PAIRS_A_ROW, inputs); weight (experts, outputs
    or twice as many, inputs); out (pairs, outputs)
    """
    expert = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    has_column = columns < outputs
    count = tl.load(counts_ptr + expert)
    matrix = weight_ptr + expert.to(tl.int64) * outputs * inputs * (2 if GATED else 1)
    for first in range(0, count, BLOCK_ROWS):
        places = first + tl.arange(0, BLOCK_ROWS)
        has_pair = places < count
        pair = tl.load(listed_ptr + expert * pairs + places, mask=has_pair, other=0)
        row = (pair // PAIRS_A_ROW).to(tl.int64)
        total = tl.zeros((BLOCK_ROWS, BLOCK_OUT), tl.float32)
        above = tl.zeros((BLOCK_ROWS, BLOCK_OUT), tl.float32)
        for start in range(0, inputs, BLOCK_IN):
            k = start + tl.arange(0, BLOCK_IN)
            inside = k < inputs
            x = tl.load(x_ptr + row[:, None] * inputs + k[None, :], mask=has_pair[:, None] & inside[None, :], other=0.0)
            at = matrix + columns[:, None] * inputs + k[None, :]
            read = has_column[:, None] & inside[None, :]
            weight = tl.load(at, mask=read, other=0.0)
            total += tl.dot(x, tl.trans(weight), input_precision="ieee")
            if GATED:
                weight = tl.load(at + outputs * inputs, mask=read, other=0.0)
                above += tl.dot(x, tl.trans(weight), input_precision="ieee")
        kind = x_ptr.dtype.element_ty
        if GATED:  # rounded where the layers' own products are
            wide = total.to(kind).to(tl.float32)
            result = (wide / (1.0 + tl.exp(-wide))).to(kind) * above.to(kind)
        else:
            factor = tl.load(factors_ptr + pair, mask=has_pair, other=0.0)
            result = total.to(kind).to(tl.float32) * factor[:, None]
        tl.store(
            out_ptr + pair.to(tl.int64)[:, None] * outputs + columns[None, :],
            result.to(out_ptr.dtype.element_ty),
            mask=has_pair[:, None] & has_column[None, :],
        )
