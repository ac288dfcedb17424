"""Builds each model family: maps a checkpoint's tensors to the parts of a decoder.

The spec tells which parts there are, and their names. Of several names, parted by a space:

norms  of attention and MLP; one name: of both together
qkv    one name: queries, keys and values are stored as one matrix, KV head by KV head
inner  matrices that read the MLP's input: gate and up, or up alone

Of none, an empty text: norms of outputs, the gate of a shared expert, the correction of a router,
which then takes sigmoids of its scores.

Falcon: layer norms, attention parallel to the MLP; 7B has one KV head and one norm per layer, 40B
and 180B have 8 KV heads and a norm for each half.
Sources: Touvron et al. 2023, arXiv:2302.13971 and arXiv:2307.09288; Jiang et al. 2023,
arXiv:2310.06825, and 2024, arXiv:2401.04088; Yang et al. 2024, arXiv:2412.15115, and 2025,
arXiv:2505.09388; Almazrouei et al. 2023, arXiv:2311.16867; Gemma Team 2024, arXiv:2408.00118, and
2025, arXiv:2503.19786.
"""

from functools import partial
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from lmi_bench.engine.torch_backend.layers import DenseMlp, ExpertMlp, Linear, Mlp, RmsNorm, Router
from lmi_bench.engine.torch_backend.loading import WeightLoader
from lmi_bench.engine.torch_backend.models.decoder import AttentionBlock, Decoder, LatentBlock, Layer
from lmi_bench.engine.torch_backend.rotary import Rotary, turned_order
from lmi_bench.models.spec import DecoderSpec


def build_layer(load: WeightLoader, index: int) -> Layer:
    """One layer of any family from the weights that `load` reads."""
    spec = load.spec
    prefix = spec.layer(index)
    norms = [load.norm(name) for name in spec.names(prefix, "norms")]
    build = _latent if spec.latent_rank else _attention
    attention = build(load, *spec.names(prefix, "attention"))
    mlp = _mlp(load, index, *spec.names(prefix, "mlp"))
    out_norms = tuple(load.norm(name) for name in spec.names(prefix, "out_norms"))
    return Layer(norms[0], attention, norms[-1], mlp, spec.parallel, out_norms)


def _attention(load: WeightLoader, prefix: str) -> AttentionBlock:
    spec, order = load.spec, turned_order(load.spec.rope, load.spec.head_dim)
    query, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    qkv, rows = spec.names(prefix, "qkv"), (query, kv, kv)
    is_fused = len(qkv) == 1

    def arranged(stored: Tensor) -> Tensor:
        by_kind = _by_kind(spec, stored) if is_fused else stored
        return _reordered(by_kind, spec.num_heads + spec.num_kv_heads, order)

    parts = (sum(rows),) if is_fused else rows
    out, hidden = spec.names(prefix, "out"), spec.hidden_size
    return AttentionBlock(
        spec.num_heads,
        spec.num_kv_heads,
        qkv=load.linear(qkv, parts, hidden, bias=spec.qkv_bias, arrange=arranged),
        out=load.linear(out, (hidden,), query, bias=spec.out_bias, summed=True),
        qk_norm=_qk_norm(load, prefix, order) if spec.qk_norm else None,
        sinks=load.tensor(f"{prefix}.sinks", spec.num_heads) if spec.sinks else None,
    )


def _reordered(rows: Tensor, heads: int, order: Tensor | None) -> Tensor:
    """The rows of as many heads in this order, and the others behind them as they are."""
    if order is None:
        return rows
    turned, rest = rows.tensor_split([heads * len(order)])
    each = turned.view(heads, len(order), *rows.shape[1:])
    return torch.cat((each[:, order].flatten(0, 1), rest))


def _latent(load: WeightLoader, prefix: str) -> LatentBlock:
    spec = load.spec
    hidden, heads, rank, turned = spec.hidden_size, spec.num_heads, spec.latent_rank, spec.turned
    plain = spec.head_dim - turned

    def linear(name: str, rows: int, columns: int, heads: int = 0, before: int = 0) -> Linear:
        """A product whose rows are of `heads`, with features `before` those that rotate."""
        order = turned_order(spec.rope, turned, before=before)
        arrange = partial(_reordered, heads=heads, order=order if heads else None)
        return load.linear((f"{prefix}.{name}",), (rows,), columns, arrange=arrange)

    def norm(name: str, size: int) -> RmsNorm:
        return RmsNorm((load.tensor(f"{prefix}.{name}.weight", size),), _LATENT_EPS)

    narrow, query, inputs = None, "q_proj", hidden
    if spec.query_rank:
        query, inputs = "q_b_proj", spec.query_rank
        narrow = (linear("q_a_proj", inputs, hidden), norm("q_a_layernorm", inputs))
    stored = load.tensor(f"{prefix}.kv_b_proj.weight", heads * (plain + spec.value_dim), rank)
    wide = stored.view(heads, -1, rank)
    load.held_bytes += wide.nbytes
    return LatentBlock(
        query=linear(query, heads * spec.head_dim, inputs, heads, plain),
        narrow=narrow,
        cached=linear("kv_a_proj_with_mqa", rank + turned, hidden, 1, rank),
        norm=norm("kv_a_layernorm", rank),
        keys=wide[:, :plain].contiguous(),
        values=wide[:, plain:].contiguous(),
        out=load.linear((f"{prefix}.o_proj",), (hidden,), heads * spec.value_dim, summed=True),
    )


_LATENT_EPS: Final = 1e-6  # of the norms within latent attention, whatever config.json says


def _by_kind(spec: DecoderSpec, fused: Tensor) -> Tensor:
    """Reorder from groups (a KV head's queries, key, value) to all queries, keys, values."""
    readers = spec.num_heads // spec.num_kv_heads
    groups = fused.view(spec.num_kv_heads, readers + 2, spec.head_dim, -1)
    parts = (groups[:, :-2], groups[:, -2], groups[:, -1])
    return torch.cat([part.reshape(-1, *fused.shape[1:]) for part in parts])


def _qk_norm(load: WeightLoader, prefix: str, order: Tensor | None) -> RmsNorm:
    """The norms of query and key heads as one, with a row of weights for each head."""
    spec = load.spec
    query, key = (load.factor(f"{prefix}.{name}_norm", spec.head_dim) for name in "qk")
    weight = torch.cat((query.expand(spec.num_heads, -1), key.expand(spec.num_kv_heads, -1)), dim=0)
    weight = weight if order is None else weight[:, order]
    return RmsNorm((weight,), spec.norm_eps)


def _mlp(load: WeightLoader, index: int, prefix: str) -> Mlp:
    spec = load.spec
    if not spec.experts or index in spec.dense_layers:
        return _dense(load, prefix, spec.dense_ffn_size or spec.ffn_size)
    each = [f"{prefix}.experts.{number}" for number in range(spec.experts)]
    (router,), (shared,) = spec.names(prefix, "router"), spec.names(prefix, "shared")
    gate = spec.names(prefix, "shared_gate")
    correction = [
        load.checkpoint.tensor(name, spec.experts).to(load.device, torch.float32)
        for name in spec.names(router, "correction")
    ]
    wide = Tensor.float if correction else None  # as `Router` asks
    sizes = (spec.experts,), spec.hidden_size
    scores = load.linear((router,), *sizes, bias=spec.mlp_bias, arrange=wide)
    return ExpertMlp(
        Router(scores, spec, *correction),
        [_dense(load, one, spec.ffn_size, summed=False) for one in each],
        load.join,
        _dense(load, shared, size, summed=False) if (size := spec.shared_ffn_size) else None,
        load.linear(gate, (1,), spec.hidden_size) if gate else None,
    )


def _dense(load: WeightLoader, prefix: str, ffn: int, *, summed: bool = True) -> DenseMlp:
    spec, hidden, bias = load.spec, load.spec.hidden_size, load.spec.mlp_bias
    inner = [load.linear((key,), (ffn,), hidden, bias=bias) for key in spec.names(prefix, "inner")]
    down = load.linear(spec.names(prefix, "down"), (hidden,), ffn, bias=bias, summed=summed)
    gate = inner[0] if spec.gated_mlp else None
    return DenseMlp(gate, inner[-1], down, spec.gelu, spec.clamped)


def build_with(load: WeightLoader, folder: Path) -> Decoder:
    """Build a model of any family from the weights that `load` reads."""
    spec = load.spec
    embedding, head = load.vocabulary(f"{spec.tensors['embedding']}.weight")
    rotary = partial(Rotary, dtype=load.precision.compute, device=load.device)
    return Decoder(
        shape=spec.shape(folder.resolve().name),
        spec=spec,
        precision=load.precision,
        rotary=rotary(spec.rope, spec.turned or spec.head_dim),
        embedding=embedding,
        layers=[build_layer(load, index) for index in range(spec.num_layers)],
        norm=load.norm(spec.tensors["norm"]),
        head=head,
        held_bytes=load.held_bytes,
        quantized=load.quantized,
        unread=load.checkpoint.unread(),
        window_rotary=rotary(spec.window_rope, spec.head_dim) if spec.window_rope else None,
    )
