"""Triton kernels of quantized products: weights become floats in registers.

A weight has a scale for each output and group of inputs, stored (groups, outputs). Of 4 bits, byte
i of an output's row has input i in its low half and input i + inputs / 2 in its high half; each
group has a zero too. Tiles of BLOCK_IN inputs divide groups and halves of rows.
"""

# mypy: ignore-errors
# a kernel is written in Triton's own language with Python's grammar

import triton
import triton.language as tl


@triton.jit
def _centred(stored, zeros_ptr, at, has_output, SHIFT: tl.constexpr, NIBBLES: tl.constexpr):
    """Whole numbers of 4 bits less their zero, or the stored values."""
    values = stored
    if NIBBLES:
        zeros = tl.load(zeros_ptr + at, mask=has_output, other=0)
        values = ((stored >> SHIFT) & 15).to(tl.int8) - zeros.to(tl.int8)[:, None]
    return values


@triton.jit
def _scaled(sums, scale_ptr, at, has_output):
    """Sums of (rows, outputs), each output times its scale."""
    scale = tl.load(scale_ptr + at, mask=has_output, other=0.0).to(tl.float32)
    return sums.to(tl.float32) * scale[None, :]


@triton.jit(do_not_specialize=["rows"])
def quantized_product_kernel(
    x_ptr,
    weight_ptr,
    scale_ptr,
    zeros_ptr,
    unit_ptr,
    out_ptr,
    rows,
    outputs,
    inputs,
    group_size,
    NIBBLES: tl.constexpr,
    GROUPED: tl.constexpr,
    ROUNDED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """One program per (block of outputs, block of rows, split of the inputs): its part of
    x @ weight.T, times the unit of each row if x is ROUNDED; int8 rows are summed in int32.

    x (rows, inputs); unit (rows,); out (SPLITS, rows, outputs)
    """
    ids = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    places = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    split = tl.program_id(2)
    has_output, has_row = ids < outputs, places < rows
    row = places.to(tl.int64)
    halves: tl.constexpr = 2 if NIBBLES else 1
    stored_inputs = inputs // halves
    tiles = stored_inputs // BLOCK_IN
    share = (tiles + SPLITS - 1) // SPLITS
    whole: tl.constexpr = x_ptr.dtype.element_ty == tl.int8
    total = tl.zeros((BLOCK_ROWS, BLOCK_OUT), tl.int32 if whole else tl.float32)
    for tile in range(split * share, tl.minimum(split * share + share, tiles)):
        k = tile * BLOCK_IN + tl.arange(0, BLOCK_IN)
        at = weight_ptr + ids.to(tl.int64)[:, None] * stored_inputs + k[None, :]
        stored = tl.load(at, mask=has_output[:, None], other=0.0)
        for half in tl.static_range(halves):
            first = half * stored_inputs
            x = tl.load(x_ptr + row[:, None] * inputs + first + k[None, :], mask=has_row[:, None], other=0.0)
            place = (first + tile * BLOCK_IN) // group_size * outputs + ids
            values = _centred(stored, zeros_ptr, place, has_output, 4 * half, NIBBLES)
            part = tl.dot(x, tl.trans(values.to(x.dtype)), input_precision="ieee")
            if GROUPED:
                part = _scaled(part, scale_ptr, place, has_output)
            total += part
    result = total.to(tl.float32)
    if not GROUPED:
        result = _scaled(total, scale_ptr, ids, has_output)
    if ROUNDED:
        result = result * tl.load(unit_ptr + places, mask=has_row, other=0.0)[:, None]
    tl.store(
        out_ptr + (split * rows + row[:, None]) * outputs + ids[None, :],
        result.to(out_ptr.dtype.element_ty),
        mask=has_row[:, None] & has_output[None, :],
    )


@triton.jit
def round_rows_kernel(x_ptr, rounded_ptr, unit_ptr, features, top, smallest, BLOCK: tl.constexpr):
    """One program per row: x / unit as int8 or float8, where the row's largest value is `top`."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < features
    x = tl.load(x_ptr + row * features + columns, mask=inside, other=0.0).to(tl.float32)
    unit = tl.maximum(tl.max(tl.abs(x), axis=0) / top, smallest)
    kind: tl.constexpr = rounded_ptr.dtype.element_ty
    x = x / unit
    if kind == tl.int8:
        x = (x + 12582912.0) - 12582912.0  # 1.5 * 2^23: to the nearest whole number, even if equal
    tl.store(rounded_ptr + row * features + columns, x.to(kind), mask=inside)
    tl.store(unit_ptr + row, unit)
