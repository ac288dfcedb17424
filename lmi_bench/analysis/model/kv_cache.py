"""Bytes of KV cache for a token and for a sequence, on each rank.

    bytes = 2 (key and value) * layers * KV heads on the rank * head size * bytes per value

The cache of a layer with a sliding window stops growing at the window. Multi-head latent attention
caches one vector for each token and layer, complete on every rank. Source: Kwon et al. 2023,
arXiv:2309.06180, section 3; DeepSeek-AI 2024, arXiv:2405.04434, section 2.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from lmi_bench.analysis.model.weights import FORMAT_ALIASES
from lmi_bench.core.errors import CapacityError, InputError
from lmi_bench.models.shape import ModelShape

KV_BYTES_PER_VALUE = 2.0  # 16-bit cache, the default of every engine here
_WIDE_WEIGHTS = ("float32", "fp32")
_KV_FORMATS: Final[Mapping[str, float]] = {
    "float32": 4.0,
    "float16": 2.0,
    "bfloat16": 2.0,
    "float8": 1.0,  # the scale of a tensor or head is negligible
    "int8": 1.0,
}
_KV_ALIASES: Final[Mapping[str, str]] = {
    **FORMAT_ALIASES,
    "fp8_e4m3": "float8",
    "fp8_e5m2": "float8",
}


def kv_bytes_per_value(dtype: str, kv_dtype: str | None = None) -> float:
    """Bytes of one cached value; raises InputError for an unknown cache format.

    dtype     of the weights
    kv_dtype  of the cache; None: 32 bits with 32-bit weights, else 16 bits
    """
    if kv_dtype is None:
        return 4.0 if dtype.strip().lower() in _WIDE_WEIGHTS else KV_BYTES_PER_VALUE
    word = kv_dtype.strip().lower()
    found = _KV_FORMATS.get(_KV_ALIASES.get(word, word))
    if found is None:
        raise InputError(
            f"KV cache dtype {kv_dtype!r} is not known; use one of {', '.join(_KV_FORMATS)}"
        )
    return found


def kv_heads_per_rank(shape: ModelShape, tensor_parallel: int) -> int:
    """KV heads that one rank stores; ranks in excess of the heads hold replicas.

    Raises CapacityError if the heads cannot be divided evenly.
    """
    heads = shape.num_kv_heads
    if tensor_parallel < 1 or (heads % tensor_parallel and tensor_parallel % heads):
        raise CapacityError(
            f"{heads} KV heads of {shape.name} cannot be shared out over {tensor_parallel} "
            f"devices: --tp must divide {heads} or be a multiple of it"
        )
    return max(1, heads // tensor_parallel)


def kv_values_per_layer(shape: ModelShape, tensor_parallel: int) -> int:
    """Cached values of one token in one layer on each rank."""
    if shape.latent_kv_dim:
        return shape.latent_kv_dim
    return 2 * kv_heads_per_rank(shape, tensor_parallel) * shape.head_dim


def kv_bytes_per_token(
    shape: ModelShape, *, bytes_per_value: float = KV_BYTES_PER_VALUE, tensor_parallel: int = 1
) -> float:
    """Bytes that a token adds on each rank while the context is inside every window.

    Raises CapacityError if the KV heads cannot be divided evenly.
    """
    return shape.num_layers * kv_values_per_layer(shape, tensor_parallel) * bytes_per_value


def kv_bytes_per_sequence(
    shape: ModelShape,
    context_tokens: float,
    *,
    bytes_per_value: float = KV_BYTES_PER_VALUE,
    tensor_parallel: int = 1,
) -> float:
    """Bytes of a sequence of `context_tokens` on each rank.

    Llama 2 7B at 4096 tokens in FP16: 0.5 MiB * 4096 = 2 GiB.
    """
    values = kv_values_per_layer(shape, tensor_parallel)
    growing = shape.growing_layers
    sliding = shape.num_layers - growing
    window = min(context_tokens, shape.sliding_window or context_tokens)
    return values * bytes_per_value * (growing * context_tokens + sliding * window)
