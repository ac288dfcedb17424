"""Chooses each scheme's kernel on this machine: tests which ones work.

Torch's quantized operators are not a public interface and differ by processor: each is first
compared with the exact product of a small matrix.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
from torch import Tensor

from lmi_bench.engine.quantization import QuantizeSettings, Scheme
from lmi_bench.engine.torch_backend.precision import Precision
from lmi_bench.engine.torch_backend.quantization import linear, rounding
from lmi_bench.engine.torch_backend.quantization.linear import QuantizedLinear

_PROBE_SIZE: Final = 1024
_KERNEL_ROWS: Final = {4: (256, 32), 8: (32, 8)}
"""Maximum rows for which torch's CPU kernels of so many bits are faster than unpacking, beside
products in float32 and in bfloat16."""
_MAX_ERROR: Final = 2e-2


Make = Callable[..., QuantizedLinear]
"""Builds a layer from the scheme's weight, its bias and, if known, the activations' fixed largest
value."""

_ON_ANY_DEVICE: Final[Mapping[Scheme, Make]] = {
    Scheme.INT8: linear.Int8WeightOnly,
    Scheme.SMOOTHQUANT: linear.Emulated,
    Scheme.AWQ_INT4: linear.GroupedLinear,
    Scheme.FP8: linear.Emulated,
}


@dataclass(frozen=True, slots=True)
class Kernels:
    """The kernels of a scheme on this machine.

    words     description for the user
    emulated  True if the arithmetic is emulated, so that its speed is meaningless
    fits      True for a weight that the kernels take
    """

    make: Make
    words: str
    emulated: bool = False
    fits: Callable[[rounding.QuantizedWeight], bool] = bool


def choose_kernels(
    settings: QuantizeSettings, precision: Precision, device: torch.device
) -> Kernels:
    """The fastest working kernels for the scheme of `settings`."""
    if (found := on_gpu(settings.scheme, precision, device)) is not None:
        return found
    match settings.scheme:
        case Scheme.INT8:
            return _int8(precision, device)
        case Scheme.SMOOTHQUANT:
            return _w8a8(device)
        case Scheme.AWQ_INT4:
            return _int4(precision, device)
        case Scheme.AWQ_INT3:
            return Kernels(linear.GroupedLinear, "unpacked at every step: no 3-bit kernel")
        case Scheme.FP8:
            words = "emulated: this device has no float8 arithmetic"
            return Kernels(linear.Emulated, words, emulated=True)
    return NO_KERNELS


def _no_kernel(*_: object) -> QuantizedLinear:
    raise ValueError("the scheme `none` rounds no weight")


NO_KERNELS: Final = Kernels(_no_kernel, "not quantized")


def _int8(precision: Precision, device: torch.device) -> Kernels:
    unpacked = Kernels(linear.Int8WeightOnly, "unpacked at every step: no kernel here")
    if device.type != "cpu" or precision.stored != torch.bfloat16:
        return unpacked  # torch's kernel would round the activations
    weight = rounding.round_int8(_probe_weight())
    kernel_rows = _KERNEL_ROWS[8][precision.compute == torch.bfloat16]
    form = partial(linear.Int8WeightOnly, kernel_rows=kernel_rows)
    if not _works(form, weight, _probe_rows(4).to(precision.compute)):
        return unpacked
    return Kernels(form, f"torch's int8 kernel up to {kernel_rows} rows, more unpacked")


def _w8a8(device: torch.device) -> Kernels:
    weight = rounding.round_int8(_probe_weight())
    if device.type == "cpu" and _works(linear.W8A8ByOneDnn, weight, _probe_rows(16)):
        return Kernels(linear.W8A8ByOneDnn, "oneDNN's int8 kernel")
    return Kernels(linear.Emulated, "emulated: no int8 kernel here", emulated=True)


def _int4(precision: Precision, device: torch.device) -> Kernels:
    words = "unpacked at every step: no 4-bit kernel here"
    plain = Kernels(linear.GroupedLinear, words)
    if (
        device.type != "cpu"
        or precision.stored != torch.bfloat16
        or not linear.kernel_layout_is_known()
    ):
        return plain
    weight = rounding.round_grouped(_probe_weight(), 4, 128)
    kernel_rows = _KERNEL_ROWS[4][precision.compute == torch.bfloat16]
    form = partial(linear.Grouped4BitByKernel, kernel_rows=kernel_rows)
    if not _works(form, weight, _probe_rows(4).to(precision.compute)):
        return plain

    def make(weight: rounding.GroupedWeight, bias: Tensor | None) -> QuantizedLinear:
        fits = weight.values.shape[0] % linear.KERNEL_PANEL == 0
        if not fits or weight.group_size not in linear.KERNEL_GROUP_SIZES:
            return linear.GroupedLinear(weight, bias)
        return form(weight, bias)

    return Kernels(make, f"torch's int4 kernel up to {kernel_rows} rows, more unpacked")


def on_gpu(
    scheme: Scheme, precision: Precision, device: torch.device, *, rounds: bool = True
) -> Kernels | None:
    """Triton's kernels for a scheme on a GPU; None where they do not work.

    rounds  round activations if the scheme does
    """
    if device.type != "cuda" or scheme in (Scheme.NONE, Scheme.AWQ_INT3):
        return None
    try:
        from lmi_bench.engine.torch_backend.quantization import gpu_linear
    except ImportError:  # torch for this system brings no Triton
        return None
    probe, otherwise = _probe_weight().to(device), _ON_ANY_DEVICE[scheme]
    weight: rounding.QuantizedWeight = rounding.round_int8(probe)
    if scheme is Scheme.AWQ_INT4:
        weight = rounding.round_grouped(probe, 4, 128)
    elif scheme is Scheme.FP8:
        weight = rounding.round_fp8(probe)
    rounds = rounds and scheme.rounds_activations
    form: Make = gpu_linear.RoundedGpuLinear if rounds else gpu_linear.GpuLinear
    for count in (16, 128):  # by Triton, and partly by torch
        rows = _probe_rows(count).to(device, precision.compute)
        if not _works(form, weight, rows, otherwise(weight, None)(rows) if rounds else None):
            return None

    def make(
        weight: rounding.QuantizedWeight, bias: Tensor | None, *fixed: Tensor
    ) -> QuantizedLinear:
        return (form if gpu_linear.fits(weight) else otherwise)(weight, bias, *fixed)

    return Kernels(make, "Triton's kernels, a prompt's rows with torch's", fits=gpu_linear.fits)


def _works(
    form: Make, weight: rounding.QuantizedWeight, rows: Tensor, wanted: Tensor | None = None
) -> bool:
    """True if a product is close to the wanted one, or else to that with the dequantized weight."""
    if wanted is None:
        wanted = rows.float() @ weight.floats().t()
    try:
        got = form(weight, None)(rows).float()
    except Exception:  # noqa: BLE001 - Triton's errors and torch's have no class in common
        return False
    return bool((got - wanted).abs().max() < _MAX_ERROR * wanted.abs().max())


def _probe_weight() -> Tensor:
    """Fixed random numbers, shape (1024, 1024)."""
    return torch.randn(_PROBE_SIZE, _PROBE_SIZE, generator=torch.Generator().manual_seed(1))


def _probe_rows(count: int) -> Tensor:
    return torch.randn(count, _PROBE_SIZE, generator=torch.Generator().manual_seed(2))
