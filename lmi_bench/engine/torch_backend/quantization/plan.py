"""The quantization plan: made once, then used by every rank that loads a part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from lmi_bench.core.errors import CapacityError, InputError
from lmi_bench.engine.quantization import GROUP_SIZES, QuantizeSettings, Scheme
from lmi_bench.engine.torch_backend.quantization.rounding import fit_group_size
from lmi_bench.models.spec import DecoderSpec

OWN_METHOD: Final = "lmi-bench"
"""`quant_method` of folders that `optimize` writes in formats without a public name."""


@dataclass(frozen=True, slots=True)
class QuantizePlan:
    """A scheme with the data needed to load a model.

    group_size  inputs that share a scale; 0 for schemes without groups
    factors     file with the calibration factors of columns, norms and rows
    stored      the folder's weights are already quantized
    """

    settings: QuantizeSettings
    group_size: int = 0
    factors: Path | None = None
    stored: bool = False


def check_group_size(name: str, spec: DecoderSpec, degree: int) -> int:
    """AWQ's group size for a model over `degree` ranks; raises CapacityError if none fits."""
    sizes = _matrix_inputs(spec, degree)
    size = fit_group_size(sizes, GROUP_SIZES)
    if size is None:
        raise CapacityError(
            f"{name} over {degree} device(s) has matrices of {', '.join(map(str, sizes))} inputs: "
            f"none of the group sizes {', '.join(map(str, GROUP_SIZES))} divides them all; use "
            "another scheme or degree"
        )
    return size


def stored_plan(
    folder: Path, config: Mapping[str, Any], spec: DecoderSpec, degree: int
) -> QuantizePlan | None:
    """The plan of a folder with quantized weights; None for other folders.

    Raises InputError for an unknown format, CapacityError if ranks would split a group.
    """
    stated = config.get("quantization_config")
    if not stated:
        return None
    method = str(stated.get("quant_method", "")).lower()
    if method == "awq":
        settings, group_size = _awq_settings(folder, stated), int(stated.get("group_size", 128))
        if group_size < 1:
            group_size = 0  # -1: one scale for a whole row, which must not be split
    elif method == OWN_METHOD:
        settings, group_size = _own_settings(folder, stated), int(stated.get("group_size", 0))
    else:
        raise InputError(
            f"{folder / 'config.json'}: weights quantized with {method or 'an unnamed method'!r} "
            f"cannot be loaded; supported: awq, {OWN_METHOD}"
        )
    for size in _matrix_inputs(spec, degree):
        if group_size and size % group_size:
            raise CapacityError(
                f"{folder.name} has groups of {group_size} weights, which matrices of {size} "
                f"inputs over {degree} device(s) would split: lower --tp"
            )
    return QuantizePlan(settings, group_size, stored=True)


def _awq_settings(folder: Path, stated: Mapping[str, Any]) -> QuantizeSettings:
    bits = stated.get("bits", stated.get("w_bit", 4))
    version = str(stated.get("version", "gemm")).lower()
    if bits != 4 or version != "gemm":
        raise InputError(
            f"{folder / 'config.json'}: AWQ weights of {bits} bits in the layout {version!r} "
            "cannot be loaded; only 4 bits in the layout 'gemm' are supported"
        )
    return QuantizeSettings(Scheme.AWQ_INT4)


def _own_settings(folder: Path, stated: Mapping[str, Any]) -> QuantizeSettings:
    try:
        return QuantizeSettings(
            Scheme(str(stated["scheme"])),
            alpha=float(stated.get("alpha", 0.0)),
            per_token=bool(stated.get("per_token", True)),
            per_channel=bool(stated.get("per_channel", True)),
        )
    except (KeyError, ValueError) as exc:
        raise InputError(f"{folder / 'config.json'}: quantization_config: {exc}") from exc


def _matrix_inputs(spec: DecoderSpec, degree: int) -> tuple[int, ...]:
    """Input sizes of a rank's matrices; those split by columns have a part."""
    return (
        spec.hidden_size,
        spec.num_heads * spec.head_dim // degree,
        spec.ffn_size // degree,
    )
