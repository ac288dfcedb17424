"""Linear layers with quantized weights on a GPU, by Triton's kernels and torch's products of bytes.

Launches depend only on shapes, never on data, so that all of them can be captured in a graph.
"""

import math
from typing import Final

import torch
import triton
from torch import Tensor
from torch.nn import functional

from lmi_bench.engine.torch_backend.quantization import gpu_kernels, linear, rounding

_LEAST_TILE: Final = 32  # inputs of a tensor core's product of bytes
_LARGEST_TILE: Final = 128
_FEW_OUTPUTS: Final = 32
_PROGRAMS: Final = 512  # that keep a large GPU busy
_MOST_SPLITS: Final = 8
_SIDE: Final = 16  # of torch's products of bytes, a multiple of this
_SMALLEST: Final = 1e-12
_MANY_ROWS: Final = 64
"""More rows are multiplied by torch, with a weight that is unpacked once, or rounded as a whole."""


def fits(weight: rounding.QuantizedWeight) -> bool:
    """True if the kernels have a tile for this weight: not if its last block has fewer inputs."""
    size = weight.group_size
    is_whole = size == weight.values.shape[1] or not size & (size - 1)
    return is_whole and weight.bits != 3 and _tile(weight) >= _LEAST_TILE


def _tile(weight: rounding.QuantizedWeight) -> int:
    """Inputs read at once: the largest power of two in a group, and in half of a row of 4 bits."""
    inputs = weight.values.shape[1]
    halves = 1 if weight.zeros is None else 2
    shared = math.gcd(inputs // halves, weight.group_size)
    return min(_LARGEST_TILE, shared & -shared)


class GpuLinear(linear.UnpackedLinear):
    """Weights of 4 bits in groups, or of 8 bits with a scale per output or group."""

    kernel_rows = _MANY_ROWS

    def __init__(self, weight: rounding.QuantizedWeight, bias: Tensor | None) -> None:
        self._nibbles = weight.zeros is not None
        self._group_size, self._block_in = weight.group_size, _tile(weight)
        if weight.zeros is not None:
            self._values = rounding.pack_bits(weight.values, 4)
            self._scale = weight.scale.half().t().contiguous()
            self._zeros = weight.zeros.t().contiguous()
            super().__init__(weight.values, bias, self._values, self._scale, self._zeros)
        else:
            self._values = weight.values.contiguous()
            self._scale = self._zeros = weight.scale.view(len(weight.values), -1).t().contiguous()
            super().__init__(weight.values, bias, self._values, self._scale)

    def rows(self, first: int, last: int, dtype: torch.dtype) -> Tensor:
        """In their format at once: float32 would take twice the time and memory."""
        values = self._values[first:last]
        values = rounding.unpack_bits(values, 4) if self._nibbles else values
        groups = values.view(len(values), len(self._scale), -1).to(dtype)
        if self._nibbles:
            groups.sub_(self._zeros[:, first:last].t()[..., None])
        return groups.mul_(self._scale[:, first:last].t()[..., None]).view(len(values), -1)

    def by_kernel(self, x: Tensor) -> Tensor:
        return self.multiplied(x.contiguous(), None, x.dtype)

    def multiplied(self, x: Tensor, unit: Tensor | None, dtype: torch.dtype) -> Tensor:
        """x @ weight.T, times the `unit` of each row."""
        count, (outputs, inputs) = len(x), self.shape
        block_rows = max(16, triton.next_power_of_2(min(count, _MANY_ROWS)))
        blocks = triton.cdiv(outputs, _FEW_OUTPUTS), triton.cdiv(count, block_rows)
        wanted = min(_PROGRAMS // math.prod(blocks), self._values.shape[1] // self._block_in)
        splits = 1 << int(math.log2(min(max(1, wanted), _MOST_SPLITS)))
        kind = dtype if splits == 1 else torch.float32
        out = torch.empty(splits, count, outputs, dtype=kind, device=x.device)
        gpu_kernels.quantized_product_kernel[(*blocks, splits)](
            x,
            self._values,
            self._scale,
            self._zeros,
            self._scale if unit is None else unit,
            out,
            count,
            outputs,
            inputs,
            self._group_size,
            NIBBLES=self._nibbles,
            GROUPED=self._group_size < inputs,
            ROUNDED=unit is not None,
            BLOCK_ROWS=block_rows,
            BLOCK_OUT=_FEW_OUTPUTS,
            BLOCK_IN=self._block_in,
            SPLITS=splits,
        )
        return out[0] if splits == 1 else out.sum(dim=0).to(dtype)


class RoundedGpuLinear(GpuLinear):
    """A weight in int8 or float8 with a scale per output, and rows rounded to its format."""

    def product(self, x: Tensor) -> Tensor:
        rounded, unit = self._rounded(x.contiguous())
        if len(x) <= _MANY_ROWS or self.shape[0] % _SIDE:
            return self.multiplied(rounded, unit, x.dtype)
        if rounded.dtype is rounding.FP8:
            product: Tensor = torch._scaled_mm(
                rounded, self._values.t(), scale_a=unit, scale_b=self._scale, out_dtype=torch.bfloat16
            )
            return product.to(x.dtype)
        padded = functional.pad(rounded, (0, 0, 0, -len(x) % _SIDE))
        whole: Tensor = torch._int_mm(padded, self._values.t())
        return (whole[: len(x)] * self._scale).mul_(unit).to(x.dtype)

    def _rounded(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Rows in the weight's format, and their units, shape (rows, 1)."""
        count, features = x.shape
        rounded = torch.empty(x.shape, dtype=self._values.dtype, device=x.device)
        unit = torch.empty(count, 1, device=x.device)
        top = 127.0 if rounded.dtype is torch.int8 else rounding.FP8_MAX
        gpu_kernels.round_rows_kernel[(count,)](
            x, rounded, unit, features, top, _SMALLEST, BLOCK=triton.next_power_of_2(features)
        )
        return rounded, unit
