"""Quantization schemes, their settings and LMI's names for them.

Plain values; the arithmetic is in `torch_backend/quantization`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Final

from lmi_bench.core.errors import InputError

DEFAULT_ALPHA: Final = 0.8
"""Migration strength of LMI's `option.smoothquant_alpha`; the paper's own choice is 0.5."""

GROUP_SIZES: Final = (128, 64, 32, 16, 8)
"""AWQ inputs per scale: the first size that divides every matrix of a model is used."""


class Scheme(StrEnum):
    """A number format for weights, and in some schemes for activations."""

    NONE = "none"
    INT8 = "int8"  # weights only, one scale per row
    AWQ_INT4 = "awq-int4"  # weights only, one scale and zero point per group of inputs
    AWQ_INT3 = "awq-int3"
    SMOOTHQUANT = "smoothquant"  # weights and activations in int8
    FP8 = "fp8"  # weights and activations in float8_e4m3

    @property
    def bits(self) -> int:
        """Bits of a quantized weight; 16 for NONE."""
        return {"none": 16, "awq-int4": 4, "awq-int3": 3}.get(self.value, 8)

    @property
    def calibrated(self) -> bool:
        """True if it needs calibration activations before rounding."""
        return self in (Scheme.AWQ_INT4, Scheme.AWQ_INT3, Scheme.SMOOTHQUANT)

    @property
    def grouped(self) -> bool:
        """True if scales are per group of inputs instead of per row."""
        return self in (Scheme.AWQ_INT4, Scheme.AWQ_INT3)

    @property
    def rounds_activations(self) -> bool:
        """True if activations are quantized to the weights' bits."""
        return self in (Scheme.SMOOTHQUANT, Scheme.FP8)


LMI_NAMES: Final[Mapping[str, Scheme]] = {"awq": Scheme.AWQ_INT4, "smoothquant": Scheme.SMOOTHQUANT, "fp8": Scheme.FP8}
"""Values of LMI's `option.quantize` that correspond to one of the schemes.

`bitsandbytes8` and `dynamic_int8` treat outliers or activations differently from `int8` here;
`gptq` and `squeezellm` are checkpoint formats.
"""


@dataclass(frozen=True, slots=True)
class QuantizeSettings:
    """A scheme and its settings.

    alpha        SmoothQuant: share of the outliers moved into the weights, 0 to 1
    per_token    SmoothQuant: one scale per row of activations; else one, from calibration
    per_channel  SmoothQuant: one scale per row of a weight; else one per matrix
    calibration  a text file; None: the engine's sample text
    """

    scheme: Scheme = Scheme.NONE
    alpha: float = DEFAULT_ALPHA
    per_token: bool = True
    per_channel: bool = True
    calibration: Path | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise InputError(f"smoothquant_alpha must be from 0 to 1, got {self.alpha:g}")

    def __str__(self) -> str:
        if self.scheme is not Scheme.SMOOTHQUANT:
            return self.scheme.value
        rows = "" if self.per_token else ", one scale for all tokens"
        rows += "" if self.per_channel else ", one scale per matrix"
        return f"smoothquant (alpha {self.alpha:g}{rows})"


@dataclass(slots=True)
class QuantizedBytes:
    """Sizes and errors of quantized matrices, of a model or one rank's part of it.

    held_bytes      size of the quantized matrices; float_bytes: their size in the stored format
    relative_error  per matrix: |rounded - weight| / |weight| (Frobenius), by its first name;
                    empty for weights that are stored quantized
    kernels         description of the kernels, for display
    emulated        True if the arithmetic is emulated
    weights_only    True if activations stay floats whatever the scheme
    """

    scheme: Scheme
    held_bytes: int = 0
    float_bytes: int = 0
    kernels: str = ""
    emulated: bool = False
    weights_only: bool = False
    relative_error: dict[str, float] = field(default_factory=dict)


def sum_quantized(parts: Sequence[QuantizedBytes | None]) -> QuantizedBytes | None:
    """The sum over all ranks; errors and kernels are the first rank's."""
    known = [part for part in parts if part is not None]
    if not known:
        return None
    return replace(
        known[0], held_bytes=sum(part.held_bytes for part in known), float_bytes=sum(part.float_bytes for part in known)
    )


NOT_QUANTIZED: Final = QuantizeSettings()


def parse_scheme(name: str) -> Scheme:
    """The scheme with this name or LMI name; raises InputError with the known names."""
    if name in LMI_NAMES:
        return LMI_NAMES[name]
    try:
        return Scheme(name)
    except ValueError:
        known = ", ".join(dict.fromkeys([*Scheme, *LMI_NAMES]))
        raise InputError(f"quantize {name!r} is not known; known: {known}") from None
