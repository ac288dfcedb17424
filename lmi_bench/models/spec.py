"""A decoder's layer structure, from which its shape and forward pass follow.

`hf_config` reads it from a model's config.json.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any

from lmi_bench.core.errors import InputError
from lmi_bench.models.shape import ModelShape


class NormKind(StrEnum):
    """How a layer's input is normalised."""

    RMS = "rms"  # one weight per feature
    LAYER = "layer"  # a weight and a bias per feature


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """A decoder: its sizes, and what differs from a plain one, of which every field is neutral.

    ffn_size           inner size of the MLP, or of one expert
    gated_mlp          down(silu(gate(x)) * up(x)); else down(gelu(up(x)))
    gelu               a gated MLP has gelu, approximated by tanh, in place of silu
    parallel           attention and MLP read the same input and both are added to it
    norm_plus_one      a norm's factor is its weight + 1
    qk_norm            queries and keys are RMS-normalised per head before rotary positions
    windows            per layer: tokens attended to, itself included, or None for all
    experts            0 for a dense MLP; `experts_per_token` of them run for each token
    renormalise        True to scale the weights of a token's chosen experts to sum to 1
    expert_groups      of which the best `groups_chosen` are chosen from, where the router has a
                       `correction`; routed_scale: factor of the weights
    dense_layers       layers with an MLP of `dense_ffn_size` instead of experts
    shared_ffn_size    of the expert that every token uses
    clamped            alpha and limit: (up + 1) * gate * sigmoid(alpha * gate), both clamped
    sinks              a score for each head that takes weight from every key
    latent_rank        values that all heads' keys and values are made of, cached for each token
                       beside `turned` rotating features (DeepSeek-V2, arXiv:2405.04434); 0: none
    query_rank         values that queries are made of; 0: they are made in one product
    turned             the last features of a latent query or key, which alone rotate
    value_dim          features of a head's value in latent attention
    rope               rotary position settings under Hugging Face's names (`rope_theta`,
                       `rope_type`, `factor`, ...); `window_rope`: of layers with a window
    score_cap          limit of scores; score_scale: their factor, mostly head_dim ** -0.5
    logit_cap          limit of logits, by tanh; embedding_scale: factor of embeddings
    tensors            names of the tensors of each part, parted by spaces; see `families`
    """

    family: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    max_positions: int
    tied_embeddings: bool
    norm_eps: float
    norm: NormKind = NormKind.RMS
    gated_mlp: bool = True
    parallel: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    windows: tuple[int | None, ...] = ()
    experts: int = 0
    experts_per_token: int = 0
    renormalise: bool = True
    rope: Mapping[str, Any] = field(default_factory=dict)
    expert_groups: int = 1
    groups_chosen: int = 1
    routed_scale: float = 1.0
    dense_layers: tuple[int, ...] = ()
    dense_ffn_size: int = 0
    shared_ffn_size: int = 0
    clamped: tuple[float, float] | None = None
    sinks: bool = False
    latent_rank: int = 0
    query_rank: int = 0
    turned: int = 0
    value_dim: int = 0
    gelu: bool = False
    norm_plus_one: bool = False
    window_rope: Mapping[str, Any] = field(default_factory=dict)
    score_cap: float = 0.0
    score_scale: float = 1.0
    logit_cap: float = 0.0
    embedding_scale: float = 1.0
    tensors: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for window in self.windows:
            if window is not None and window < 1:
                raise InputError(f"sliding_window must be at least 1 token, got {window}")
        groups = self.expert_groups
        if groups < 1 or self.experts % groups or not 1 <= self.groups_chosen <= groups:
            raise InputError(
                f"the best {self.groups_chosen} of {groups} groups of {self.experts} experts "
                "cannot be chosen: n_group must divide the experts, and topk_group be within it"
            )

    def layer(self, index: int) -> str:
        """The name of a layer, which those of its parts follow."""
        return f"{self.tensors['layers']}.{index}"

    def names(self, prefix: str, part: str) -> tuple[str, ...]:
        """The names of a part of what has the name `prefix`."""
        return tuple(f"{prefix}.{name}" for name in self.tensors[part].split())

    @property
    def params_total(self) -> int:
        """All parameters."""
        return self._params(self.experts)

    @property
    def params_active(self) -> int:
        """Parameters used per token: of the experts, only the token's own."""
        return self._params(self.experts_per_token)

    def _params(self, experts: int) -> int:
        hidden, ffn = self.hidden_size, self.ffn_size
        norm = hidden * (1 if self.norm is NormKind.RMS else 2)
        inner = 2 if self.gated_mlp else 1
        mlp = (inner + 1) * hidden * ffn + (inner * ffn + hidden) * self.mlp_bias
        if self.experts:  # the router scores every expert
            mlp = experts * mlp + self.experts * (hidden + self.mlp_bias)
            mlp += 3 * hidden * self.shared_ffn_size + hidden * len(self.names("", "shared_gate"))
        dense = len(self.dense_layers)
        mlps = (self.num_layers - dense) * mlp + dense * 3 * hidden * self.dense_ffn_size
        norms = len(self.names("", "norms") + self.names("", "out_norms"))
        layer = self._attention_params() + norms * norm
        embeddings = self.vocab_size * hidden * (1 if self.tied_embeddings else 2)
        return self.num_layers * layer + mlps + norm + embeddings

    def _attention_params(self) -> int:
        """Parameters of one layer's attention."""
        hidden, query = self.hidden_size, self.num_heads * self.head_dim
        if rank := self.latent_rank:
            q_rank, values = self.query_rank, self.num_heads * self.value_dim
            total = q_rank * (hidden + 1 + query) if q_rank else hidden * query
            total += hidden * (rank + self.turned) + rank
            total += (query - self.num_heads * self.turned + values) * rank
            return total + values * hidden
        kv = self.num_kv_heads * self.head_dim
        total = 2 * hidden * (query + kv) + self.num_heads * self.sinks
        total += (query + 2 * kv) * self.qkv_bias + hidden * self.out_bias
        return total + 2 * self.head_dim * self.qk_norm

    def shape(self, name: str) -> ModelShape:
        """The sizes from which memory, reads and FLOP follow."""
        sliding = [window for window in self.windows if window is not None]
        shared = {field.name: getattr(self, field.name) for field in fields(ModelShape) if hasattr(self, field.name)}
        return ModelShape(
            name=name,
            **shared,
            sliding_window=max(sliding) if sliding else None,
            full_attention_layers=self.num_layers - len(sliding),
            expert_ffn_size=self.ffn_size if self.experts else 0,
            shared_experts=round(self.shared_ffn_size / max(1, self.ffn_size)),
            latent_kv_dim=self.latent_rank and self.latent_rank + self.turned,
            source="config.json",
            parallel_branches=self.parallel,
        )
