"""Bytes of KV cache: by token, by sequence, on each rank.

    bytes = 2 (key and value) * layers * KV heads on the rank * head size * bytes per value

Two families deviate. Layers with a sliding window stop growing at the window. Multi-head latent
attention caches one latent vector a token and layer, once, on every rank alike. Source: Kwon et
al. 2023, arXiv:2309.06180, section 3; DeepSeek-AI 2024, arXiv:2405.04434, section 2.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from lmi_bench.core.errors import CapacityError, InputError
from lmi_bench.models.shape import ModelShape

KV_BYTES_PER_VALUE = 2.0  # 16-bit cache, the default of every engine here
_WIDE_WEIGHTS = ("float32", "fp32")
_KV_FORMATS: Final[Mapping[str, float]] = {
    "float32": 4.0,
    "float16": 2.0,
    "bfloat16": 2.0,
    "float8": 1.0,  # one scale a tensor or head, next to nothing
    "int8": 1.0,
}
_KV_ALIASES: Final[Mapping[str, str]] = {
    "fp32": "float32",
    "fp16": "float16",
    "half": "float16",
    "bf16": "bfloat16",
    "fp8": "float8",
    "fp8_e4m3": "float8",
    "fp8_e5m2": "float8",
}


def kv_bytes_per_value(dtype: str, kv_dtype: str | None = None) -> float:
    """Bytes of one cached value.

    kv_dtype  of the cache; None: as engines choose it, 32 bits beside 32-bit weights and 16 bits
              beside all others

    Raises InputError for a format that no cache has.
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
    """KV heads that one rank stores; beyond one a rank the heads are replicated.

    Raises CapacityError if the heads cannot be shared out evenly.
    """
    heads = shape.num_kv_heads
    if tensor_parallel < 1 or (heads % tensor_parallel and tensor_parallel % heads):
        raise CapacityError(
            f"{heads} KV heads of {shape.name} cannot be shared out over {tensor_parallel} "
            f"devices: --tp must divide {heads} or be a multiple of it"
        )
    return max(1, heads // tensor_parallel)


def _values_per_layer_token(shape: ModelShape, tensor_parallel: int) -> int:
    if shape.latent_kv_dim:
        return shape.latent_kv_dim
    return 2 * kv_heads_per_rank(shape, tensor_parallel) * shape.head_dim


def kv_bytes_per_token(
    shape: ModelShape, *, bytes_per_value: float = KV_BYTES_PER_VALUE, tensor_parallel: int = 1
) -> float:
    """Bytes that a token adds on each rank while the context is inside every window.

    Raises CapacityError if the KV heads cannot be shared out evenly.
    """
    values = _values_per_layer_token(shape, tensor_parallel)
    return shape.num_layers * values * bytes_per_value


def kv_bytes_per_sequence(
    shape: ModelShape,
    context_tokens: float,
    *,
    bytes_per_value: float = KV_BYTES_PER_VALUE,
    tensor_parallel: int = 1,
) -> float:
    """Bytes that a sequence of `context_tokens` holds on each rank; windows stop growing.

    Llama 2 7B at 4096 tokens in FP16: 0.5 MiB * 4096 = 2 GiB.
    """
    values = _values_per_layer_token(shape, tensor_parallel)
    growing = shape.growing_layers
    sliding = shape.num_layers - growing
    window = context_tokens
    if shape.sliding_window is not None:
        window = min(context_tokens, shape.sliding_window)
    return values * bytes_per_value * (growing * context_tokens + sliding * window)


def mean_kv_bytes_per_token(
    shape: ModelShape,
    context_tokens: float,
    *,
    bytes_per_value: float = KV_BYTES_PER_VALUE,
    tensor_parallel: int = 1,
) -> float:
    """Bytes a token of a sequence of that length takes on each rank, averaged over its tokens."""
    return (
        kv_bytes_per_sequence(
            shape,
            context_tokens,
            bytes_per_value=bytes_per_value,
            tensor_parallel=tensor_parallel,
        )
        / context_tokens
    )
