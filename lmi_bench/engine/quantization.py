"""How a model's weights are quantized: the schemes, their settings and their names elsewhere.

Plain values; `torch_backend/quantization` has what computes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Final

from lmi_bench.core.errors import InputError

DEFAULT_ALPHA: Final = 0.8
"""Migration strength of LMI's `option.smoothquant_alpha`; the paper's own choice is 0.5."""

GROUP_SIZES: Final = (128, 64, 32, 16, 8)
"""Inputs that share one scale of AWQ: the first that divides every matrix of a model."""


class Scheme(StrEnum):
    """A number format of weights, and of activations where it has one."""

    NONE = "none"
    INT8 = "int8"  # weights alone, a scale a row
    AWQ_INT4 = "awq-int4"  # weights alone, a scale and a zero a group of inputs
    AWQ_INT3 = "awq-int3"
    SMOOTHQUANT = "smoothquant"  # weights and activations in int8
    FP8 = "fp8"  # weights and activations in float8_e4m3

    @property
    def bits(self) -> int:
        """Bits of a quantized weight; 16 where nothing is quantized."""
        return {"none": 16, "awq-int4": 4, "awq-int3": 3}.get(self.value, 8)

    @property
    def calibrated(self) -> bool:
        """Whether it looks at what passes through the model before it rounds."""
        return self in (Scheme.AWQ_INT4, Scheme.AWQ_INT3, Scheme.SMOOTHQUANT)

    @property
    def grouped(self) -> bool:
        """Whether a group of inputs has a scale, instead of a whole row."""
        return self in (Scheme.AWQ_INT4, Scheme.AWQ_INT3)

    @property
    def rounds_activations(self) -> bool:
        """Whether what is multiplied with the weights has as few bits as they have."""
        return self in (Scheme.SMOOTHQUANT, Scheme.FP8)


LMI_NAMES: Final[Mapping[str, Scheme]] = {
    "awq": Scheme.AWQ_INT4,
    "smoothquant": Scheme.SMOOTHQUANT,
    "fp8": Scheme.FP8,
}
"""What `option.quantize` of LMI containers asks for, as far as it means one of the schemes.

`bitsandbytes8` and `dynamic_int8` keep outliers or activations in other ways than `int8` here, so
they are not taken for it; `gptq` and `squeezellm` are formats of checkpoints.
"""


@dataclass(frozen=True, slots=True)
class QuantizeSettings:
    """A scheme and what can be set about it.

    alpha        SmoothQuant: how much of the outliers moves into the weights, 0 to 1
    per_token    SmoothQuant: a scale for each row of activations; else one, from calibration
    per_channel  SmoothQuant: a scale for each row of a weight; else one for the matrix
    calibration  a text file; None: the text that comes with the engine
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
        rows += "" if self.per_channel else ", one scale a matrix"
        return f"smoothquant (alpha {self.alpha:g}{rows})"


@dataclass(frozen=True, slots=True)
class QuantizedBytes:
    """What quantizing did to the matrices of a model, or of one rank's part of it.

    scheme          what they were rounded by
    held_bytes      of the quantized matrices; float_bytes: of the same ones in the stored format
    relative_error  of each: |rounded - weight| / |weight| (Frobenius), by the first of its names;
                    none for weights that are stored quantized
    kernels         how the products are taken, for a person
    emulated        whether the arithmetic is imitated
    """

    scheme: Scheme
    held_bytes: int
    float_bytes: int
    kernels: str
    emulated: bool = False
    relative_error: Mapping[str, float] = field(default_factory=dict)


def sum_quantized(parts: Sequence[QuantizedBytes | None]) -> QuantizedBytes | None:
    """Of all ranks together; errors and kernels are those of the first."""
    known = [part for part in parts if part is not None]
    if not known:
        return None
    return replace(
        known[0],
        held_bytes=sum(part.held_bytes for part in known),
        float_bytes=sum(part.float_bytes for part in known),
    )


NOT_QUANTIZED: Final = QuantizeSettings()


def parse_scheme(name: str) -> Scheme:
    """The scheme of that name, LMI's names included; InputError with the list otherwise."""
    if name in LMI_NAMES:
        return LMI_NAMES[name]
    try:
        return Scheme(name)
    except ValueError:
        known = ", ".join(dict.fromkeys([*Scheme, *LMI_NAMES]))
        raise InputError(f"quantize {name!r} is not known; there are: {known}") from None
