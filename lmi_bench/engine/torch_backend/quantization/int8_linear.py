"""Products with int8 weights, and with unrounded or int8 activations.

On processors that multiply bytes (VNNI and similar), both use one integer kernel. An activation
that keeps its precision is split into a high and a low byte, as two rows over the same weights:
16 bits below its row's largest value, as precise as bfloat16, without reading the weights twice.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from lmi_bench.engine.torch_backend.quantization.linear import QuantizedLinear, UnpackedLinear
from lmi_bench.engine.torch_backend.quantization.rounding import Int8Weight

_ZERO_POINT: Final = 128  # the kernel needs unsigned activations; signed ones are slow
_INT16_TOP: Final = 127 * 256.0
_SMALLEST: Final = 1e-30


class _OneDnnWeight:
    """An int8 weight in oneDNN's layout, and its product with rows of uint8."""

    def __init__(self, weight: Int8Weight) -> None:
        ops: Any = torch.ops.onednn
        self._weight = ops.qlinear_prepack(weight.values.contiguous(), None)
        self._scale = weight.scale
        self._zeros = torch.zeros(len(weight.scale), dtype=torch.int64)
        self._multiply = ops.qlinear_pointwise.default
        self.nbytes = weight.values.nbytes + weight.scale.nbytes + self._zeros.nbytes

    def product(self, rows: Tensor) -> Tensor:
        """(rows - 128) @ weight.T in float32; rows uint8."""
        y: Tensor = self._multiply(
            rows,
            1.0,
            _ZERO_POINT,
            self._weight,
            self._scale,
            self._zeros,
            None,
            1.0,
            0,
            torch.float32,
            "none",
            [],
            "",
        )
        return y


class Int8ByBytes(QuantizedLinear):
    """int8 weights and 2-byte activations, with the integer kernel."""

    def __init__(self, weight: Int8Weight, bias: Tensor | None) -> None:
        super().__init__((weight.values.shape[0], weight.values.shape[1]), bias)
        self._weight = _OneDnnWeight(weight)

    @property
    def nbytes(self) -> int:
        return self._weight.nbytes

    def product(self, x: Tensor) -> Tensor:
        count = x.shape[0]
        wide = x.float()
        unit = torch.linalg.vector_norm(wide, float("inf"), dim=1, keepdim=True)
        unit = unit.mul_(1 / _INT16_TOP).clamp_min_(_SMALLEST)
        whole = (wide / unit).round_()
        high = (whole * (1 / 256)).round_()
        low = torch.add(whole, high, alpha=-256).clamp_(max=127)
        parts = torch.cat((high, low)).add_(_ZERO_POINT).to(torch.uint8)
        y = self._weight.product(parts)
        return torch.add(y[count:], y[:count], alpha=256).mul_(unit).to(x.dtype)


class Int8WeightOnly(UnpackedLinear):
    """int8 weights and unrounded activations.

    Few rows use torch's own bfloat16 kernel if it is faster.
    """

    def __init__(self, weight: Int8Weight, bias: Tensor | None, *, kernel_rows: int = 0) -> None:
        """kernel_rows  maximum rows for the kernel; 0: it is not used"""
        super().__init__((weight.values.shape[0], weight.values.shape[1]), bias)
        self._values = weight.values.contiguous()
        self._scale = weight.scale
        self._kernel_rows = kernel_rows
        self._kernel_scale = weight.scale.bfloat16() if kernel_rows else None

    @property
    def nbytes(self) -> int:
        extra = 0 if self._kernel_scale is None else self._kernel_scale.nbytes
        return self._values.nbytes + self._scale.nbytes + extra

    def product(self, x: Tensor) -> Tensor:
        if self._kernel_scale is not None and x.shape[0] <= self._kernel_rows:
            kernel: Any = torch.ops.aten._weight_int8pack_mm
            y: Tensor = kernel(x.bfloat16(), self._values, self._kernel_scale)
            return y.to(x.dtype)
        return super().product(x).mul_(self._scale.to(x.dtype))

    def rows(self, first: int, last: int, dtype: torch.dtype) -> Tensor:
        """Rows without the scale, which `product` applies to its result: fewer multiplications."""
        return self._values[first:last].to(dtype)


class _RoundedRows:
    """Rounds activations to int8 with a scale per row, or with one from calibration."""

    def __init__(self, fixed_largest: Tensor | None) -> None:
        self._unit = None
        if fixed_largest is not None:
            self._unit = (fixed_largest.float() / 127).clamp_min(_SMALLEST)

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Integers from -127 to 127 as float32, and their scale."""
        wide = x.float()
        if self._unit is not None:
            return (wide / self._unit).round_().clamp_(-127, 127), self._unit
        unit = torch.linalg.vector_norm(wide, float("inf"), dim=1, keepdim=True)
        unit = unit.mul_(1 / 127).clamp_min_(_SMALLEST)
        return (wide / unit).round_(), unit


class W8A8ByOneDnn(QuantizedLinear):
    """int8 weights and activations, with oneDNN's kernel."""

    def __init__(
        self, weight: Int8Weight, bias: Tensor | None, fixed_largest: Tensor | None = None
    ) -> None:
        """fixed_largest  largest activation in calibration; None: each row's own"""
        super().__init__((weight.values.shape[0], weight.values.shape[1]), bias)
        self._weight = _OneDnnWeight(weight)
        self._round = _RoundedRows(fixed_largest)

    @property
    def nbytes(self) -> int:
        return self._weight.nbytes

    def product(self, x: Tensor) -> Tensor:
        whole, unit = self._round(x)
        y = self._weight.product(whole.add_(_ZERO_POINT).to(torch.uint8))
        return y.mul_(unit).to(x.dtype)


class W8A8ByIntMm(QuantizedLinear):
    """int8 weights and activations, with torch._int_mm, also on GPUs."""

    _GPU_ROWS: Final = 32  # cuBLAS needs more than 16 rows

    def __init__(
        self, weight: Int8Weight, bias: Tensor | None, fixed_largest: Tensor | None = None
    ) -> None:
        super().__init__((weight.values.shape[0], weight.values.shape[1]), bias)
        self._values = weight.values.contiguous()
        self._scale = weight.scale
        self._round = _RoundedRows(fixed_largest)

    @property
    def nbytes(self) -> int:
        return self._values.nbytes + self._scale.nbytes

    def product(self, x: Tensor) -> Tensor:
        whole, unit = self._round(x)
        rows = whole.to(torch.int8)
        if x.is_cuda:
            missing = max(self._GPU_ROWS - len(rows), -len(rows) % 8)
            rows = torch.nn.functional.pad(rows, (0, 0, 0, max(0, missing)))
        y: Tensor = torch._int_mm(rows, self._values.t())
        return (y[: len(x)] * self._scale).mul_(unit).to(x.dtype)


class W8A8Emulated(UnpackedLinear):
    """The same arithmetic without a kernel: integers multiplied as float32."""

    def __init__(
        self, weight: Int8Weight, bias: Tensor | None, fixed_largest: Tensor | None = None
    ) -> None:
        super().__init__((weight.values.shape[0], weight.values.shape[1]), bias)
        self._values = weight.values
        self._scale = weight.scale
        self._round = _RoundedRows(fixed_largest)

    @property
    def nbytes(self) -> int:
        return self._values.nbytes + self._scale.nbytes

    def product(self, x: Tensor) -> Tensor:
        whole, unit = self._round(x)
        return super().product(whole).mul_(self._scale).mul_(unit).to(x.dtype)

    def rows(self, first: int, last: int, dtype: torch.dtype) -> Tensor:
        return self._values[first:last].to(dtype)
