"""Chooses each scheme's kernel on this machine: tests which ones work and measures the fastest.

Torch's quantized operators are not a public interface and differ by processor: each is first
compared with the exact product of a small matrix. The measurement takes some tens of milliseconds
per model.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from lmi_bench.engine.quantization import QuantizeSettings, Scheme
from lmi_bench.engine.torch_backend.precision import Precision
from lmi_bench.engine.torch_backend.quantization.linear import (
    FP8_GPU_SIDE,
    KERNEL_GROUP_SIZES,
    KERNEL_PANEL,
    Fp8ByGpu,
    Fp8Emulated,
    Grouped3BitLinear,
    Grouped4BitByKernel,
    Grouped4BitLinear,
    Int8ByBytes,
    Int8WeightOnly,
    QuantizedLinear,
    W8A8ByIntMm,
    W8A8ByOneDnn,
    W8A8Emulated,
    fp8_is_native,
    kernel_layout_is_known,
)
from lmi_bench.engine.torch_backend.quantization.rounding import (
    Fp8Weight,
    GroupedWeight,
    Int8Weight,
    QuantizedWeight,
    round_fp8,
    round_grouped,
    round_int8,
)

_PROBE_SIZE: Final = 1024
_DECODE_ROWS: Final = (1, 16, 64)
_SWITCH_ROWS: Final = (4, 8, 16, 32, 64, 128)
_REPEATS: Final = 3
_MAX_ERROR: Final = 2e-2
_MAX_SLOWDOWN: Final = 2.0  # the 2-byte form is more exact and may be slower by this factor


@dataclass(frozen=True, slots=True)
class Kernels:
    """The kernels of a scheme on this machine.

    make      builds a layer from a weight, its bias and the activations' fixed largest value
    words     description for the user
    emulated  True if the arithmetic is emulated, so that its speed is meaningless
    """

    make: Callable[[QuantizedWeight, Tensor | None, Tensor | None], QuantizedLinear]
    words: str
    emulated: bool = False


def _no_kernel(*_: object) -> QuantizedLinear:
    raise ValueError("the scheme `none` rounds no weight")


NO_KERNELS: Final = Kernels(_no_kernel, "not quantized")


def choose_kernels(
    settings: QuantizeSettings, precision: Precision, device: torch.device
) -> Kernels:
    """The fastest working kernels for the scheme of `settings`."""
    match settings.scheme:
        case Scheme.INT8:
            return _int8(precision, device)
        case Scheme.SMOOTHQUANT:
            return _w8a8(device)
        case Scheme.AWQ_INT4:
            return _int4(precision, device)
        case Scheme.AWQ_INT3:
            return Kernels(_of_groups(Grouped3BitLinear), "unpacked at every step: no 3-bit kernel")
        case Scheme.FP8:
            return _fp8(precision, device)
    raise ValueError("the scheme `none` rounds no weight")


def _int8(precision: Precision, device: torch.device) -> Kernels:
    def unpacked(weight: QuantizedWeight, bias: Tensor | None, _: Tensor | None) -> QuantizedLinear:
        assert isinstance(weight, Int8Weight)
        return Int8WeightOnly(weight, bias)

    plain = Kernels(unpacked, "unpacked at every step: no kernel here")
    if device.type != "cpu":
        return plain
    weight = round_int8(_probe_weight())
    rows = _probe_rows(16).to(precision.compute)
    by_bytes: QuantizedLinear | None = None
    if _works(lambda: Int8ByBytes(weight, None)(rows), rows, weight):
        by_bytes = Int8ByBytes(weight, None)
    if precision.stored != torch.bfloat16:  # torch's own kernel would round the activations
        return Kernels(_bytes, _BYTES_WORDS) if by_bytes is not None else plain
    kernel_rows = 0
    if _works(lambda: Int8WeightOnly(weight, None, kernel_rows=16)(rows), rows, weight):
        kernel_rows = _rows_until_slower(
            Int8WeightOnly(weight, None, kernel_rows=_SWITCH_ROWS[-1]),
            Int8WeightOnly(weight, None),
            precision.compute,
        )
    own = Int8WeightOnly(weight, None, kernel_rows=kernel_rows)
    if by_bytes is not None and _decode_cost(
        by_bytes, precision.compute
    ) < _MAX_SLOWDOWN * _decode_cost(own, precision.compute):
        return Kernels(_bytes, _BYTES_WORDS)

    def mixed(weight: QuantizedWeight, bias: Tensor | None, _: Tensor | None) -> QuantizedLinear:
        assert isinstance(weight, Int8Weight)
        return Int8WeightOnly(weight, bias, kernel_rows=kernel_rows)

    return Kernels(mixed, _switch_words("torch's int8 kernel", kernel_rows))


_BYTES_WORDS: Final = "int8 kernel, activations in two bytes"


def _bytes(weight: QuantizedWeight, bias: Tensor | None, _: Tensor | None) -> QuantizedLinear:
    assert isinstance(weight, Int8Weight)
    return Int8ByBytes(weight, bias)


def _w8a8(device: torch.device) -> Kernels:
    weight = round_int8(_probe_weight().to(device))
    rows = _probe_rows(16).to(device)
    for form, words in (
        (W8A8ByOneDnn, "oneDNN's int8 kernel"),
        (W8A8ByIntMm, "torch._int_mm"),
    ):
        if form is W8A8ByOneDnn and device.type != "cpu":
            continue

        def attempt(form: type[W8A8ByOneDnn | W8A8ByIntMm] = form) -> Tensor:
            return form(weight, None)(rows)

        if _works(attempt, rows, weight):
            return Kernels(_of_int8(form), words)
    return Kernels(_of_int8(W8A8Emulated), "emulated: no int8 kernel here", emulated=True)


def _int4(precision: Precision, device: torch.device) -> Kernels:
    plain = Kernels(_of_groups(Grouped4BitLinear), "unpacked at every step: no 4-bit kernel here")
    if device.type != "cpu" or precision.stored != torch.bfloat16 or not kernel_layout_is_known():
        return plain
    weight = round_grouped(_probe_weight(), 4, 128)
    rows = _probe_rows(4).to(precision.compute)
    most = _SWITCH_ROWS[-1]
    if not _works(lambda: Grouped4BitByKernel(weight, None, kernel_rows=4)(rows), rows, weight):
        return plain
    kernel_rows = _rows_until_slower(
        Grouped4BitByKernel(weight, None, kernel_rows=most),
        Grouped4BitByKernel(weight, None, kernel_rows=0),
        precision.compute,
    )
    if not kernel_rows:
        return plain

    def make(weight: QuantizedWeight, bias: Tensor | None, _: Tensor | None) -> QuantizedLinear:
        assert isinstance(weight, GroupedWeight)
        fits = weight.values.shape[0] % KERNEL_PANEL == 0
        if not fits or weight.group_size not in KERNEL_GROUP_SIZES:
            return Grouped4BitLinear(weight, bias)
        return Grouped4BitByKernel(weight, bias, kernel_rows=kernel_rows)

    return Kernels(make, _switch_words("torch's int4 kernel", kernel_rows))


def _fp8(precision: Precision, device: torch.device) -> Kernels:
    def emulated(weight: QuantizedWeight, bias: Tensor | None, _: Tensor | None) -> QuantizedLinear:
        assert isinstance(weight, Fp8Weight)
        return Fp8Emulated(weight, bias)

    def native(weight: QuantizedWeight, bias: Tensor | None, _: Tensor | None) -> QuantizedLinear:
        assert isinstance(weight, Fp8Weight)
        if any(size % FP8_GPU_SIDE for size in weight.values.shape):
            return Fp8Emulated(weight, bias)
        return Fp8ByGpu(weight, bias)

    if not fp8_is_native(device):
        return Kernels(emulated, "emulated: this device has no float8 arithmetic", emulated=True)
    weight = round_fp8(_probe_weight().to(device))
    rows = _probe_rows(16).to(device, precision.compute)
    wanted = Fp8Emulated(weight, None)(rows).float()
    if not _comes_near(lambda: Fp8ByGpu(weight, None)(rows), wanted):
        return Kernels(emulated, "emulated: torch's float8 product fails here", emulated=True)
    return Kernels(native, "float8 of the GPU")


def _switch_words(kernel: str, kernel_rows: int) -> str:
    if not kernel_rows:
        return "unpacked at every step: faster here than any kernel"
    if kernel_rows >= _SWITCH_ROWS[-1]:
        kernel_rows = _SWITCH_ROWS[-1]
    return f"{kernel} up to {kernel_rows} rows, more rows with unpacked weights"


def _of_groups(
    form: type[Grouped3BitLinear | Grouped4BitLinear],
) -> Callable[[QuantizedWeight, Tensor | None, Tensor | None], QuantizedLinear]:
    def make(weight: QuantizedWeight, bias: Tensor | None, _: Tensor | None) -> QuantizedLinear:
        assert isinstance(weight, GroupedWeight)
        return form(weight, bias)

    return make


def _of_int8(
    form: type[W8A8ByOneDnn | W8A8ByIntMm | W8A8Emulated],
) -> Callable[[QuantizedWeight, Tensor | None, Tensor | None], QuantizedLinear]:
    def make(
        weight: QuantizedWeight, bias: Tensor | None, largest: Tensor | None
    ) -> QuantizedLinear:
        assert isinstance(weight, Int8Weight)
        return form(weight, bias, largest)

    return make


def _works(run: Callable[[], Tensor], rows: Tensor, weight: QuantizedWeight) -> bool:
    """True if a product is close to the one with the dequantized weight."""
    return _comes_near(run, rows.float() @ weight.floats().t())


def _comes_near(run: Callable[[], Tensor], wanted: Tensor) -> bool:
    try:
        got = run().float()
    except (RuntimeError, AttributeError, NotImplementedError):
        return False
    return bool((got - wanted).abs().max() < _MAX_ERROR * wanted.abs().max())


def _rows_until_slower(few: QuantizedLinear, many: QuantizedLinear, compute: torch.dtype) -> int:
    """Maximum rows for which `few` is not slower than `many`; 0: none."""
    best = 0
    for count in _SWITCH_ROWS:
        rows = _probe_rows(count).to(compute)
        if _time_s(few, rows) > _time_s(many, rows):
            break
        best = count
    return best


def _decode_cost(linear: QuantizedLinear, compute: torch.dtype) -> float:
    """Product of the seconds at 1, 16 and 64 rows: a kernel should be good at all of them."""
    cost = 1.0
    for count in _DECODE_ROWS:
        cost *= _time_s(linear, _probe_rows(count).to(compute))
    return cost


def _time_s(linear: QuantizedLinear, rows: Tensor) -> float:
    linear(rows)
    times_s = []
    for _ in range(_REPEATS):
        start_s = time.perf_counter()
        linear(rows)
        times_s.append(time.perf_counter() - start_s)
    return min(times_s)


def _probe_weight() -> Tensor:
    """Fixed random numbers, shape (1024, 1024)."""
    return torch.randn(_PROBE_SIZE, _PROBE_SIZE, generator=torch.Generator().manual_seed(1))


def _probe_rows(count: int) -> Tensor:
    return torch.randn(count, _PROBE_SIZE, generator=torch.Generator().manual_seed(2))
