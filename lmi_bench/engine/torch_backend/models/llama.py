"""Llama and related models: Mistral, Mixtral, Qwen2, Qwen3.

RMS norms, rotary positions, shared KV heads, a gated MLP or several as experts. They use the same
tensor names; the spec has their windows, biases and head norms.
Sources: Touvron et al. 2023, arXiv:2302.13971 and arXiv:2307.09288; Jiang et al. 2023,
arXiv:2310.06825, and 2024, arXiv:2401.04088; Yang et al. 2024, arXiv:2412.15115, and 2025,
arXiv:2505.09388.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from lmi_bench.engine.torch_backend.experts import ExpertMlp
from lmi_bench.engine.torch_backend.layers import GatedMlp, Mlp, RmsNorm
from lmi_bench.engine.torch_backend.loading import WeightLoader
from lmi_bench.engine.torch_backend.models.decoder import AttentionBlock, Decoder, Layer
from lmi_bench.models.shape import ModelShape


@dataclass(frozen=True, slots=True)
class _MlpNames:
    """Names of a layer's MLP and its three matrices."""

    mlp: str
    gate: str
    up: str
    down: str


_LLAMA_MLP: Final = _MlpNames("mlp", "gate_proj", "up_proj", "down_proj")
_MIXTRAL_MLP: Final = _MlpNames("block_sparse_moe", "w1", "w3", "w2")


def build_llama(load: WeightLoader, shape: ModelShape) -> Decoder:
    """Build any model of the family except Mixtral."""
    return _build(load, shape, _LLAMA_MLP)


def build_mixtral(load: WeightLoader, shape: ModelShape) -> Decoder:
    """Build Mixtral, whose experts have other names."""
    return _build(load, shape, _MIXTRAL_MLP)


def _build(load: WeightLoader, shape: ModelShape, names: _MlpNames) -> Decoder:
    embedding, head = load.vocabulary("model.embed_tokens.weight")
    return Decoder(
        load,
        shape,
        embedding=embedding,
        layers=[
            _layer(load, f"model.layers.{index}", names) for index in range(load.spec.num_layers)
        ],
        norm=load.norm("model.norm"),
        head=head,
    )


def _layer(load: WeightLoader, prefix: str, names: _MlpNames) -> Layer:
    return Layer(
        attention_norm=load.norm(f"{prefix}.input_layernorm"),
        attention=_attention(load, f"{prefix}.self_attn"),
        mlp_norm=load.norm(f"{prefix}.post_attention_layernorm"),
        mlp=_mlp(load, f"{prefix}.{names.mlp}", names),
    )


def _attention(load: WeightLoader, prefix: str) -> AttentionBlock:
    spec = load.spec
    query, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    projections = tuple(f"{prefix}.{name}_proj" for name in "qkv")
    return AttentionBlock(
        spec.num_heads,
        spec.num_kv_heads,
        qkv=load.linear(projections, (query, kv, kv), spec.hidden_size, bias=spec.qkv_bias),
        out=load.linear((f"{prefix}.o_proj",), (spec.hidden_size,), query, bias=spec.out_bias),
        qk_norm=_qk_norm(load, prefix) if spec.qk_norm else None,
    )


def _qk_norm(load: WeightLoader, prefix: str) -> RmsNorm:
    """The norms of query and key heads as one, with a row of weights for each head."""
    spec = load.spec
    query, key = (load.tensor(f"{prefix}.{name}_norm.weight", spec.head_dim) for name in "qk")
    weight = torch.cat((query.expand(spec.num_heads, -1), key.expand(spec.num_kv_heads, -1)), dim=0)
    return RmsNorm(weight, spec.norm_eps)


def _mlp(load: WeightLoader, prefix: str, names: _MlpNames) -> Mlp:
    spec = load.spec
    if not spec.experts:
        return _gated(load, prefix, names)
    return ExpertMlp(
        load.linear((f"{prefix}.gate",), (spec.experts,), spec.hidden_size),
        [
            _gated(load, f"{prefix}.experts.{index}", names, summed=False)
            for index in range(spec.experts)
        ],
        spec.experts_per_token,
        renormalise=spec.renormalise,
        join=load.join,
    )


def _gated(load: WeightLoader, prefix: str, names: _MlpNames, *, summed: bool = True) -> GatedMlp:
    hidden, ffn, bias = load.spec.hidden_size, load.spec.ffn_size, load.spec.mlp_bias
    return GatedMlp(
        load.linear((f"{prefix}.{names.gate}",), (ffn,), hidden, bias=bias),
        load.linear((f"{prefix}.{names.up}",), (ffn,), hidden, bias=bias),
        load.linear((f"{prefix}.{names.down}",), (hidden,), ffn, bias=bias, summed=summed),
    )
