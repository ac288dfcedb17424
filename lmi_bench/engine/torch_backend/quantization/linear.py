"""Linear layers with quantized weights: int8, groups of 3 or 4 bits, and float8 (E4M3).

On processors that multiply bytes (VNNI and similar), int8 weights use one integer kernel for
unrounded and int8 activations. An activation that keeps its precision is split into a high and a
low byte, as two rows over the same weights: 16 bits below its row's largest value, as precise as
bfloat16, without reading the weights twice.

float8 products are native on GPUs that have them, else emulated: stored and rounded like on such a
GPU but multiplied in float32, which shows size and error, not speed.
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

_CHUNK_BYTES: Final = 1 << 24
"""Unpacked weights at one time: few enough to stay in the processor's cache."""


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
    """Dequantizes and multiplies the weight in chunks of rows; needs no special kernel."""

    @abstractmethod
    def rows(self, first: int, last: int, dtype: torch.dtype) -> Tensor:
        """Outputs first .. last of the weight as floats, shape (last - first, inputs)."""

    def product(self, x: Tensor) -> Tensor:
        y = x.new_empty(x.shape[0], self.shape[0])
        rows, columns = self.shape
        step = rows if x.is_cuda else max(1, _CHUNK_BYTES // (columns * x.element_size()))
        for first in range(0, rows, step):
            last = min(rows, first + step)
            y[:, first:last] = functional.linear(x, self.rows(first, last, x.dtype))
        return y


_ZERO_POINT: Final = 128  # the kernel needs unsigned activations; signed ones are slow
_INT16_TOP: Final = 127 * 256.0
_SMALLEST: Final = 1e-30


def _largest_as(wide: Tensor, top: float, smallest: float) -> Tensor:
    """The unit of each row in which its largest magnitude is `top`, shape (rows, 1)."""
    unit: Tensor = torch.linalg.vector_norm(wide, float("inf"), dim=1, keepdim=True)
    return unit.mul_(1 / top).clamp_min_(smallest)


class _ByOneDnn(QuantizedLinear):
    """An int8 weight in oneDNN's layout, and its product with rows of uint8."""

    def __init__(
        self, weight: rounding.RowWeight, bias: Tensor | None, fixed_largest: Tensor | None = None
    ) -> None:
        """fixed_largest  largest activation in calibration; None: each row's own"""
        ops: Any = torch.ops.onednn
        self._weight = ops.qlinear_prepack(weight.values.contiguous(), None)
        self._scale = weight.scale
        self._zeros = torch.zeros(len(weight.scale), dtype=torch.int64)
        self._multiply: Callable[..., Tensor] = ops.qlinear_pointwise.default
        self._round = RoundedRows(torch.int8, fixed_largest)
        super().__init__(weight.values, bias, weight.values, weight.scale, self._zeros)

    def multiplied(self, rows: Tensor) -> Tensor:
        """(rows - 128) @ weight.T in float32; rows uint8."""
        weight = (self._weight, self._scale, self._zeros, None)
        return self._multiply(
            rows, 1.0, _ZERO_POINT, *weight, 1.0, 0, torch.float32, "none", [], ""
        )


class Int8ByBytes(_ByOneDnn):
    """int8 weights and 2-byte activations, with the integer kernel."""

    def product(self, x: Tensor) -> Tensor:
        count = x.shape[0]
        wide = x.float()
        unit = _largest_as(wide, _INT16_TOP, _SMALLEST)
        whole = (wide / unit).round_()
        high = (whole * (1 / 256)).round_()
        low = torch.add(whole, high, alpha=-256).clamp_(max=127)
        parts = torch.cat((high, low)).add_(_ZERO_POINT).to(torch.uint8)
        y = self.multiplied(parts)
        return torch.add(y[count:], y[:count], alpha=256).mul_(unit).to(x.dtype)


class _ScaledRows(UnpackedLinear):
    """A weight with one scale per output, which `product` applies to its result: fewer
    multiplications."""

    def __init__(self, weight: rounding.RowWeight, bias: Tensor | None) -> None:
        self._values = weight.values.contiguous()
        self._scale = weight.scale
        super().__init__(weight.values, bias, self._values, self._scale)

    def rows(self, first: int, last: int, dtype: torch.dtype) -> Tensor:
        return self._values[first:last].to(dtype)


class Int8WeightOnly(_ScaledRows):
    """int8 weights and unrounded activations. Few rows use torch's own bfloat16 kernel if it is
    faster."""

    def __init__(
        self, weight: rounding.RowWeight, bias: Tensor | None, *, kernel_rows: int = 0
    ) -> None:
        """kernel_rows  maximum rows for the kernel; 0: it is not used"""
        super().__init__(weight, bias)
        self._kernel_rows = kernel_rows
        self._kernel_scale = weight.scale.bfloat16() if kernel_rows else None
        if self._kernel_scale is not None:
            self.nbytes += self._kernel_scale.nbytes

    def product(self, x: Tensor) -> Tensor:
        if self._kernel_scale is not None and x.shape[0] <= self._kernel_rows:
            kernel: Callable[..., Tensor] = torch.ops.aten._weight_int8pack_mm
            return kernel(x.bfloat16(), self._values, self._kernel_scale).to(x.dtype)
        return super().product(x).mul_(self._scale.to(x.dtype))


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
        wide = x.float()
        unit = _largest_as(wide, self._top, _SMALLEST) if self._unit is None else self._unit
        if self._kind is rounding.FP8:
            return (wide / unit).to(rounding.FP8).float(), unit
        return (wide / unit).round_().clamp_(-127, 127), unit


class W8A8ByOneDnn(_ByOneDnn):
    """int8 weights and activations, with oneDNN's kernel."""

    def product(self, x: Tensor) -> Tensor:
        whole, unit = self._round(x)
        y = self.multiplied(whole.add_(_ZERO_POINT).to(torch.uint8))
        return y.mul_(unit).to(x.dtype)


class Emulated(_ScaledRows):
    """Rounded weights and activations without a kernel: multiplied as float32."""

    def __init__(
        self, weight: rounding.RowWeight, bias: Tensor | None, fixed_largest: Tensor | None = None
    ) -> None:
        super().__init__(weight, bias)
        self._round = RoundedRows(weight.values.dtype, fixed_largest)

    def product(self, x: Tensor) -> Tensor:
        rounded, unit = self._round(x)
        return super().product(rounded).mul_(self._scale).mul_(unit).to(x.dtype)


KERNEL_GROUP_SIZES: Final = (32, 64, 128, 256)
KERNEL_PANEL: Final = 64  # outputs per panel in the kernel's AVX-512 layout
_PANELS_AT_ONCE: Final = 8
_MIDDLE: Final = 8  # the kernel's values are relative to the middle of 0 .. 15


class GroupedLinear(UnpackedLinear):
    """3-bit or 4-bit weights, unpacked at every call: for any device and format."""

    def __init__(self, weight: rounding.GroupedWeight, bias: Tensor | None) -> None:
        self._packed: tuple[Tensor, ...] = (rounding.pack_bits(weight.values, 4),)
        self._unpack: Callable[..., Tensor] = partial(rounding.unpack_bits, bits=4)
        if weight.bits == 3:
            self._packed, self._unpack = rounding.pack_3bit(weight.values), rounding.unpack_3bit
        self._scale = weight.scale.half()
        self._zeros = weight.zeros
        super().__init__(weight.values, bias, *self._packed, self._scale, self._zeros)

    def rows(self, first: int, last: int, dtype: torch.dtype) -> Tensor:
        values = self._unpack(*(part[first:last] for part in self._packed))
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

    def __init__(
        self, weight: rounding.GroupedWeight, bias: Tensor | None, *, kernel_rows: int
    ) -> None:
        """kernel_rows  maximum rows for the kernel"""
        self._packed = pack_for_kernel(weight.values)
        self._group_size = weight.group_size
        self._kernel_rows = kernel_rows
        offset = (_MIDDLE - weight.zeros.float()) * weight.scale
        pairs = torch.stack((weight.scale, offset), dim=-1).transpose(0, 1)
        self._scales_and_offsets = pairs.to(torch.bfloat16).contiguous()
        super().__init__(weight.values, bias, self._packed, self._scales_and_offsets)

    def product(self, x: Tensor) -> Tensor:
        if x.shape[0] <= self._kernel_rows:
            kernel: Callable[..., Tensor] = torch.ops.aten._weight_int4pack_mm_for_cpu
            pairs = self._scales_and_offsets
            return kernel(x.bfloat16(), self._packed, self._group_size, pairs).to(x.dtype)
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
    convert: Callable[[Tensor, int], Tensor] = torch.ops.aten._convert_weight_to_int4pack_for_cpu
    return convert(values.int(), 1)


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
