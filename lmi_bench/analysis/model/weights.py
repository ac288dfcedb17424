"""Bytes of a model's weights in a number format, and the weights that a step reads.

Quantized checkpoints keep embedding and output head in 16 bits. Scales and zero points count:
4-bit AWQ stores a 16-bit scale and a 4-bit zero for 128 weights, 4.16 bits a weight; MXFP4 stores
an 8-bit scale for 32 weights, 4.25 bits, and covers only the experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lmi_bench.core.errors import InputError
from lmi_bench.models.shape import ModelShape

BITS_PER_BYTE = 8
_FULL_BITS = 16


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """A number format of weights.

    bits           stored bits a weight, scales included; nominal_bits: without them
    covers         weights in this format; the others are in 16 bits
    compute_dtype  type of the matrix products
    widening_ops   vector operations that convert a stored weight to that type: convert, scale,
                   subtract a zero point; 0 where the products read it as it is
    """

    name: str
    bits: float
    nominal_bits: float
    covers: Literal["all", "linear", "experts"]
    compute_dtype: str
    widening_ops: int = 0


_AWQ_GROUP = 128
_FORMATS = {
    each.name: each
    for each in (
        WeightFormat("float32", 32, 32, "all", "float32"),
        WeightFormat("float16", 16, 16, "all", "float16"),
        WeightFormat("bfloat16", 16, 16, "all", "bfloat16"),
        WeightFormat("float8", 8, 8, "linear", "float8", 0),
        WeightFormat("int8", 8, 8, "linear", "float16", 2),
        WeightFormat("int4", 4 + (16 + 4) / _AWQ_GROUP, 4, "linear", "float16", 3),
        WeightFormat("mxfp4", 4 + 8 / 32, 4, "experts", "bfloat16", 2),
    )
}
FORMAT_ALIASES = {
    "fp32": "float32",
    "fp16": "float16",
    "half": "float16",
    "bf16": "bfloat16",
    "fp8": "float8",
    "awq": "int4",
}


def weight_format(dtype: str) -> WeightFormat:
    """The format of a name such as fp16, bfloat16, fp8 or int4; raises InputError."""
    key = dtype.strip().lower()
    known = _FORMATS.get(FORMAT_ALIASES.get(key, key))
    if known is None:
        raise InputError(f"dtype {dtype!r} is not known; use one of {', '.join(_FORMATS)}")
    return known


def checkpoint_format(checkpoint_dtype: str) -> WeightFormat:
    """The format that a catalog row's checkpoint dtype names, e.g. `mxfp4 experts, ...`."""
    word = checkpoint_dtype.split(maxsplit=1)[0].lower()
    return weight_format("float8" if word.startswith("float8") else word)


def embedding_params(shape: ModelShape) -> int:
    """Parameters of the input embedding and the output head, one table where they are tied."""
    tables = 1 if shape.tied_embeddings else 2
    return tables * shape.vocab_size * shape.hidden_size


def expert_params(shape: ModelShape) -> int:
    """Parameters of all routed experts; 0 if dense.

    total - active = (1 - experts_per_token / experts) * expert parameters
    """
    if not shape.is_moe or shape.experts == shape.experts_per_token:
        return 0
    untouched = shape.params_total - shape.params_active
    return untouched * shape.experts // (shape.experts - shape.experts_per_token)


def _covered_params(shape: ModelShape, covers: str) -> int:
    if covers == "all":
        return shape.params_total
    if covers == "experts":
        return expert_params(shape)
    return shape.params_total - embedding_params(shape)


def weight_bytes(shape: ModelShape, dtype: str) -> int:
    """Bytes of all weights as stored, over all devices; raises InputError on unknown dtypes.

    Llama 3 70B as int4: 68.45e9 * 4.16 / 8 + 2.10e9 * 2 = 39.8e9 bytes.
    """
    fmt = weight_format(dtype)
    covered = _covered_params(shape, fmt.covers)
    rest = shape.params_total - covered
    return round((covered * fmt.bits + rest * _FULL_BITS) / BITS_PER_BYTE)


def widening_ops_per_param(shape: ModelShape, dtype: str) -> float:
    """Vector operations to widen a weight, averaged over all parameters of the model.

    FP8 counts like INT8, convert and scale, for devices without FP8 units.
    """
    fmt = weight_format(dtype)
    ops = 2 if fmt.name == "float8" else fmt.widening_ops
    return ops * _covered_params(shape, fmt.covers) / shape.params_total


def streamed_params(shape: ModelShape) -> int:
    """Parameters that a step of many rows reads: all but an untied input embedding."""
    embedding = 0 if shape.tied_embeddings else shape.vocab_size * shape.hidden_size
    return shape.params_total - embedding
