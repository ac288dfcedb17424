"""Products with float8 weights and activations (E4M3): native on GPUs with float8, else emulated.

Emulation stores and rounds like such a GPU but multiplies in float32. It shows size and error, not
speed.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from lmi_bench.engine.torch_backend.quantization.linear import QuantizedLinear, UnpackedLinear
from lmi_bench.engine.torch_backend.quantization.rounding import FP8, FP8_MAX, Fp8Weight

_SMALLEST: Final = 1e-12
FP8_GPU_SIDE: Final = 16
"""A GPU's product needs both sides of a weight to be a multiple of this."""

_FIRST_CAPABILITY: Final = (8, 9)  # Ada; Hopper is 9.0


def fp8_is_native(device: torch.device) -> bool:
    """True if the device multiplies float8 natively."""
    if device.type != "cuda":
        return False
    return torch.cuda.get_device_capability(device) >= _FIRST_CAPABILITY


def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows in float8, and their scales, shape (rows, 1)."""
    wide = x.float()
    unit = torch.linalg.vector_norm(wide, float("inf"), dim=1, keepdim=True)
    unit = unit.mul_(1 / FP8_MAX).clamp_min_(_SMALLEST)
    return (wide / unit).to(FP8), unit


class Fp8Emulated(UnpackedLinear):
    """float8 in memory, float32 in the product."""

    def __init__(self, weight: Fp8Weight, bias: Tensor | None) -> None:
        super().__init__((weight.values.shape[0], weight.values.shape[1]), bias)
        self._values = weight.values
        self._scale = weight.scale

    @property
    def nbytes(self) -> int:
        return self._values.nbytes + self._scale.nbytes

    def product(self, x: Tensor) -> Tensor:
        rounded, unit = round_rows(x)
        y = super().product(rounded.float())
        return y.mul_(self._scale).mul_(unit).to(x.dtype)

    def rows(self, first: int, last: int, dtype: torch.dtype) -> Tensor:
        return self._values[first:last].to(dtype)


class Fp8ByGpu(QuantizedLinear):
    """float8 in memory and in the product, with a scale for each row of both sides."""

    def __init__(self, weight: Fp8Weight, bias: Tensor | None) -> None:
        super().__init__((weight.values.shape[0], weight.values.shape[1]), bias)
        self._values = weight.values.contiguous()
        self._scale = weight.scale[None].contiguous()

    @property
    def nbytes(self) -> int:
        return self._values.nbytes + self._scale.nbytes

    def product(self, x: Tensor) -> Tensor:
        rounded, unit = round_rows(x)
        y: Tensor = torch._scaled_mm(
            rounded,
            self._values.t(),
            scale_a=unit,
            scale_b=self._scale,
            out_dtype=torch.bfloat16,
        )
        return y.to(x.dtype)
