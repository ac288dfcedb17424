"""Loads a model with quantized matrices: rounded while loading, or stored quantized.

Embeddings, head, norms and the routers of experts stay floats.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from lmi_bench.core.errors import InputError
from lmi_bench.engine.quantization import QuantizedBytes, QuantizeSettings, Scheme
from lmi_bench.engine.torch_backend.collectives import Collectives
from lmi_bench.engine.torch_backend.layers import Linear
from lmi_bench.engine.torch_backend.loading import Joined, WeightLoader
from lmi_bench.engine.torch_backend.precision import Precision
from lmi_bench.engine.torch_backend.quantization.awq_format import from_awq
from lmi_bench.engine.torch_backend.quantization.kernels import NO_KERNELS, choose_kernels
from lmi_bench.engine.torch_backend.quantization.packing import unpack_3bit_from_file
from lmi_bench.engine.torch_backend.quantization.plan import QuantizePlan
from lmi_bench.engine.torch_backend.quantization.rounding import (
    FP8,
    Fp8Weight,
    GroupedWeight,
    Int8Weight,
    QuantizedWeight,
    round_fp8,
    round_grouped,
    round_int8,
)
from lmi_bench.engine.torch_backend.weights import Checkpoint
from lmi_bench.models.spec import DecoderSpec

COLUMN_FACTORS: Final = "column_factors"
"""Suffix of the factors of a matrix's columns; its inputs were divided by them."""
OUTPUT_DIVISORS: Final = "output_divisors"
"""Suffix of the divisors of a norm's or matrix's outputs."""
LARGEST_INPUT: Final = "largest_input"
"""Suffix of the largest input in calibration, a single number."""


class QuantizingLoader(WeightLoader):
    """As WeightLoader, with matrices rounded by a plan.

    A plan with the scheme `none` only moves scales: the model's function stays the same.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        checkpoint: Checkpoint,
        precision: Precision,
        device: torch.device,
        collectives: Collectives | None,
        plan: QuantizePlan,
    ) -> None:
        super().__init__(spec, checkpoint, precision, device, collectives)
        self._plan = plan
        self._kernels = NO_KERNELS
        if plan.settings.scheme is not Scheme.NONE:
            self._kernels = choose_kernels(plan.settings, precision, device)
        self._held_bytes = 0
        self._float_bytes = 0
        self._errors: dict[str, float] = {}

    @property
    def quantized(self) -> QuantizedBytes:
        """Bytes and errors of the matrices loaded so far."""
        return QuantizedBytes(
            self._plan.settings.scheme,
            self._held_bytes,
            self._float_bytes,
            self._kernels.words,
            self._kernels.emulated,
            self._errors,
        )

    def tensor(self, name: str, *shape: int) -> Tensor:
        return self.smoothed(name, *shape).to(self.precision.compute)

    def smoothed(self, name: str, *shape: int) -> Tensor:
        """A tensor in float32, with calibration factors applied to columns and outputs."""
        stored = self._checkpoint.tensor(name, *shape).to(self.device, self.precision.stored)
        return apply_factors(self._checkpoint, name, stored.float())

    def matrix(
        self, parts: list[tuple[str, int]], columns: int, bias: Tensor | None, joined: Joined
    ) -> Linear:
        first = parts[0][0]
        floats_stay = not is_quantized_name(first, self.spec) or (
            self._plan.stored and f"{first}.weight" in self._checkpoint
        )
        if floats_stay or self._plan.settings.scheme is Scheme.NONE:
            return super().matrix(parts, columns, bias, joined)
        rows = sum(count for _, count in parts)
        if self._plan.stored:
            weight = self._stored(parts, columns, joined)
        else:
            floats = joined([self.smoothed(f"{name}.weight", n, columns) for name, n in parts])
            weight = round_weight(floats, self._plan.settings, self._plan.group_size)
            self._errors[first] = relative_error(weight.floats(), floats)
        largest = None
        if f"{first}.{LARGEST_INPUT}" in self._checkpoint:
            largest = self._checkpoint.tensor(f"{first}.{LARGEST_INPUT}").to(self.device)
        linear = self._kernels.make(weight, bias, largest)
        self._held_bytes += linear.nbytes
        self._float_bytes += rows * columns * self.precision.stored.itemsize
        self.held_bytes += linear.nbytes
        return linear

    def _stored_columns(self, name: str) -> int:
        for suffix, side in (("weight", 1), ("qweight", 0), ("int8", 1), ("fp8", 1)):
            if f"{name}.{suffix}" in self._checkpoint:
                return self._checkpoint.stored_shape(f"{name}.{suffix}")[side]
        if f"{name}.packed_3bit" in self._checkpoint:
            return self._checkpoint.stored_shape(f"{name}.packed_3bit")[1] * 8 // 3
        return super()._stored_columns(name)

    def _stored(
        self, parts: list[tuple[str, int]], columns: int, joined: Joined
    ) -> QuantizedWeight:
        """Stored quantized matrices, joined into one."""
        weights = [self._stored_one(name, rows, columns) for name, rows in parts]
        head = weights[0]
        if isinstance(head, GroupedWeight):
            groups = [weight for weight in weights if isinstance(weight, GroupedWeight)]
            return replace(
                head,
                values=joined([weight.values for weight in groups]),
                scale=joined([weight.scale for weight in groups]),
                zeros=joined([weight.zeros for weight in groups]),
            )
        values = joined([weight.values for weight in weights])
        return replace(head, values=values, scale=joined([weight.scale for weight in weights]))

    def _stored_one(self, name: str, rows: int, columns: int) -> QuantizedWeight:
        take = self._take
        groups = columns // (self._plan.group_size or columns)
        match self._plan.settings.scheme:
            case Scheme.INT8 | Scheme.SMOOTHQUANT:
                scale = take(f"{name}.scale", rows)
                return Int8Weight(take(f"{name}.int8", rows, columns), scale.float())
            case Scheme.FP8:
                values = take(f"{name}.fp8", rows, columns).view(FP8)
                return Fp8Weight(values, take(f"{name}.scale", rows).float())
            case Scheme.AWQ_INT3:
                packed = take(f"{name}.packed_3bit", rows, columns * 3 // 8)
                scale, zeros = (take(f"{name}.{kind}", rows, groups) for kind in ("scale", "zeros"))
                return GroupedWeight(unpack_3bit_from_file(packed), scale.float(), zeros, bits=3)
        if rows % 8:
            raise InputError(
                f"{name}: AWQ packs outputs in eights, and this device gets {rows}: lower --tp"
            )
        return from_awq(
            take(f"{name}.qweight", columns, rows // 8),
            take(f"{name}.qzeros", groups, rows // 8),
            take(f"{name}.scales", groups, rows),
        )

    def _take(self, name: str, *shape: int) -> Tensor:
        return self._checkpoint.tensor(name, *shape).to(self.device)


def apply_factors(
    checkpoint: Checkpoint, name: str, whole: Tensor, *, columns_alone: bool = False
) -> Tensor:
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
    return not (spec.experts and name.endswith(".gate"))


def round_weight(weight: Tensor, settings: QuantizeSettings, group_size: int) -> QuantizedWeight:
    """Round a float32 weight with the settings' scheme."""
    match settings.scheme:
        case Scheme.INT8:
            return round_int8(weight)
        case Scheme.SMOOTHQUANT:
            return round_int8(weight, per_channel=settings.per_channel)
        case Scheme.AWQ_INT4 | Scheme.AWQ_INT3:
            return round_grouped(weight, settings.scheme.bits, group_size)
        case Scheme.FP8:
            return round_fp8(weight)
    raise ValueError(f"{settings.scheme} quantizes nothing")


def relative_error(rounded: Tensor, exact: Tensor) -> float:
    """|rounded - exact| / |exact| over all elements."""
    size = float(exact.norm())
    return float((rounded - exact).norm()) / size if size else 0.0
