"""Bytes of weights and KV cache on one rank, by shape and number format.

Quantized checkpoints keep embedding and output head in 16 bits; scales and zero points count (AWQ
4.16, MXFP4 4.25, NVFP4 4.5 bits a weight; of a mixture the last two cover only routed experts).
Windows stop the growth of a layer's cache, latent attention (MLA) caches one vector for each token
and layer, complete on every rank, and linear attention keeps a constant state. Kwon et al. 2023,
arXiv:2309.06180, section 3; DeepSeek-AI 2024, arXiv:2405.04434, section 2.1.
"""

from dataclasses import dataclass
from typing import Final

from lmi_bench.catalog.tables import read_rows
from lmi_bench.core.errors import CapacityError, InputError
from lmi_bench.models.shape import ModelShape, tensor_parallel_problem

BITS_PER_BYTE = 8
_FULL_BITS = 16


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """A number format of weights.

    bits           stored bits a weight, scales included; nominal_bits: without them
    covers         weights in this format: all, linear, or experts (of a mixture, else as linear)
    rest_bits      of the other linear layers; embedding and head are in 16 bits
    compute_dtype  type of the matrix products where the device has units for it
    widening_ops   vector operations that convert a stored weight to that type: convert, scale,
                   subtract a zero point; 0 where the products read it as it is
    """

    name: str
    bits: float
    nominal_bits: float
    covers: str
    rest_bits: int
    compute_dtype: str
    widening_ops: int = 0


_ROWS: Final = read_rows("number_formats.csv", "analysis")
_FORMATS: Final = {
    row["name"]: WeightFormat(
        row["name"],
        float(row["bits"]),
        float(row["nominal_bits"]),
        row["covers"],
        int(row["rest_bits"]),
        row["compute_dtype"],
        int(row["widening_ops"]),
    )
    for row in _ROWS
}
_ALIASES, _KV_ALIASES = (
    {alias: row["name"] for row in _ROWS for alias in row[column].split()} for column in ("aliases", "cache_aliases")
)


def weight_format(dtype: str) -> WeightFormat:
    """The format of a name such as fp16, bfloat16, fp8 or int4; raises InputError."""
    key = dtype.strip().lower()
    known = _FORMATS.get(_ALIASES.get(key, key))
    if known is None:
        raise InputError(f"dtype {dtype!r} is not known; use one of {', '.join(_FORMATS)}")
    return known


def checkpoint_format(checkpoint_dtype: str) -> WeightFormat:
    """The format that a catalog row's checkpoint dtype names, e.g. `mxfp4 experts, ...`."""
    word = checkpoint_dtype.split(maxsplit=1)[0].lower()
    if checkpoint_dtype.endswith("float8 rest"):
        return weight_format(f"{word}-float8")
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
    untouched = shape.params_total - shape.encoder_params - shape.params_active
    return untouched * shape.experts // (shape.experts - shape.experts_per_token)


def _covered_params(shape: ModelShape, covers: str) -> int:
    if covers == "all":
        return shape.params_total
    if covers == "experts" and shape.is_moe:
        return expert_params(shape)
    return shape.params_total - shape.encoder_params - embedding_params(shape)


def _rest_bytes(shape: ModelShape, fmt: WeightFormat, rest: int) -> float:
    """Bytes of so many parameters beside those that the format covers."""
    narrow = min(rest, max(0, _covered_params(shape, "linear") - _covered_params(shape, fmt.covers)))
    return (narrow * fmt.rest_bits + (rest - narrow) * _FULL_BITS) / BITS_PER_BYTE


def weight_bytes(shape: ModelShape, dtype: str) -> int:
    """Bytes of all weights as stored, over all devices; raises InputError on unknown dtypes.

    Llama 3 70B as int4: 68.45e9 * 4.16 / 8 + 2.10e9 * 2 = 39.8e9 bytes.
    """
    fmt = weight_format(dtype)
    covered = _covered_params(shape, fmt.covers)
    return round(covered * fmt.bits / BITS_PER_BYTE + _rest_bytes(shape, fmt, shape.params_total - covered))


@dataclass(frozen=True, slots=True)
class StreamedParams:
    """Parameters that a step of many rows reads.

    experts  of routed experts; packed: others in the weights' format; rest_bytes: of all others
    """

    experts: int
    packed: int
    rest_bytes: float

    @classmethod
    def of(cls, shape: ModelShape, dtype: str) -> "StreamedParams":
        """All but an untied input embedding and an encoder."""
        experts, embedding = expert_params(shape), shape.vocab_size * shape.hidden_size
        streamed = shape.params_total - shape.encoder_params
        streamed -= 0 if shape.tied_embeddings else embedding
        fmt = weight_format(dtype)
        covered = min(streamed, _covered_params(shape, fmt.covers))
        return cls(experts, covered - experts, _rest_bytes(shape, fmt, streamed - covered))


KV_BYTES_PER_VALUE = 2.0  # 16-bit cache, the default of every engine here
_WIDE_WEIGHTS = ("float32", "fp32")
# the scale of a tensor or head is negligible
_KV_FORMATS: Final = tuple(row["name"] for row in _ROWS if row["cache"])


def kv_bytes_per_value(dtype: str, kv_dtype: str | None = None) -> float:
    """Bytes of one cached value; raises InputError for an unknown cache format.

    dtype     format of the weights
    kv_dtype  format of the cache; None: 32 bits with 32-bit weights, else 16 bits
    """
    if kv_dtype is None:
        return 4.0 if dtype.strip().lower() in _WIDE_WEIGHTS else KV_BYTES_PER_VALUE
    word = kv_dtype.strip().lower()
    name = (_ALIASES | _KV_ALIASES).get(word, word)
    if name not in _KV_FORMATS:
        raise InputError(f"KV cache dtype {kv_dtype!r} is not known; use one of {', '.join(_KV_FORMATS)}")
    return _FORMATS[name].bits / BITS_PER_BYTE


def kv_heads_per_rank(shape: ModelShape, tensor_parallel: int, heads: int = 0) -> int:
    """KV heads that one rank stores; with more ranks than heads, several ranks store the same.

    heads  of a layer; 0: of a layer without a window
    Raises CapacityError if the heads cannot be divided evenly.
    """
    heads = heads or shape.num_kv_heads
    if tensor_parallel < 1 or (heads % tensor_parallel and tensor_parallel % heads):
        raise CapacityError(
            f"{heads} KV heads of {shape.name} cannot be shared out over {tensor_parallel} "
            f"devices: --tp must divide {heads} or be a multiple of it"
        )
    return max(1, heads // tensor_parallel)


def kv_values(shape: ModelShape, tensor_parallel: int) -> tuple[int, int]:
    """Cached values of a token on each rank: in layers that grow, and in those with a window.

    Latent vectors and indices are complete on each rank.
    """
    growing, size = shape.growing_layers, shape.sliding_head_dim or shape.head_dim
    each = [
        shape.latent_kv_dim or 2 * kv_heads_per_rank(shape, tensor_parallel, heads) * head_dim
        for heads, head_dim in ((0, shape.head_dim), (shape.sliding_kv_heads, size))
    ]
    sliding = (shape.cached_layers - growing) * (each[1] + shape.index_values)
    return growing * (each[0] + shape.index_values), sliding


def limited_reads(shape: ModelShape, tensor_parallel: int) -> tuple[int | None, float]:
    """Most tokens that limited attention reads, and its share of the cached values.

    Limited are layers with a sliding window, and sparse attention but for its index.
    """
    growing, sliding = kv_values(shape, tensor_parallel)
    if shape.sparse_tokens:
        share = shape.sparse_layers / shape.cached_layers
        return shape.sparse_tokens, share * (1 - shape.cached_layers * shape.index_values / growing)
    if not sliding:
        return None, 0.0
    return shape.sliding_window, 1 - growing / (growing + sliding)


def kv_bytes_per_token(
    shape: ModelShape, *, bytes_per_value: float = KV_BYTES_PER_VALUE, tensor_parallel: int = 1
) -> float:
    """Bytes that a token adds on each rank while the context is inside every window.

    Raises CapacityError if the KV heads cannot be divided evenly.
    """
    return sum(kv_values(shape, tensor_parallel)) * bytes_per_value


def kv_bytes_per_sequence(
    shape: ModelShape, context_tokens: float, *, bytes_per_value: float = KV_BYTES_PER_VALUE, tensor_parallel: int = 1
) -> float:
    """Bytes of a sequence of `context_tokens` on each rank, with its constant state.

    Llama 2 7B at 4096 tokens in FP16: 0.5 MiB * 4096 = 2 GiB.
    """
    growing, sliding = kv_values(shape, tensor_parallel)
    window = min(context_tokens, shape.sliding_window or context_tokens)
    cache = bytes_per_value * (growing * context_tokens + sliding * window)
    return cache + shape.state_bytes / tensor_parallel


def min_devices(
    shape: ModelShape, *, memory_bytes: float, batch: int, tokens_per_sequence: float, dtype: str = "float16"
) -> int | None:
    """Fewest devices that fit the weights and the cache of `batch` sequences; None beyond 64.

    Only degrees that divide the heads count.
    """
    weights = weight_bytes(shape, dtype)
    for devices in range(1, 65):
        if tensor_parallel_problem(shape, devices) is None:
            cache = kv_bytes_per_sequence(shape, tokens_per_sequence, tensor_parallel=devices)
            if weights / devices + batch * cache <= memory_bytes:
                return devices
    return None
