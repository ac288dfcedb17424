"""The numbers of a decoder that fix its memory, its reads and its arithmetic.

Read from a model's own config.json or from the catalog; parameter counts, not bytes: the dtype
is chosen when the model is served.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lmi_bench.errors import InputError


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder's shape. Counts are whole numbers; `sliding_window` is in tokens.

    full_attention_layers  layers whose cache grows with the context; the others stop at
                           `sliding_window`
    experts                0 for a dense model
    latent_kv_dim          MLA: values cached a token and layer, once and on every rank;
                           0 for attention with KV heads
    params_total           all parameters; params_active: those that one token touches
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
    experts: int = 0
    experts_per_token: int = 0
    expert_ffn_size: int = 0
    shared_experts: int = 0
    latent_kv_dim: int = 0
    aliases: tuple[str, ...] = ()
    source: str = ""

    def __post_init__(self) -> None:
        for name in (
            "num_layers",
            "hidden_size",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "vocab_size",
            "max_positions",
            "params_total",
            "params_active",
        ):
            if getattr(self, name) < 1:
                raise InputError(
                    f"model {self.name!r}: {name} must be at least 1, got {getattr(self, name)}"
                )
        if self.num_heads % self.num_kv_heads:
            raise InputError(
                f"model {self.name!r}: {self.num_heads} query heads cannot share "
                f"{self.num_kv_heads} KV heads evenly"
            )
        if self.experts and not 1 <= self.experts_per_token <= self.experts:
            raise InputError(
                f"model {self.name!r}: {self.experts_per_token} experts a token out of "
                f"{self.experts}"
            )

    @property
    def is_moe(self) -> bool:
        """Whether layers hold several experts of which a token uses some."""
        return self.experts > 0

    @property
    def growing_layers(self) -> int:
        """Layers whose cache grows with the whole context."""
        if self.full_attention_layers is None:
            return self.num_layers
        return self.full_attention_layers


def dense_param_count(
    *,
    num_layers: int,
    hidden_size: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    ffn_size: int,
    vocab_size: int,
    tied_embeddings: bool,
    qkv_bias: bool = False,
) -> int:
    """Parameters of a Llama-like decoder: embeddings, attention, SwiGLU and norms.

    >>> dense_param_count(num_layers=32, hidden_size=4096, num_heads=32, num_kv_heads=32,
    ...     head_dim=128, ffn_size=11008, vocab_size=32000, tied_embeddings=False)
    6738415616
    """
    query, kv = num_heads * head_dim, num_kv_heads * head_dim
    attention = 2 * hidden_size * query + 2 * hidden_size * kv
    if qkv_bias:
        attention += query + 2 * kv
    layer = attention + 3 * hidden_size * ffn_size + 2 * hidden_size
    embeddings = vocab_size * hidden_size * (1 if tied_embeddings else 2)
    return num_layers * layer + embeddings + hidden_size


def shape_from_hf_config(name: str, config: Mapping[str, Any]) -> ModelShape:
    """The shape of a Llama-like dense model from its Hugging Face config.json.

    Raises InputError where a needed number is absent.
    """

    def need(*keys: str) -> int:
        for key in keys:
            if config.get(key) is not None:
                return int(config[key])
        raise InputError(f"model {name!r}: config.json has none of {', '.join(keys)}")

    num_heads = need("num_attention_heads", "n_head")
    hidden = need("hidden_size", "n_embd")
    head_dim = int(config.get("head_dim") or hidden // num_heads)
    num_kv_heads = int(config.get("num_key_value_heads") or num_heads)
    num_layers = need("num_hidden_layers", "n_layer")
    ffn = need("intermediate_size", "ffn_hidden_size")
    vocab = need("vocab_size")
    tied = bool(config.get("tie_word_embeddings", False))
    window = config.get("sliding_window")
    params = dense_param_count(
        num_layers=num_layers,
        hidden_size=hidden,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        ffn_size=ffn,
        vocab_size=vocab,
        tied_embeddings=tied,
        qkv_bias=bool(config.get("attention_bias", False)),
    )
    return ModelShape(
        name=name,
        num_layers=num_layers,
        hidden_size=hidden,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        ffn_size=ffn,
        vocab_size=vocab,
        max_positions=need("max_position_embeddings", "n_positions"),
        params_total=params,
        params_active=params,
        tied_embeddings=tied,
        sliding_window=int(window) if window else None,
        full_attention_layers=0 if window else None,
        source="config.json",
    )
