"""Llama and what is built like it: RMS norm, rotary positions, shared KV heads, gated MLP.

Source: Touvron et al. 2023, arXiv:2302.13971 and arXiv:2307.09288; tensor names as in Hugging
Face checkpoints (LlamaForCausalLM).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lmi_bench.engine.torch_backend.attention import PagedAttention
from lmi_bench.engine.torch_backend.inputs import PackedStep
from lmi_bench.engine.torch_backend.layers import GatedMlp, Linear, RmsNorm, make_linear
from lmi_bench.engine.torch_backend.precision import Precision
from lmi_bench.engine.torch_backend.rotary import RotaryTable, rotary_frequencies, rotate
from lmi_bench.engine.torch_backend.weights import Checkpoint
from lmi_bench.errors import InputError
from lmi_bench.model_shape import ModelShape


@dataclass(frozen=True, slots=True)
class _Layer:
    attention_norm: RmsNorm
    qkv: Linear
    attention_out: Linear
    mlp_norm: RmsNorm
    mlp: GatedMlp


class LlamaModel:
    """The forward pass of a step; holds weights, no cache and no sequence."""

    def __init__(
        self,
        shape: ModelShape,
        config: Mapping[str, Any],
        checkpoint: Checkpoint,
        precision: Precision,
        device: torch.device,
    ) -> None:
        """Read, round, fuse and pack the weights, one layer at a time."""
        if config.get("hidden_act", "silu") != "silu":
            raise InputError(
                f"model {shape.name!r}: activation {config['hidden_act']!r} is not supported; "
                "the torch back end has: silu"
            )
        self.shape = shape
        load = _Loader(checkpoint, precision, device, float(config.get("rms_norm_eps", 1e-6)))
        self._rotary = RotaryTable(
            rotary_frequencies(config, shape.head_dim),
            shape.max_positions,
            dtype=precision.compute,
            device=device,
        )
        hidden, vocab = shape.hidden_size, shape.vocab_size
        embedding = load.tensor("model.embed_tokens.weight", vocab, hidden)
        self._compute = precision.compute
        self._embedding = embedding.to(precision.stored)
        self._layers = [_layer(load, shape, i) for i in range(shape.num_layers)]
        self._norm = load.rms_norm("model.norm", hidden)
        if shape.tied_embeddings:
            self._head = make_linear(embedding)
        else:
            self._head = load.linear(("lm_head",), (vocab,), hidden)

    def logits(self, step: PackedStep, attention: PagedAttention) -> Tensor:
        """Run a step: its keys and values into the cache, the sampled rows' logits out.

        returns  shape (sampled rows, vocab)
        """
        heads, kv_heads = self.shape.num_heads, self.shape.num_kv_heads
        x = self._embedding[step.token_ids].to(self._compute)
        turn = self._rotary.at(step.positions)
        last = len(self._layers) - 1
        for index, layer in enumerate(self._layers):
            qkv = layer.qkv(layer.attention_norm(x)).view(x.shape[0], heads + 2 * kv_heads, -1)
            turned = rotate(qkv[:, : heads + kv_heads], turn)
            attended = attention(
                index, turned[:, :heads], turned[:, heads:], qkv[:, heads + kv_heads :], step
            )
            if index == last:  # from here on a row feeds only its own logits
                attended, x = attended[step.sampled_rows], x[step.sampled_rows]
            x = layer.attention_out.add(attended, x)
            x = layer.mlp.add(layer.mlp_norm(x), x)
        return self._head(self._norm(x))


def _layer(load: _Loader, shape: ModelShape, index: int) -> _Layer:
    hidden, ffn = shape.hidden_size, shape.ffn_size
    query, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    prefix = f"model.layers.{index}"
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    projections = tuple(f"{attention}.{name}_proj" for name in "qkv")
    return _Layer(
        attention_norm=load.rms_norm(f"{prefix}.input_layernorm", hidden),
        qkv=load.linear(projections, (query, kv, kv), hidden),
        attention_out=load.linear((f"{attention}.o_proj",), (hidden,), query),
        mlp_norm=load.rms_norm(f"{prefix}.post_attention_layernorm", hidden),
        mlp=GatedMlp(
            load.linear((f"{mlp}.gate_proj",), (ffn,), hidden),
            load.linear((f"{mlp}.up_proj",), (ffn,), hidden),
            load.linear((f"{mlp}.down_proj",), (hidden,), ffn),
        ),
    )


class _Loader:
    """Tensors of a checkpoint, rounded and placed as the precision says."""

    def __init__(
        self, checkpoint: Checkpoint, precision: Precision, device: torch.device, eps: float
    ) -> None:
        self._checkpoint = checkpoint
        self._precision = precision
        self._device = device
        self._eps = eps

    def tensor(self, name: str, *shape: int) -> Tensor:
        stored = self._checkpoint.tensor(name, *shape).to(self._device, self._precision.stored)
        return stored.to(self._precision.compute)

    def linear(self, names: tuple[str, ...], rows: tuple[int, ...], columns: int) -> Linear:
        """Projections of the same input as one matrix; biases where the checkpoint has them."""
        parts = list(zip(names, rows, strict=True))
        weight = torch.cat([self.tensor(f"{name}.weight", n, columns) for name, n in parts])
        bias = None
        if all(f"{name}.bias" in self._checkpoint for name in names):
            bias = torch.cat([self.tensor(f"{name}.bias", n) for name, n in parts])
        return make_linear(weight, bias)

    def rms_norm(self, name: str, size: int) -> RmsNorm:
        return RmsNorm(self.tensor(f"{name}.weight", size), self._eps)
