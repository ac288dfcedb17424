"""Loads a model with its weights: whole or one rank's part, quantized or as stored.

The quantization plan is made once, then used by every rank. Matrices are rounded while loading, or
stored quantized; embeddings, head, norms and the routers of experts stay floats.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from lmi_bench.core.errors import CapacityError, InputError
from lmi_bench.engine.quantization import GROUP_SIZES, QuantizedBytes, QuantizeSettings, Scheme
from lmi_bench.engine.torch_backend.collectives import Collectives
from lmi_bench.engine.torch_backend.layers import Linear
from lmi_bench.engine.torch_backend.loading import Joined, RankCheckpoint, WeightLoader, rank_part
from lmi_bench.engine.torch_backend.models.decoder import Decoder
from lmi_bench.engine.torch_backend.models.families import build_with
from lmi_bench.engine.torch_backend.precision import Precision
from lmi_bench.engine.torch_backend.quantization import rounding
from lmi_bench.engine.torch_backend.quantization.kernels import NO_KERNELS, choose_kernels, on_gpu
from lmi_bench.engine.torch_backend.weights import FLOAT_METHODS, Checkpoint, Progress
from lmi_bench.models.spec import DecoderSpec

OWN_METHOD: Final = "lmi-bench"
"""`quant_method` of folders that `optimize` writes in formats without a public name."""


@dataclass(frozen=True, slots=True)
class QuantizePlan:
    """A scheme with the data needed to load a model.

    group_size  inputs that share a scale; 0 for schemes without groups
    factors     file with the calibration factors of columns, norms and rows
    stored      the folder's weights are already quantized
    kept        by a method whose weights are floats elsewhere: matrices that the device has kernels
                for keep their bytes, and no activation is rounded
    """

    settings: QuantizeSettings
    group_size: int = 0
    factors: Path | None = None
    stored: bool = False
    kept: bool = False


def check_group_size(name: str, spec: DecoderSpec, degree: int) -> int:
    """AWQ's group size for a model over `degree` ranks; raises CapacityError if none fits."""
    sizes = _matrix_inputs(spec, degree)
    for each in GROUP_SIZES:
        if all(size % each == 0 for size in sizes):
            return each
    raise CapacityError(
        f"{name} over {degree} device(s) has matrices of {', '.join(map(str, sizes))} inputs: "
        f"none of the group sizes {', '.join(map(str, GROUP_SIZES))} divides them all; use "
        "another scheme or degree"
    )


def stored_plan(folder: Path, config: Mapping[str, Any], spec: DecoderSpec, degree: int) -> QuantizePlan | None:
    """The plan of a folder with quantized weights; None for other folders. Raises InputError for an
    unknown format, CapacityError if ranks would split a group."""
    stated = config.get("quantization_config")
    if not stated:
        return None
    method = str(stated.get("quant_method", "")).lower()
    if method in FLOAT_METHODS:
        return None
    group_size = stated.get("group_size", 128 if method == "awq" else 0)
    if type(group_size) is not int:
        raise InputError(f"{folder / 'config.json'}: group_size {group_size!r} is no whole number")
    if method == "awq":
        bits = stated.get("bits", stated.get("w_bit", 4))
        version = str(stated.get("version") or stated.get("format") or "gemm").lower()
        if bits != 4 or version != "gemm":
            raise InputError(
                f"{folder / 'config.json'}: AWQ weights of {bits} bits in the layout {version!r} "
                "cannot be loaded; only 4 bits in the layout 'gemm' are supported"
            )
        # -1: one scale for a whole row, which must not be split
        settings, group_size = QuantizeSettings(Scheme.AWQ_INT4), max(0, group_size)
    elif method == OWN_METHOD:
        settings = _own_settings(folder, stated)
    else:
        raise InputError(
            f"{folder / 'config.json'}: weights quantized with {method or 'an unnamed method'!r} "
            f"cannot be loaded; supported: awq, {OWN_METHOD}, {', '.join(FLOAT_METHODS)}"
        )
    for size in _matrix_inputs(spec, degree):
        if group_size and size % group_size:
            raise CapacityError(
                f"{folder.name} has groups of {group_size} weights, which matrices of {size} "
                f"inputs over {degree} device(s) would split: lower --tp"
            )
    return QuantizePlan(settings, group_size, stored=True)


def kept_plan(config: Mapping[str, Any], device: torch.device, degree: int) -> QuantizePlan | None:
    """The plan of a folder whose FP8 or compressed-tensors weights a GPU keeps as they are; None
    for other folders and devices, and over ranks, which split floats."""
    stated = config.get("quantization_config") or {}
    method, stored = str(stated.get("quant_method", "")).lower(), str(stated.get("format", ""))
    if device.type != "cuda" or degree > 1 or method not in FLOAT_METHODS[:2]:
        return None
    scheme = Scheme.AWQ_INT4 if "pack" in stored else Scheme.INT8
    if method == "fp8" or "float" in stored:
        scheme = Scheme.FP8
    return QuantizePlan(QuantizeSettings(scheme), stored=True, kept=True)


def _own_settings(folder: Path, stated: Mapping[str, Any]) -> QuantizeSettings:
    try:
        return QuantizeSettings(
            Scheme(str(stated["scheme"])),
            alpha=float(stated.get("alpha", 0.0)),
            per_token=bool(stated.get("per_token", True)),
            per_channel=bool(stated.get("per_channel", True)),
        )
    except (KeyError, TypeError, ValueError) as exc:
        raise InputError(f"{folder / 'config.json'}: quantization_config: {exc}") from exc


def _matrix_inputs(spec: DecoderSpec, degree: int) -> tuple[int, ...]:
    """Input sizes of a rank's matrices; those split by columns have a part."""
    split = (spec.num_heads * spec.head_dim, spec.ffn_size, spec.dense_ffn_size, spec.shared_ffn_size)
    return (spec.hidden_size, *(size // degree for size in split if size))


COLUMN_FACTORS: Final = "column_factors"
"""Suffix of the factors of a matrix's columns; its inputs were divided by them."""
OUTPUT_DIVISORS: Final = "output_divisors"  # suffix of the divisors of a norm's or matrix's outputs
LARGEST_INPUT: Final = "largest_input"
"""Suffix of the largest input in calibration, a single number."""


@dataclass(eq=False)
class QuantizingLoader(WeightLoader):
    """As WeightLoader, with matrices rounded by a plan. A plan with the scheme `none` only moves
    scales: the model's function stays the same."""

    plan: QuantizePlan = field(kw_only=True)
    quantized: QuantizedBytes = field(init=False)

    def __post_init__(self) -> None:
        settings, where = self.plan.settings, (self.precision, self.device)
        if self.plan.kept:
            found = on_gpu(settings.scheme, *where, rounds=False)
            self._kernels = kernels = found or NO_KERNELS
        else:
            self._kernels = kernels = choose_kernels(settings, *where)
        self.quantized = QuantizedBytes(
            settings.scheme, kernels=kernels.words, emulated=kernels.emulated, weights_only=self.plan.kept
        )

    def tensor(self, name: str, *shape: int) -> Tensor:
        return self.smoothed(name, *shape).to(self.precision.compute)

    def smoothed(self, name: str, *shape: int) -> Tensor:
        """A tensor in float32, with calibration factors applied to columns and outputs."""
        stored = self.checkpoint.tensor(name, *shape).to(self.device, self.precision.stored)
        return apply_factors(self.checkpoint, name, stored.float())

    def matrix(self, parts: list[tuple[str, int]], columns: int, bias: Tensor | None, joined: Joined) -> Linear:
        first = parts[0][0]
        kept = [self._kept(name) for name, _ in parts] if self.plan.kept else [None]
        if all(weight is not None for weight in kept):
            return self._made(_joined(kept, joined), bias)
        floats_stay = not is_quantized_name(first, self.spec) or (
            self.plan.stored and f"{first}.weight" in self.checkpoint
        )
        if floats_stay or self.plan.settings.scheme is Scheme.NONE:
            return super().matrix(parts, columns, bias, joined)
        if self.plan.stored:
            stored = [self._stored_one(name, rows, columns) for name, rows in parts]
            weight = _joined(stored, joined)
        else:
            floats = joined([self.smoothed(f"{name}.weight", n, columns) for name, n in parts])
            weight = rounding.round_weight(floats, self.plan.settings, self.plan.group_size)
            self.quantized.relative_error[first] = relative_error(weight.floats(), floats)
        largest = [
            self.checkpoint.tensor(name).to(self.device)
            for name in (f"{first}.{LARGEST_INPUT}",)
            if name in self.checkpoint
        ]
        return self._made(weight, bias, *largest)

    def _made(self, weight: rounding.QuantizedWeight, bias: Tensor | None, *largest: Tensor) -> Linear:
        linear = self._kernels.make(weight, bias, *largest)
        self.quantized.held_bytes += linear.nbytes
        self.quantized.float_bytes += weight.values.numel() * self.precision.stored.itemsize
        self.held_bytes += linear.nbytes
        return linear

    def _kept(self, name: str) -> rounding.QuantizedWeight | None:
        """A matrix in its stored bytes; None if it has others, or its blocks have no kernel."""
        parts = self.checkpoint.parts(f"{name}.weight")
        if parts is None or self._kernels is NO_KERNELS:
            return None
        values, scale = (part.to(self.device) for part in parts)
        weight = rounding.QuantizedWeight(values, scale)
        if values.dtype is torch.int32:
            zeros = torch.full_like(scale, 8, dtype=torch.uint8)
            weight = rounding.QuantizedWeight((values + 8).to(torch.uint8), scale, zeros, bits=4)
        return weight if self._kernels.fits(weight) else None

    def _stored_one(self, name: str, rows: int, columns: int) -> rounding.QuantizedWeight:
        take = self._take
        groups = columns // (self.plan.group_size or columns)
        match self.plan.settings.scheme:
            case Scheme.INT8 | Scheme.SMOOTHQUANT | Scheme.FP8 as scheme:
                kind = "fp8" if scheme is Scheme.FP8 else "int8"
                values = take(f"{name}.{kind}", rows, columns)
                return rounding.QuantizedWeight(values, take(f"{name}.scale", rows).float())
            case Scheme.AWQ_INT3:
                packed = take(f"{name}.packed_3bit", rows, columns * 3 // 8)
                scale, zeros = (take(f"{name}.{kind}", rows, groups) for kind in ("scale", "zeros"))
                return rounding.QuantizedWeight(rounding.unpack_3bit_from_file(packed), scale.float(), zeros, bits=3)
        if rows % 8:
            raise InputError(f"{name}: AWQ packs outputs in eights, and this device gets {rows}: lower --tp")
        return rounding.from_awq(
            take(f"{name}.qweight", columns, rows // 8),
            take(f"{name}.qzeros", groups, rows // 8),
            take(f"{name}.scales", groups, rows),
        )

    def _take(self, name: str, *shape: int) -> Tensor:
        return self.checkpoint.tensor(name, *shape).to(self.device)


def _joined(weights: Sequence[Any], joined: Joined) -> rounding.QuantizedWeight:
    """Quantized matrices as one."""
    names = ["values", "scale", "zeros"][: 2 if weights[0].zeros is None else 3]
    whole = {name: joined([getattr(weight, name) for weight in weights]) for name in names}
    one: rounding.QuantizedWeight = replace(weights[0], **whole)
    return one


def apply_factors(checkpoint: Checkpoint, name: str, whole: Tensor, *, columns_alone: bool = False) -> Tensor:
    """Apply the calibration factors to a weight or bias, or to this rank's part of one.

    columns_alone  leave the outputs unscaled, to compare a single matrix
    """
    base, _, kind = name.rpartition(".")
    columns, outputs = f"{base}.{COLUMN_FACTORS}", f"{base}.{OUTPUT_DIVISORS}"
    if whole.ndim == 2 and kind == "weight" and columns in checkpoint:
        whole = whole * checkpoint.tensor(columns, whole.shape[1]).to(whole.device)
    if outputs in checkpoint and not columns_alone:
        divisors = checkpoint.tensor(outputs, whole.shape[0]).to(whole.device)
        whole = whole / (divisors[:, None] if whole.ndim == 2 else divisors)
    return whole


def is_quantized_name(name: str, spec: DecoderSpec) -> bool:
    """True if the matrix with this name is quantized: a router of experts is not."""
    return not (spec.experts and name.endswith((".gate", ".router", "_gate")))


def relative_error(rounded: Tensor, exact: Tensor) -> float:
    """|rounded - exact| / |exact| over all elements."""
    size = float(exact.norm())
    return float((rounded - exact).norm()) / size if size else 0.0


def build_model(
    folder: Path,
    spec: DecoderSpec,
    precision: Precision,
    device: torch.device,
    progress: Progress | None = None,
    collectives: Collectives | None = None,
    plan: QuantizePlan | None = None,
    strategy: str | None = None,
) -> Decoder:
    """Load the model's weights; raises InputError if they cannot be loaded.

    progress     called with the bytes read and all bytes, after each tensor
    collectives  of the ranks that share the model; None: the whole model is here
    plan         how to quantize matrices; None: not at all
    strategy     how KV heads go to ranks
    """
    beside = None if plan is None else plan.factors
    if collectives is None:
        opened = Checkpoint(folder, progress, beside=beside, spec=spec)
    else:
        part, heads = rank_part(spec, collectives, strategy)
        opened = RankCheckpoint(folder, spec, collectives, progress, beside=beside, heads=heads)
        spec = part
    with opened as checkpoint:
        common = (spec, checkpoint, precision, device, collectives)
        load = WeightLoader(*common) if plan is None else QuantizingLoader(*common, plan=plan)
        return build_with(load, folder)
