"""Builds each model family: maps a checkpoint's tensors to the parts of a decoder.

Llama and related models (Mistral, Mixtral, Qwen2, Qwen3): RMS norms, rotary positions, shared KV
heads, a gated MLP or several as experts. They use the same tensor names; the spec has their
windows, biases and head norms. Falcon: layer norms, attention parallel to the MLP; 7B has one KV
head and one norm per layer, 40B and 180B have 8 KV heads and a norm for each half.
Sources: Touvron et al. 2023, arXiv:2302.13971 and arXiv:2307.09288; Jiang et al. 2023,
arXiv:2310.06825, and 2024, arXiv:2401.04088; Yang et al. 2024, arXiv:2412.15115, and 2025,
arXiv:2505.09388; Almazrouei et al. 2023, arXiv:2311.16867.
"""

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from lmi_bench.engine.torch_backend.layers import ExpertMlp, GatedMlp, GeluMlp, Mlp, RmsNorm
from lmi_bench.engine.torch_backend.loading import WeightLoader
from lmi_bench.engine.torch_backend.models.decoder import AttentionBlock, Decoder, Layer
from lmi_bench.engine.torch_backend.rotary import Rotary
from lmi_bench.models.spec import DecoderSpec


class MlpNames(NamedTuple):
    """Names of a layer's MLP and its three matrices."""

    mlp: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


def mlp_names(family: str) -> MlpNames:
    """The names of any family except Falcon."""
    return MlpNames("block_sparse_moe", "w1", "w3", "w2") if family == "mixtral" else MlpNames()


def llama_layer(load: WeightLoader, prefix: str) -> Layer:
    """One layer of any family except Falcon."""
    names = mlp_names(load.spec.family)
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


def _mlp(load: WeightLoader, prefix: str, names: MlpNames) -> Mlp:
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


def _gated(load: WeightLoader, prefix: str, names: MlpNames, *, summed: bool = True) -> GatedMlp:
    hidden, ffn, bias = load.spec.hidden_size, load.spec.ffn_size, load.spec.mlp_bias
    return GatedMlp(
        load.linear((f"{prefix}.{names.gate}",), (ffn,), hidden, bias=bias),
        load.linear((f"{prefix}.{names.up}",), (ffn,), hidden, bias=bias),
        load.linear((f"{prefix}.{names.down}",), (hidden,), ffn, bias=bias, summed=summed),
    )


def _falcon_layer(load: WeightLoader, prefix: str) -> Layer:
    spec = load.spec
    hidden, ffn = spec.hidden_size, spec.ffn_size
    first, *other = (load.norm(f"{prefix}.{name}") for name in falcon_norms(spec))
    mlp = f"{prefix}.mlp"
    return Layer(
        attention_norm=first,
        attention=_falcon_attention(load, f"{prefix}.self_attention"),
        mlp_norm=other[0] if other else first,
        mlp=GeluMlp(
            load.linear((f"{mlp}.dense_h_to_4h",), (ffn,), hidden, bias=spec.mlp_bias),
            load.linear((f"{mlp}.dense_4h_to_h",), (hidden,), ffn, bias=spec.mlp_bias),
        ),
        parallel=spec.parallel,
    )


def falcon_norms(spec: DecoderSpec) -> tuple[str, ...]:
    """Names of a layer's norms: one for attention and MLP together, or one for each."""
    if spec.norms_per_layer == 1:
        return ("input_layernorm",)
    if spec.parallel:
        return "ln_attn", "ln_mlp"
    return "input_layernorm", "post_attention_layernorm"


def _falcon_attention(load: WeightLoader, prefix: str) -> AttentionBlock:
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


def build_with(load: WeightLoader, folder: Path) -> Decoder:
    """Build a model of any family from the weights that `load` reads."""
    embedding, layers, norm, layer = (
        "model.embed_tokens",
        "model.layers",
        "model.norm",
        llama_layer,
    )
    if load.spec.family == "falcon":
        embedding, layers, norm = "transformer.word_embeddings", "transformer.h", "transformer.ln_f"
        layer = _falcon_layer
    embed, head = load.vocabulary(f"{embedding}.weight")
    spec = load.spec
    return Decoder(
        shape=spec.shape(folder.resolve().name),
        spec=spec,
        precision=load.precision,
        rotary=Rotary(spec.rope, spec.head_dim, dtype=load.precision.compute, device=load.device),
        embedding=embed,
        layers=[layer(load, f"{layers}.{index}") for index in range(spec.num_layers)],
        norm=load.norm(norm),
        head=head,
        held_bytes=load.held_bytes,
        quantized=load.quantized,
    )
