"""A decoder's sizes, from which its memory, memory reads and FLOP follow.

Read from a model's config.json (`hf_config`) or the catalog. Parameters are counted, not bytes:
the dtype is chosen when the model is served.
"""

from dataclasses import dataclass, fields

from lmi_bench.core.errors import InputError

_LARGEST = 10**15  # thousand times the parameters of the largest model
_COUNTS = (
    *("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "vocab_size"),
    *("max_positions", "params_total", "params_active"),
)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder's shape.

    sliding_window         tokens
    full_attention_layers  layers whose cache grows with the context; the cache of the others
                           stops at `sliding_window`
    sliding_kv_heads       of a layer with a window, and sliding_head_dim; 0: as of the others
    experts                0 for a dense model
    latent_kv_dim          MLA: values cached per token and layer, replicated on every rank;
                           0 for attention with KV heads
    params_active          parameters used per token
    architecture           as config.json names it, such as Qwen3ForCausalLM; empty: unknown
    parallel_branches      attention and MLP read the same input: one all-reduce per layer, not two
    cacheless_layers       layers without a KV cache: linear attention, state spaces, MLP alone
    state_bytes            constant state of a sequence in all of these, split over the ranks
    sparse_tokens          sparse attention: tokens that a position attends to, of those before it,
                           in `sparse_layers`; it selects them by `index_values` of every token
    encoder_params         of `params_total`: read only for images or sound, or by a token's own row
    mtp_layers, mtp_params heads that predict more tokens; not in `params_total`
    weight_block           side of the blocks of published FP8 weights with one scale each; 0: none
    doubt                  why the sizes may be wrong; empty if they are known
    """

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    max_positions: int
    params_total: int
    params_active: int
    tied_embeddings: bool = False
    sliding_window: int | None = None
    full_attention_layers: int | None = None
    sliding_kv_heads: int = 0
    sliding_head_dim: int = 0
    experts: int = 0
    experts_per_token: int = 0
    expert_ffn_size: int = 0
    shared_experts: int = 0
    latent_kv_dim: int = 0
    aliases: tuple[str, ...] = ()
    source: str = ""
    parallel_branches: bool = False
    architecture: str = ""
    cacheless_layers: int = 0
    state_bytes: int = 0
    sparse_tokens: int = 0
    sparse_layers: int = 0
    index_values: int = 0
    encoder_params: int = 0
    mtp_layers: int = 0
    mtp_params: int = 0
    weight_block: int = 0
    doubt: str = ""

    def __post_init__(self) -> None:
        for name in _COUNTS:
            if getattr(self, name) < 1:
                raise InputError(f"model {self.name!r}: {name} must be at least 1, got {getattr(self, name)}")
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, int) and value > _LARGEST:
                raise InputError(f"model {self.name!r}: {each.name} cannot be {value:.0e}")
        if self.num_heads % self.num_kv_heads:
            raise InputError(
                f"model {self.name!r}: {self.num_heads} query heads cannot share {self.num_kv_heads} KV heads evenly"
            )
        if self.experts and not 1 <= self.experts_per_token <= self.experts:
            raise InputError(f"model {self.name!r}: {self.experts_per_token} experts per token out of {self.experts}")

    @property
    def is_moe(self) -> bool:
        """True for a mixture-of-experts model."""
        return self.experts > 0

    @property
    def attention_window(self) -> int | None:
        """Tokens that a position attends to, itself included; None if a layer has no window."""
        return None if self.growing_layers else self.sliding_window

    @property
    def growing_layers(self) -> int:
        """Layers whose cache grows with the whole context."""
        if self.full_attention_layers is None:
            return self.cached_layers
        return self.full_attention_layers

    @property
    def cached_layers(self) -> int:
        """Layers with a KV cache."""
        return self.num_layers - self.cacheless_layers


def tensor_parallel_problem(shape: ModelShape, tensor_parallel: int) -> str | None:
    """Why the model cannot be split over this many devices; None if it can."""
    if tensor_parallel < 1:
        return f"a tensor-parallel degree of {tensor_parallel} is below 1"
    if shape.num_heads % tensor_parallel:
        degrees = [n for n in range(1, 17) if shape.num_heads % n == 0]
        return (
            f"{shape.num_heads} query heads of {shape.name} cannot be split over "
            f"{tensor_parallel} devices; possible up to 16: {', '.join(map(str, degrees))}"
        )
    kv_heads = shape.num_kv_heads
    if not shape.latent_kv_dim and kv_heads % tensor_parallel and tensor_parallel % kv_heads:
        return f"{kv_heads} KV heads of {shape.name} do not fit {tensor_parallel} devices evenly"
    return None


@dataclass(frozen=True, slots=True)
class RankHeads:
    """One rank's heads of a split model.

    query_heads   its query heads, by their number in the whole model; kv_heads the same
    query_slots   heads that it computes with, kv_slots that it caches: those without a head in the
                  whole model are padding, of zeros
    """

    query_heads: range
    kv_heads: tuple[int, ...]
    query_slots: int
    kv_slots: int


def split_heads(shape: ModelShape, degree: int, strategy: str) -> list[RankHeads]:
    """Every rank's heads as NeuronX splits them, with queries padded to a multiple of the degree.

    strategy  shard-over-heads: each rank gets its share of the KV heads, without grouping as many
              as of queries; others copy a KV head to each rank that reads it, else to each query
    Raises InputError if the heads cannot be split that way. Source: transformers-neuronx,
    `get_qkv_padding`.
    """
    num_heads, num_kv_heads = shape.num_heads, shape.num_kv_heads
    readers, slots = num_heads // num_kv_heads, -(-num_heads // degree)
    padding = slots * degree - num_heads
    aligned = degree % num_kv_heads == 0 and padding % num_kv_heads == 0
    if strategy != "shard-over-heads" and readers > 1:
        kv_slots = 1 if slots == readers or aligned else slots
    elif readers == 1 or num_kv_heads % degree == 0:
        aligned, kv_slots = False, slots // readers
    elif aligned and not padding:
        kv_slots = 1
    else:
        raise InputError(
            f"--tp {degree}: {num_heads} query heads and {num_kv_heads} KV heads of {shape.name} "
            "do not divide evenly; replicated-heads pads and copies them"
        )
    ranks = []
    for rank in range(degree):
        first, last = rank * slots, num_heads
        if aligned and kv_slots == 1:  # the ranks that share a KV head, and their padding
            group, place = divmod(rank, degree // num_kv_heads)
            first, last = group * readers + place * slots, (group + 1) * readers
        queries = range(min(first, last), min(first + slots, last))
        read = tuple(query // readers for query in queries)
        if kv_slots < slots:
            read = tuple(sorted(set(read)))
        ranks.append(RankHeads(queries, read, slots, kv_slots))
    return ranks


def possible_degrees(shape: ModelShape, devices: int) -> list[int]:
    """The usual tensor-parallel degrees that the model's heads and the devices allow."""
    return [
        degree
        for degree in (1, 2, 4, 8, 16, 24, 32)
        if degree <= devices and tensor_parallel_problem(shape, degree) is None
    ]
