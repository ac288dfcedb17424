"""Falcon: layer norms, rotary positions, one or few KV heads, attention parallel to the MLP.

7B has one KV head and one norm per layer; 40B and 180B have 8 KV heads and a norm for each half.
Source: Almazrouei et al. 2023, arXiv:2311.16867; tensor names as in Hugging Face checkpoints.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lmi_bench.engine.torch_backend.layers import GeluMlp, Norm
from lmi_bench.engine.torch_backend.loading import WeightLoader
from lmi_bench.engine.torch_backend.models.decoder import (
    AttentionBlock,
    Decoder,
    Layer,
)
from lmi_bench.models.shape import ModelShape


def build_falcon(load: WeightLoader, shape: ModelShape) -> Decoder:
    """Build a Falcon of any size, with parallel or sequential layers."""
    embedding, head = load.vocabulary("transformer.word_embeddings.weight")
    return Decoder(
        load,
        shape,
        embedding=embedding,
        layers=[_layer(load, f"transformer.h.{index}") for index in range(load.spec.num_layers)],
        norm=load.norm("transformer.ln_f"),
        head=head,
    )


def _layer(load: WeightLoader, prefix: str) -> Layer:
    spec = load.spec
    hidden, ffn = spec.hidden_size, spec.ffn_size
    first, second = _norms(load, prefix)
    mlp = f"{prefix}.mlp"
    return Layer(
        attention_norm=first,
        attention=_attention(load, f"{prefix}.self_attention"),
        mlp_norm=second,
        mlp=GeluMlp(
            load.linear((f"{mlp}.dense_h_to_4h",), (ffn,), hidden, bias=spec.mlp_bias),
            load.linear((f"{mlp}.dense_4h_to_h",), (hidden,), ffn, bias=spec.mlp_bias),
        ),
        parallel=spec.parallel,
    )


def _norms(load: WeightLoader, prefix: str) -> tuple[Norm, Norm]:
    if load.spec.norms_per_layer == 1:
        shared = load.norm(f"{prefix}.input_layernorm")
        return shared, shared
    names = ("input_layernorm", "post_attention_layernorm")
    if load.spec.parallel:
        names = ("ln_attn", "ln_mlp")
    return load.norm(f"{prefix}.{names[0]}"), load.norm(f"{prefix}.{names[1]}")


def _attention(load: WeightLoader, prefix: str) -> AttentionBlock:
    spec = load.spec
    heads, kv_heads, head_dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
    hidden, rows = spec.hidden_size, (heads + 2 * kv_heads) * head_dim

    def by_kind(fused: Tensor) -> Tensor:
        """Reorder from groups (a KV head's queries, key, value) to all queries, keys, values."""
        groups = fused.view(kv_heads, heads // kv_heads + 2, head_dim, -1)
        parts = (groups[:, :-2], groups[:, -2], groups[:, -1])
        return torch.cat([part.reshape(-1, *fused.shape[1:]) for part in parts])

    return AttentionBlock(
        heads,
        kv_heads,
        qkv=load.linear(
            (f"{prefix}.query_key_value",), (rows,), hidden, bias=spec.qkv_bias, arrange=by_kind
        ),
        out=load.linear((f"{prefix}.dense",), (hidden,), heads * head_dim, bias=spec.out_bias),
    )
