"""Builds each model family: maps a checkpoint's tensors to the parts of a decoder.

The spec tells which parts there are, and their names where these are not Llama's.
Falcon: layer norms, attention parallel to the MLP; 7B has one KV head and one norm per layer, 40B
and 180B have 8 KV heads and a norm for each half.
Sources: Touvron et al. 2023, arXiv:2302.13971 and arXiv:2307.09288; Jiang et al. 2023,
arXiv:2310.06825, and 2024, arXiv:2401.04088; Yang et al. 2024, arXiv:2412.15115, and 2025,
arXiv:2505.09388; Almazrouei et al. 2023, arXiv:2311.16867; Gemma Team 2024, arXiv:2408.00118, and
2025, arXiv:2503.19786.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from lmi_bench.engine.torch_backend.layers import (
    ExpertMlp,
    GatedMlp,
    GeluMlp,
    Linear,
    Mlp,
    RmsNorm,
    Router,
)
from lmi_bench.engine.torch_backend.loading import WeightLoader
from lmi_bench.engine.torch_backend.models.decoder import (
    AttentionBlock,
    Decoder,
    LatentBlock,
    Layer,
)
from lmi_bench.engine.torch_backend.rotary import Rotary, turned_order
from lmi_bench.models.spec import DecoderSpec, Latent


@dataclass(frozen=True, slots=True)
class Names:
    """The names of a family's tensors: of the model's, then of a layer's.

    norms  of attention and MLP; one name: of both together
    qkv    one name: queries, keys and values are stored as one matrix, KV head by KV head
    inner  matrices that read the MLP's input: gate and up, or up alone
    out_norms  of the outputs of attention and MLP; shared: of the expert that every token uses
    """

    embedding: str = "model.embed_tokens"
    layers: str = "model.layers"
    norm: str = "model.norm"
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    attention: str = "self_attn"
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    out: str = "o_proj"
    mlp: str = "mlp"
    inner: tuple[str, ...] = ("gate_proj", "up_proj")
    down: str = "down_proj"
    out_norms: tuple[str, ...] = ()
    shared: str = "shared_expert"
    router: str = "gate"


def names_of(spec: DecoderSpec) -> Names:
    """The names of a model's tensors."""
    names = Names()
    own: dict[str, Any] = dict(spec.tensors)
    for part, text in spec.tensors.items():
        if not isinstance(getattr(names, part), str):
            own[part] = tuple(text.split())
    return replace(names, **own)


def build_layer(load: WeightLoader, index: int) -> Layer:
    """One layer of any family from the weights that `load` reads."""
    spec, names = load.spec, names_of(load.spec)
    prefix = f"{names.layers}.{index}"
    norms = [load.norm(f"{prefix}.{name}") for name in names.norms]
    build = _attention if spec.latent is None else _latent
    attention = build(load, names, f"{prefix}.{names.attention}")
    mlp = _mlp(load, names, f"{prefix}.{names.mlp}", index)
    out_norms = [load.norm(f"{prefix}.{name}") for name in names.out_norms]
    return Layer(norms[0], attention, norms[-1], mlp, spec.parallel, tuple(out_norms))


def _attention(load: WeightLoader, names: Names, prefix: str) -> AttentionBlock:
    spec = load.spec
    query, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    qkv, rows = tuple(f"{prefix}.{name}" for name in names.qkv), (query, kv, kv)
    is_fused = len(qkv) == 1
    parts = (sum(rows),) if is_fused else rows
    arrange = partial(_arranged, spec, is_fused)
    out = (f"{prefix}.{names.out}",)
    return AttentionBlock(
        spec.num_heads,
        spec.num_kv_heads,
        qkv=load.linear(qkv, parts, spec.hidden_size, bias=spec.qkv_bias, arrange=arrange),
        out=load.linear(out, (spec.hidden_size,), query, bias=spec.out_bias),
        qk_norm=_qk_norm(load, prefix) if spec.qk_norm else None,
        sinks=load.tensor(f"{prefix}.sinks", spec.num_heads) if spec.sinks else None,
    )


def _arranged(spec: DecoderSpec, is_fused: bool, rows: Tensor) -> Tensor:
    """Rows of all queries, then keys, then values, the first two's features in `turned_order`."""
    rows = _by_kind(spec, rows) if is_fused else rows
    order = turned_order(spec.rope, spec.head_dim)
    if order is None:
        return rows
    turned = (spec.num_heads + spec.num_kv_heads) * spec.head_dim
    heads = rows[:turned].view(-1, spec.head_dim, *rows.shape[1:])
    return torch.cat((heads[:, order].view(turned, *rows.shape[1:]), rows[turned:]))


def _latent(load: WeightLoader, _: Names, prefix: str) -> LatentBlock:
    spec = load.spec
    sizes, hidden, heads = spec.latent, spec.hidden_size, spec.num_heads
    assert sizes is not None  # see `build_layer`
    cached, query = (f"{prefix}.kv_a_proj_with_mqa",), heads * spec.head_dim
    order = partial(_last_turned, spec, sizes)
    name, inputs, narrow = "q_proj", hidden, None
    if sizes.query_rank:
        name, inputs = "q_b_proj", sizes.query_rank
        norm = RmsNorm((load.tensor(f"{prefix}.q_a_layernorm.weight", inputs),), _LATENT_EPS)
        narrow = (load.linear((f"{prefix}.q_a_proj",), (inputs,), hidden), norm)
    wide = load.tensor(
        f"{prefix}.kv_b_proj.weight", heads * (sizes.plain + sizes.value), sizes.rank
    ).view(heads, -1, sizes.rank)
    load.held_bytes += wide.nbytes
    latent = load.tensor(f"{prefix}.kv_a_layernorm.weight", sizes.rank)
    return LatentBlock(
        sizes,
        query=load.linear((f"{prefix}.{name}",), (query,), inputs, arrange=partial(order, heads)),
        narrow=narrow,
        cached=load.linear(cached, (sizes.rank + sizes.turned,), hidden, arrange=partial(order, 1)),
        norm=RmsNorm((latent,), _LATENT_EPS),
        keys=wide[:, : sizes.plain].contiguous(),
        values=wide[:, sizes.plain :].contiguous(),
        out=load.linear((f"{prefix}.o_proj",), (hidden,), heads * sizes.value),
    )


_LATENT_EPS: Final = 1e-6  # of the norms within latent attention, whatever config.json says


def _last_turned(spec: DecoderSpec, sizes: Latent, heads: int, rows: Tensor) -> Tensor:
    """Rows of heads or of a latent, each with its rotating features last, in `turned_order`."""
    order = turned_order(spec.rope, sizes.turned)
    if order is None:
        return rows
    each = rows.view(heads, -1, *rows.shape[1:])
    turned = each[:, -sizes.turned :][:, order]
    return torch.cat((each[:, : -sizes.turned], turned), dim=1).view(rows.shape)


def _by_kind(spec: DecoderSpec, fused: Tensor) -> Tensor:
    """Reorder from groups (a KV head's queries, key, value) to all queries, keys, values."""
    readers = spec.num_heads // spec.num_kv_heads
    groups = fused.view(spec.num_kv_heads, readers + 2, spec.head_dim, -1)
    parts = (groups[:, :-2], groups[:, -2], groups[:, -1])
    return torch.cat([part.reshape(-1, *fused.shape[1:]) for part in parts])


def _qk_norm(load: WeightLoader, prefix: str) -> RmsNorm:
    """The norms of query and key heads as one, with a row of weights for each head."""
    spec = load.spec
    order = turned_order(spec.rope, spec.head_dim)
    query, key = (load.factor(f"{prefix}.{name}_norm", spec.head_dim) for name in "qk")
    weight = torch.cat((query.expand(spec.num_heads, -1), key.expand(spec.num_kv_heads, -1)), dim=0)
    weight = weight if order is None else weight[:, order]
    return RmsNorm((weight,), spec.norm_eps)


def _mlp(load: WeightLoader, names: Names, prefix: str, index: int) -> Mlp:
    spec = load.spec
    if not spec.gated_mlp:
        return GeluMlp(*_matrices(load, names, prefix, spec.ffn_size))
    if not spec.experts or index in spec.dense_layers:
        return _gated(load, names, prefix, spec.dense_ffn_size or spec.ffn_size)
    scores = f"{prefix}.{names.router}"
    router = Router(
        load.linear((scores,), (spec.experts,), spec.hidden_size, bias=spec.router_bias),
        spec.experts_per_token,
        spec.renormalise,
        _correction(load, scores) if spec.sigmoid_routing else None,
        spec.expert_groups,
        spec.groups_chosen,
        spec.routed_scale,
    )
    each = [f"{prefix}.experts.{number}" for number in range(spec.experts)]
    experts = [_gated(load, names, one, spec.ffn_size, summed=False) for one in each]
    shared, gate = None, None
    if size := spec.shared_ffn_size:
        shared = _gated(load, names, f"{prefix}.{names.shared}", size, summed=False)
    if spec.shared_gate:
        gate = load.linear((f"{prefix}.{names.shared}_gate",), (1,), spec.hidden_size)
    return ExpertMlp(router, experts, load.join, shared, gate)


def _correction(load: WeightLoader, router: str) -> Tensor:
    return load.checkpoint.tensor(f"{router}.e_score_correction_bias", load.spec.experts).to(
        load.device, torch.float32
    )


def _gated(
    load: WeightLoader, names: Names, prefix: str, ffn: int, *, summed: bool = True
) -> GatedMlp:
    gate, up, down = _matrices(load, names, prefix, ffn, summed=summed)
    return GatedMlp(gate, up, down, load.spec.gelu, load.spec.clamped)


def _matrices(
    load: WeightLoader, names: Names, prefix: str, ffn: int, *, summed: bool = True
) -> Iterator[Linear]:
    hidden, bias = load.spec.hidden_size, load.spec.mlp_bias
    for name in names.inner:
        yield load.linear((f"{prefix}.{name}",), (ffn,), hidden, bias=bias)
    yield load.linear((f"{prefix}.{names.down}",), (hidden,), ffn, bias=bias, summed=summed)


def build_with(load: WeightLoader, folder: Path) -> Decoder:
    """Build a model of any family from the weights that `load` reads."""
    spec, names = load.spec, names_of(load.spec)
    embedding, head = load.vocabulary(f"{names.embedding}.weight")
    rotary = partial(Rotary, dtype=load.precision.compute, device=load.device)
    return Decoder(
        shape=spec.shape(folder.resolve().name),
        spec=spec,
        precision=load.precision,
        rotary=rotary(spec.rope, spec.head_dim if spec.latent is None else spec.latent.turned),
        embedding=embedding,
        layers=[build_layer(load, index) for index in range(spec.num_layers)],
        norm=load.norm(names.norm),
        head=head,
        held_bytes=load.held_bytes,
        quantized=load.quantized,
        unread=load.checkpoint.unread(),
        window_rotary=rotary(spec.window_rope, spec.head_dim) if spec.window_rope else None,
    )
