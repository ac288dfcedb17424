"""Rounds weight matrices and dequantizes them, without kernels.

A weight has shape (outputs, inputs) and is rounded from float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

FP8: Final = torch.float8_e4m3fn
FP8_MAX: Final = 448.0
_SMALLEST_SCALE: Final = 1e-8


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """w = values * scale. values: int8; scale: float32, shape (outputs,)."""

    values: Tensor
    scale: Tensor

    def floats(self) -> Tensor:
        """The dequantized weight, float32."""
        return self.values * self.scale[:, None]


@dataclass(frozen=True, slots=True)
class GroupedWeight:
    """w = (values - zeros) * scale, with a scale and a zero per group of neighbouring inputs.

    values       uint8, 0 to 2^bits - 1, shape (outputs, inputs)
    scale        float32, shape (outputs, groups); zeros: uint8, same shape
    """

    values: Tensor
    scale: Tensor
    zeros: Tensor
    bits: int

    @property
    def group_size(self) -> int:
        """Inputs that share a scale."""
        return self.values.shape[1] // self.scale.shape[1]

    def floats(self) -> Tensor:
        """The dequantized weight, float32."""
        rows, groups = self.scale.shape
        centred = self.values.view(rows, groups, -1).float() - self.zeros[..., None]
        return (centred * self.scale[..., None]).view(rows, -1)


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """w = values * scale. values: float8_e4m3fn; scale: float32, shape (outputs,)."""

    values: Tensor
    scale: Tensor

    def floats(self) -> Tensor:
        """The dequantized weight, float32."""
        return self.values.float() * self.scale[:, None]


QuantizedWeight = Int8Weight | GroupedWeight | Fp8Weight


def round_int8(weight: Tensor, *, per_channel: bool = True) -> Int8Weight:
    """Round symmetrically to -127 .. 127, with a scale per output or one for all."""
    largest = weight.abs().amax(dim=1) if per_channel else weight.abs().amax().expand(len(weight))
    scale = (largest / 127).clamp_min(_SMALLEST_SCALE)
    values = (weight / scale[:, None]).round_().clamp_(-127, 127).to(torch.int8)
    return Int8Weight(values, scale.contiguous())


def round_grouped(weight: Tensor, bits: int, group_size: int) -> GroupedWeight:
    """Round asymmetrically with a scale and a zero per `group_size` inputs, as AWQ's code does.

    scale = (max - min) / (2^bits - 1), zero = -round(min / scale); 0 is kept exactly
    """
    rows, columns = weight.shape
    groups = weight.reshape(rows, columns // group_size, group_size)
    # a group with one sign would have its zero outside 0 .. top: extend the range to 0
    high, low = groups.amax(dim=-1).clamp_min_(0), groups.amin(dim=-1).clamp_max_(0)
    top = 2**bits - 1
    scale = ((high - low) / top).clamp_min_(_SMALLEST_SCALE)
    zeros = (-(low / scale).round_()).clamp_(0, top)
    values = (groups / scale[..., None]).round_().add_(zeros[..., None]).clamp_(0, top)
    return GroupedWeight(values.view(rows, columns).to(torch.uint8), scale, zeros.byte(), bits)


def round_fp8(weight: Tensor) -> Fp8Weight:
    """Round to float8; each output's largest value becomes 448, the largest in E4M3."""
    scale = (weight.abs().amax(dim=1) / FP8_MAX).clamp_min(_SMALLEST_SCALE)
    return Fp8Weight((weight / scale[:, None]).to(FP8), scale)


def fit_group_size(sizes: tuple[int, ...], candidates: tuple[int, ...]) -> int | None:
    """The first candidate that divides all sizes; None if none does."""
    for candidate in candidates:
        if all(size % candidate == 0 for size in sizes):
            return candidate
    return None
