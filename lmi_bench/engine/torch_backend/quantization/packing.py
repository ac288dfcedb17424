"""Packs 3-bit and 4-bit values into bytes without padding, for fast unpacking.

A row's inputs are split into as many runs as values share a byte, and a byte has one value of each
run: unpacking takes one shift per run and no shuffling. 4 bits take 1/2 byte per weight, 3 bits 3/8
(two bits in one array, the third in another).
"""

from __future__ import annotations

import torch
from torch import Tensor


def pack_bits(values: Tensor, bits: int) -> Tensor:
    """Pack `8 / bits` values into each byte; bits is 1, 2 or 4.

    values   uint8 below 2^bits, shape (rows, columns), columns a multiple of 8 / bits
    returns  uint8, shape (rows, columns * bits / 8)
    """
    runs = values.chunk(8 // bits, dim=1)
    packed = runs[0].clone()
    for number, run in enumerate(runs[1:], start=1):
        packed |= run << (number * bits)
    return packed


def unpack_bits(packed: Tensor, bits: int) -> Tensor:
    """Inverse of `pack_bits`."""
    mask = 2**bits - 1
    return torch.cat([(packed >> shift) & mask for shift in range(0, 8, bits)], dim=1)


def pack_3bit(values: Tensor) -> tuple[Tensor, Tensor]:
    """The low two bits and the high bit of values below 8, packed separately."""
    return pack_bits(values & 3, 2), pack_bits(values >> 2, 1)


def unpack_3bit(low: Tensor, high: Tensor) -> Tensor:
    """Inverse of `pack_3bit`."""
    return unpack_bits(low, 2) | (unpack_bits(high, 1) << 2)


def pack_3bit_for_file(values: Tensor) -> Tensor:
    """Pack eight neighbouring values into three bytes, lowest bits first, so that a row can be
    split by bytes; shape (rows, columns) to (rows, columns * 3 / 8)."""
    runs = values.view(len(values), -1, 8).int()
    whole = sum(runs[..., number] << (3 * number) for number in range(8))
    assert isinstance(whole, Tensor)
    parts = [(whole >> shift) & 255 for shift in (0, 8, 16)]
    return torch.stack(parts, dim=-1).flatten(1).to(torch.uint8)


def unpack_3bit_from_file(packed: Tensor) -> Tensor:
    """Inverse of `pack_3bit_for_file`."""
    parts = packed.view(len(packed), -1, 3).int()
    whole = parts[..., 0] | (parts[..., 1] << 8) | (parts[..., 2] << 16)
    values = [(whole >> (3 * number)) & 7 for number in range(8)]
    return torch.stack(values, dim=-1).flatten(1).to(torch.uint8)
