"""Products with 3-bit or 4-bit weights with a scale and a zero for each group of inputs."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from lmi_bench.engine.torch_backend.quantization.linear import QuantizedLinear, UnpackedLinear
from lmi_bench.engine.torch_backend.quantization.packing import (
    pack_3bit,
    pack_bits,
    unpack_3bit,
    unpack_bits,
)
from lmi_bench.engine.torch_backend.quantization.rounding import GroupedWeight

KERNEL_GROUP_SIZES: Final = (32, 64, 128, 256)
KERNEL_PANEL: Final = 64
"""Outputs per panel in the kernel's AVX-512 layout."""
_PANELS_AT_ONCE: Final = 8
_MIDDLE: Final = 8  # the kernel's values are relative to the middle of 0 .. 15


class Grouped4BitLinear(UnpackedLinear):
    """4-bit weights, unpacked at every call: for any device and format."""

    def __init__(self, weight: GroupedWeight, bias: Tensor | None) -> None:
        super().__init__((weight.values.shape[0], weight.values.shape[1]), bias)
        self._packed = pack_bits(weight.values, 4)
        self._scale = weight.scale.half()
        self._zeros = weight.zeros

    @property
    def nbytes(self) -> int:
        return self._packed.nbytes + self._scale.nbytes + self._zeros.nbytes

    def rows(self, first: int, last: int, dtype: torch.dtype) -> Tensor:
        values = unpack_bits(self._packed[first:last], 4)
        return _floats(values, self._scale[first:last], self._zeros[first:last], dtype)


class Grouped3BitLinear(UnpackedLinear):
    """3-bit weights, unpacked at every call: no kernel reads them directly."""

    def __init__(self, weight: GroupedWeight, bias: Tensor | None) -> None:
        super().__init__((weight.values.shape[0], weight.values.shape[1]), bias)
        self._low, self._high = pack_3bit(weight.values)
        self._scale = weight.scale.half()
        self._zeros = weight.zeros

    @property
    def nbytes(self) -> int:
        parts = (self._low, self._high, self._scale, self._zeros)
        return sum(part.nbytes for part in parts)

    def rows(self, first: int, last: int, dtype: torch.dtype) -> Tensor:
        values = unpack_3bit(self._low[first:last], self._high[first:last])
        return _floats(values, self._scale[first:last], self._zeros[first:last], dtype)


def _floats(values: Tensor, scale: Tensor, zeros: Tensor, dtype: torch.dtype) -> Tensor:
    """(values - zeros) * scale, group by group; shape of `values`."""
    rows, groups = scale.shape
    # the zero is an integer: scale * values - scale * zero in float32 is as exact
    wide = values.view(rows, groups, -1).float()
    scale = scale.float()
    offset = (scale * zeros).neg_()
    return wide.mul_(scale[..., None]).add_(offset[..., None]).view(rows, -1).to(dtype)


class Grouped4BitByKernel(QuantizedLinear):
    """4-bit weights with torch's CPU kernel, built for few rows; many rows are multiplied with
    floats unpacked from the same bytes.

    The kernel takes bfloat16 rows and scales. Its AVX-512 layout: panels of 64 outputs with 32
    bytes per input; byte i has output i in its low half and i + 32 in its high one.
    `kernel_layout_is_known` checks this on the machine.
    """

    def __init__(self, weight: GroupedWeight, bias: Tensor | None, *, kernel_rows: int) -> None:
        """kernel_rows  maximum rows for the kernel"""
        outputs, inputs = weight.values.shape
        super().__init__((outputs, inputs), bias)
        self._packed = pack_for_kernel(weight.values)
        self._group_size = weight.group_size
        self._kernel_rows = kernel_rows
        offset = (_MIDDLE - weight.zeros.float()) * weight.scale
        pairs = torch.stack((weight.scale, offset), dim=-1).transpose(0, 1)
        self._scales_and_offsets = pairs.to(torch.bfloat16).contiguous()

    @property
    def nbytes(self) -> int:
        return self._packed.nbytes + self._scales_and_offsets.nbytes

    def product(self, x: Tensor) -> Tensor:
        if x.shape[0] <= self._kernel_rows:
            kernel: Any = torch.ops.aten._weight_int4pack_mm_for_cpu
            y: Tensor = kernel(
                x.bfloat16(), self._packed, self._group_size, self._scales_and_offsets
            )
            return y.to(x.dtype)
        return self._by_floats(x)

    def _by_floats(self, x: Tensor) -> Tensor:
        outputs, inputs = self.shape
        groups = inputs // self._group_size
        panels = outputs // KERNEL_PANEL
        packed = self._packed.view(panels, groups, self._group_size, KERNEL_PANEL // 2)
        pairs = self._scales_and_offsets.view(groups, panels, KERNEL_PANEL, 2).float()
        scale, offset = (part.transpose(0, 1)[:, :, None] for part in pairs.unbind(-1))
        y = x.new_empty(len(x), panels, KERNEL_PANEL)
        half = KERNEL_PANEL // 2
        buffer = x.new_empty(
            (min(_PANELS_AT_ONCE, panels), groups, self._group_size, KERNEL_PANEL),
            dtype=torch.float32,
        )
        for first in range(0, panels, _PANELS_AT_ONCE):
            part = packed[first : first + _PANELS_AT_ONCE]
            floats = buffer[: len(part)]
            floats[..., :half] = part & 15
            floats[..., half:] = part >> 4
            last = first + len(part)
            floats.sub_(_MIDDLE).mul_(scale[first:last]).add_(offset[first:last])
            weights = floats.view(len(part), inputs, KERNEL_PANEL).to(x.dtype)
            y[:, first:last] = torch.matmul(x, weights).transpose(0, 1)
        return y.view(len(x), outputs)


def pack_for_kernel(values: Tensor) -> Tensor:
    """Values below 16, shape (outputs, inputs), in the layout of torch's CPU kernel."""
    convert: Any = torch.ops.aten._convert_weight_to_int4pack_for_cpu
    packed: Tensor = convert(values.int(), 1)
    return packed


def kernel_layout_is_known() -> bool:
    """True if torch's 4-bit layout on this processor is the one of `Grouped4BitByKernel`."""
    if not hasattr(torch.ops.aten, "_weight_int4pack_mm_for_cpu"):
        return False
    values = torch.arange(2 * KERNEL_PANEL * 32, dtype=torch.int32).view(-1, 32).mul_(7) % 16
    try:
        packed = pack_for_kernel(values.to(torch.uint8))
    except RuntimeError:
        return False
    if packed.dtype != torch.uint8 or packed.numel() != values.numel() // 2:
        return False
    panels = packed.view(2, 32, KERNEL_PANEL // 2)
    unpacked = torch.cat((panels & 15, panels >> 4), dim=-1).transpose(1, 2).reshape(-1, 32)
    return bool(torch.equal(unpacked.int(), values))
