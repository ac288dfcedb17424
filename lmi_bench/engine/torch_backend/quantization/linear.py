"""Linear layers with quantized weights: int8, groups of 3 or 4 bits, and float8 (E4M3).

Products of rounded activations are emulated where no kernel has them: stored and rounded alike but
multiplied in float32, which shows size and error, not speed. `gpu_linear` has the forms of a GPU.
"""

from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from lmi_bench.engine.torch_backend.layers import Linear
from lmi_bench.engine.torch_backend.quantization import rounding
from lmi_bench.engine.torch_backend.quantization.rounding import QuantizedWeight

_CHUNK_BYTES: Final = 1 << 24
"""Unpacked weights at one time: few enough to stay in the processor's cache."""

KERNEL_PANEL: Final = 64  # outputs per panel in the AVX-512 layout of torch's 4-bit kernel


class QuantizedLinear(Linear):
    """x @ weight.T + bias with a quantized weight; implements `layers.Linear`. Subclasses define
    the product; inputs and outputs are in the model's compute format."""

    def __init__(self, values: Tensor, bias: Tensor | None, *stored: Tensor) -> None:
        """values  shape (outputs, inputs); stored: what stays in memory, including scales"""
        self.shape = (values.shape[0], values.shape[1])
        self.nbytes = sum(part.nbytes for part in stored)
        self._bias = bias

    @abstractmethod
    def product(self, x: Tensor) -> Tensor:
        """x @ weight.T, without the bias."""

    def __call__(self, x: Tensor) -> Tensor:
        if not len(x):  # a step with only prompt chunks; kernels reject zero rows
            return x.new_empty(0, self.shape[0])
        y = self.product(x)
        return y if self._bias is None else y + self._bias


class UnpackedLinear(QuantizedLinear):
    """Dequantizes and multiplies the weight in chunks of rows; needs no special kernel.

    kernel_rows  maximum rows for `by_kernel`; 0: there is none
    """

    kernel_rows = 0

    def by_kernel(self, x: Tensor) -> Tensor:
        """The product by a kernel that is faster for few rows."""
        raise NotImplementedError

    @abstractmethod
    def rows(self, first: int, last: int, dtype: torch.dtype) -> Tensor:
        """Outputs first .. last of the weight as floats, shape (last - first, inputs)."""

    def product(self, x: Tensor) -> Tensor:
        if x.shape[0] <= self.kernel_rows:
            return self.by_kernel(x)
        y = x.new_empty(x.shape[0], self.shape[0])
        rows, columns = self.shape
        panels = _CHUNK_BYTES // (columns * x.element_size() * KERNEL_PANEL)
        step = rows if x.is_cuda else max(1, panels) * KERNEL_PANEL
        for first in range(0, rows, step):
            last = min(rows, first + step)
            y[:, first:last] = functional.linear(x, self.rows(first, last, x.dtype))
        return y


_ZERO_POINT: Final = 128  # the kernel needs unsigned activations; signed ones are slow
_SMALLEST: Final = 1e-30


class ScaledRows(UnpackedLinear):
    """Weights with one scale per output, which is applied to the result: fewer multiplications.
    Activations are not rounded. Few rows of int8 use torch's own bfloat16 kernel where it is
    faster."""

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None, *, kernel_rows: int = 0) -> None:
        self._values = weight.values.contiguous()
        self._scale = weight.scale
        self.kernel_rows = kernel_rows
        self._kernel_scale = weight.scale.bfloat16() if kernel_rows else weight.scale[:0]
        super().__init__(weight.values, bias, self._values, self._scale, self._kernel_scale)

    def rows(self, first: int, last: int, dtype: torch.dtype) -> Tensor:
        return self._values[first:last].to(dtype)

    def by_kernel(self, x: Tensor) -> Tensor:
        kernel: Callable[..., Tensor] = torch.ops.aten._weight_int8pack_mm
        return kernel(x.bfloat16(), self._values, self._kernel_scale).to(x.dtype)

    def product(self, x: Tensor) -> Tensor:
        y = super().product(x)
        return y if x.shape[0] <= self.kernel_rows else y.mul_(self._scale.to(x.dtype))


class RoundedRows:
    """Rounds activations to int8 or float8 with a scale per row, or with one from calibration."""

    def __init__(self, kind: torch.dtype, fixed_largest: Tensor | None = None) -> None:
        self._kind = kind
        self._top = rounding.FP8_MAX if kind is rounding.FP8 else 127
        self._unit = None
        if fixed_largest is not None:
            self._unit = (fixed_largest.float() / self._top).clamp_min(_SMALLEST)

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The rounded values as float32, and their scale."""
        wide, unit = x.float(), self._unit
        if unit is None:
            unit = torch.linalg.vector_norm(wide, float("inf"), dim=1, keepdim=True)
            unit = unit.mul_(1 / self._top).clamp_min_(_SMALLEST)
        if self._kind is rounding.FP8:
            return (wide / unit).to(rounding.FP8).float(), unit
        return (wide / unit).round_().clamp_(-127, 127), unit


class W8A8ByOneDnn(QuantizedLinear):
    """int8 weights in oneDNN's layout, and int8 activations."""

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None, fixed_largest: Tensor | None = None) -> None:
        """fixed_largest  largest activation in calibration; None: each row's own"""
        ops: Any = torch.ops.onednn
        packed = ops.qlinear_prepack(weight.values.contiguous(), None)
        zeros = torch.zeros(len(weight.scale), dtype=torch.int64)
        self._weight = (packed, weight.scale, zeros, None)
        self._multiply: Callable[..., Tensor] = ops.qlinear_pointwise.default
        self._round = RoundedRows(torch.int8, fixed_largest)
        super().__init__(weight.values, bias, weight.values, weight.scale, zeros)

    def product(self, x: Tensor) -> Tensor:
        whole, unit = self._round(x)
        rows, formats = whole.add_(_ZERO_POINT).to(torch.uint8), (1.0, 0, torch.float32)
        y = self._multiply(rows, 1.0, _ZERO_POINT, *self._weight, *formats, "none", [], "")
        return y.mul_(unit).to(x.dtype)


class Emulated(ScaledRows):
    """Rounded weights and activations without a kernel: multiplied as float32."""

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None, fixed_largest: Tensor | None = None) -> None:
        super().__init__(weight, bias)
        self._round = RoundedRows(weight.values.dtype, fixed_largest)

    def product(self, x: Tensor) -> Tensor:
        rounded, unit = self._round(x)
        return super().product(rounded).mul_(unit).to(x.dtype)


_KERNEL_GROUP_SIZES: Final = (32, 64, 128, 256)
_MIDDLE: Final = 8  # the kernel's values are relative to the middle of 0 .. 15


class GroupedLinear(UnpackedLinear):
    """3-bit or 4-bit weights, unpacked at every call: for any device and format."""

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None) -> None:
        assert weight.zeros is not None
        self._packed: tuple[Tensor, ...] = (rounding.pack_bits(weight.values, 4),)
        self._unpack: Callable[..., Tensor] = partial(rounding.unpack_bits, bits=4)
        if weight.bits == 3:
            self._packed, self._unpack = rounding.pack_3bit(weight.values), rounding.unpack_3bit
        self._scale = weight.scale.half()
        self._zeros = weight.zeros
        super().__init__(weight.values, bias, *self._packed, self._scale, self._zeros)

    def rows(self, first: int, last: int, dtype: torch.dtype) -> Tensor:
        values = self._unpack(*(part[first:last] for part in self._packed))
        scale = self._scale[first:last, :, None].float()
        # the zero is an integer: scale * values - scale * zero in float32 is as exact
        offset = (scale * self._zeros[first:last, :, None]).neg_()
        wide = values.view(*scale.shape[:2], -1).float()
        return wide.mul_(scale).add_(offset).view(values.shape).to(dtype)


class Grouped4BitByKernel(UnpackedLinear):
    """4-bit weights with torch's CPU kernel, built for few rows; many rows are multiplied with
    floats unpacked from the same bytes.

    The kernel takes bfloat16 rows and scales. On the machine `kernels` compares it with the
    layout that `_of_panels` reads.
    """

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None, *, kernel_rows: int) -> None:
        assert weight.zeros is not None
        pack: Callable[[Tensor, int], Tensor] = torch.ops.aten._convert_weight_to_int4pack_for_cpu
        self._packed = pack(weight.values.int(), 1)
        self._group_size = weight.group_size
        self.kernel_rows = kernel_rows
        offset = (_MIDDLE - weight.zeros.float()) * weight.scale
        pairs = torch.stack((weight.scale, offset), dim=-1).transpose(0, 1)
        self._scales_and_offsets = pairs.to(torch.bfloat16).contiguous()
        super().__init__(weight.values, bias, self._packed, self._scales_and_offsets)

    def by_kernel(self, x: Tensor) -> Tensor:
        kernel: Callable[..., Tensor] = torch.ops.aten._weight_int4pack_mm_for_cpu
        pairs = self._scales_and_offsets
        return kernel(x.bfloat16(), self._packed, self._group_size, pairs).to(x.dtype)

    def rows(self, first: int, last: int, dtype: torch.dtype) -> Tensor:
        values = _of_panels(self._packed.view(self.shape[0], -1)[first:last])
        pairs = self._scales_and_offsets[:, first:last].float()
        scale, offset = pairs.transpose(0, 1)[..., None].unbind(-2)
        wide = values.view(*scale.shape[:2], -1).float().sub_(_MIDDLE)
        return wide.mul_(scale).add_(offset).view(values.shape).to(dtype)


def _of_panels(packed: Tensor) -> Tensor:
    """Values from the AVX-512 layout of torch's CPU kernel, shape (outputs, inputs / 2) to
    (outputs, inputs): panels of 64 outputs with 32 bytes per input; byte i has output i in its low
    half and i + 32 in its high one."""
    panels = packed.view(-1, 2 * packed.shape[1], KERNEL_PANEL // 2)
    unpacked = torch.cat((panels & 15, panels >> 4), dim=-1).transpose(1, 2)
    return unpacked.reshape(len(packed), -1)


def kernel_fits(weight: QuantizedWeight) -> bool:
    """True for a weight in sizes that torch's 4-bit kernel takes."""
    panels = weight.values.shape[0] % KERNEL_PANEL == 0
    return panels and weight.group_size in _KERNEL_GROUP_SIZES
