"""Chooses each scheme's kernel on this machine: tests which ones work.

Torch's quantized operators are not a public interface and differ by processor: each is first
compared with the exact product of a small matrix.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

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
    Scheme.INT8: linear.ScaledRows,
    Scheme.SMOOTHQUANT: linear.Emulated,
    Scheme.AWQ_INT4: linear.GroupedLinear,
    Scheme.AWQ_INT3: linear.GroupedLinear,
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
    fits: Callable[[Any], bool] = bool


def _no_kernel(*_: object) -> QuantizedLinear:
    raise ValueError("the scheme `none` rounds no weight")


NO_KERNELS: Final = Kernels(_no_kernel, "not quantized")


def choose_kernels(settings: QuantizeSettings, precision: Precision, device: torch.device) -> Kernels:
    """The fastest working kernels for the scheme of `settings`."""
    scheme = settings.scheme
    if scheme is Scheme.NONE:
        return NO_KERNELS
    is_cpu = device.type == "cpu"
    found = _on_cpu(scheme, precision) if is_cpu else on_gpu(scheme, precision, device)
    if found is not None:
        return found
    words = "unpacked at every step: no kernel here"
    if scheme.rounds_activations:
        words = "emulated: no kernel here"
    return Kernels(_ON_ANY_DEVICE[scheme], words, emulated=scheme.rounds_activations)


def _on_cpu(scheme: Scheme, precision: Precision) -> Kernels | None:
    """Torch's kernels for a scheme on a CPU; None where they do not work."""
    if scheme is Scheme.SMOOTHQUANT:
        if _works(linear.W8A8ByOneDnn, _probe_weight(scheme), _probe_rows(16)):
            return Kernels(linear.W8A8ByOneDnn, "oneDNN's int8 kernel")
        return None
    # torch's kernels round activations to bfloat16
    if scheme not in (Scheme.INT8, Scheme.AWQ_INT4) or precision.stored != torch.bfloat16:
        return None
    kernel_rows = _KERNEL_ROWS[scheme.bits][precision.compute == torch.bfloat16]
    form: Make = linear.ScaledRows if scheme is Scheme.INT8 else linear.Grouped4BitByKernel
    form = partial(form, kernel_rows=kernel_rows)
    for count in (4, kernel_rows + 1):  # by the kernel, and unpacked from its layout
        rows = _probe_rows(count).to(precision.compute)
        if not _works(form, _probe_weight(scheme), rows):
            return None

    def make(weight: rounding.QuantizedWeight, bias: Tensor | None) -> QuantizedLinear:
        fits = scheme is Scheme.INT8 or linear.kernel_fits(weight)
        return (form if fits else _ON_ANY_DEVICE[scheme])(weight, bias)

    words = f"torch's int{scheme.bits} kernel up to {kernel_rows} rows, more unpacked"
    return Kernels(make, words)


def on_gpu(scheme: Scheme, precision: Precision, device: torch.device, *, rounds: bool = True) -> Kernels | None:
    """Triton's kernels for a scheme on a GPU; None where they do not work.

    rounds  round activations if the scheme does
    """
    if device.type != "cuda" or scheme is Scheme.AWQ_INT3:
        return None
    try:
        from lmi_bench.engine.torch_backend.quantization import gpu_linear
    except ImportError:  # torch for this system brings no Triton
        return None
    rounds = rounds and scheme.rounds_activations
    form: Make = gpu_linear.RoundedGpuLinear if rounds else gpu_linear.GpuLinear
    weight, otherwise = _probe_weight(scheme, device), _ON_ANY_DEVICE[scheme]
    for count in (16, 128):  # by Triton, and partly by torch
        rows = _probe_rows(count).to(device, precision.compute)
        if not _works(form, weight, rows, otherwise(weight, None)(rows) if rounds else None):
            return None

    def make(weight: rounding.QuantizedWeight, bias: Tensor | None, *fixed: Tensor) -> QuantizedLinear:
        fits = gpu_linear.fits(weight) and not fixed
        return (form if fits else otherwise)(weight, bias, *fixed)

    return Kernels(make, "Triton's kernels, a prompt's rows with torch's", fits=gpu_linear.fits)


def _works(form: Make, weight: rounding.QuantizedWeight, rows: Tensor, wanted: Tensor | None = None) -> bool:
    """True if a product is close to the wanted one, or else to that with the dequantized weight."""
    if wanted is None:
        wanted = rows.float() @ weight.floats().t()
    try:
        got = form(weight, None)(rows).float()
    except Exception:  # noqa: BLE001 - Triton's errors and torch's have no class in common
        return False
    return bool((got - wanted).abs().max() < _MAX_ERROR * wanted.abs().max())


def _probe_weight(scheme: Scheme, device: torch.device | None = None) -> rounding.QuantizedWeight:
    """Fixed random numbers, shape (1024, 1024), in the scheme's format."""
    generator = torch.Generator().manual_seed(1)
    floats = torch.randn(_PROBE_SIZE, _PROBE_SIZE, generator=generator).to(device)
    return rounding.round_weight(floats, QuantizeSettings(scheme), 128)


def _probe_rows(count: int) -> Tensor:
    return torch.randn(count, _PROBE_SIZE, generator=torch.Generator().manual_seed(2))
