"""A decode step in Triton kernels: `DecodeStep` in six launches per layer plus the products."""

from typing import Final

import torch
from torch import Tensor
from triton.errors import TritonError

from lmi_bench.core.errors import EngineError
from lmi_bench.engine.torch_backend.kv_cache import KvCache
from lmi_bench.engine.torch_backend.layers import DenseMlp, Linear, Mlp, Norm, PlainLinear, plain
from lmi_bench.engine.torch_backend.models.decoder import Decoder
from lmi_bench.engine.torch_backend.static.forward import StepBuffers, StepResult
from lmi_bench.engine.triton_backend import ops
from lmi_bench.models.spec import DecoderSpec, NormKind

_LEAST_PAGE: Final = 16


def unsupported(spec: DecoderSpec, block_size: int) -> str | None:
    """Why these kernels cannot run this model, as a clause after "because"; else None."""
    if spec.parallel or spec.gelu or not spec.gated_mlp or spec.norm is not NormKind.RMS:
        return f"there are no kernels for {spec.family}'s layers"
    if spec.experts:
        return "there are no kernels for experts"
    if block_size < _LEAST_PAGE or block_size & (block_size - 1):
        return f"KV blocks of {block_size} tokens are not a power of two >= {_LEAST_PAGE}"
    if spec.head_dim % 2:
        return f"a head size of {spec.head_dim} is odd"
    return None


class TritonStep:
    """Steps of one model over one cache; check `unsupported` first.

    Gate and up of each layer are joined into one matrix, and the model's own layers become views of
    its halves, so that nothing is stored twice.
    """

    def __init__(self, model: Decoder, cache: KvCache) -> None:
        self._model = model
        self._cache = cache
        self._gates_and_ups = [_gate_and_up(layer.mlp) for layer in model.layers]
        self._windows = model.spec.windows

    def __call__(self, buffers: StepBuffers) -> StepResult:
        """Store every row's keys and values; returns its logits. Raises EngineError if a kernel
        does not compile for this GPU or exceeds its resources."""
        try:
            return self._run(buffers)
        except TritonError as exc:
            reason = str(exc).strip().partition("\n")[0]
            raise EngineError(
                f"a Triton kernel does not run on this GPU: {reason}; start with --backend torch "
                "--device cuda"
            ) from exc

    def _run(self, buffers: StepBuffers) -> StepResult:
        model, cache = self._model, self._cache
        positions, tables = buffers.positions, buffers.block_tables
        cos, sin = (part[:, 0] for part in model.rotary.at(positions, positions + 1))
        heads, kv_heads = model.spec.num_heads, model.spec.num_kv_heads
        splits = ops.splits_for(tables.shape[0], kv_heads, tables.shape[1])
        x = model.embedding(buffers.token_ids).to(model.precision.compute)
        delta: Tensor | None = None
        for index, layer in enumerate(model.layers):
            attention, mlp = layer.block, _gated(layer.mlp)
            qkv = _product(attention.qkv, _add_norm(x, delta, layer.attention_norm))
            if attention.qk_norm is not None:
                _norm_heads(qkv, attention.qk_norm, heads + kv_heads, model.spec.head_dim)
            pages = (cache.keys[index], cache.values[index])
            q = ops.turn_and_store(qkv, (cos, sin), positions, tables, pages, heads)
            attended = ops.paged_attention(
                q, pages, tables, positions, window=self._windows[index], splits=splits
            )
            normed = _add_norm(x, _product(attention.out, attended), layer.mlp_norm)
            gate_and_up = _product(self._gates_and_ups[index], normed)
            delta = _product(mlp.down, ops.silu_multiply(gate_and_up))
        logits = model.head(_add_norm(x, delta, model.norm))
        return StepResult(logits, ops.likeliest(logits))


def _add_norm(x: Tensor, delta: Tensor | None, norm: Norm) -> Tensor:
    return ops.add_rms_norm(x, delta, norm.tensors[0], norm.eps)


def _norm_heads(qkv: Tensor, norm: Norm, heads: int, head_dim: int) -> None:
    """Normalise queries and keys in place."""
    turned = qkv.view(qkv.shape[0], -1, head_dim)[:, :heads]
    turned.copy_(norm(turned))


def _product(layer: Linear, x: Tensor) -> Tensor:
    linear = plain(layer)
    if linear.bias is None and x.shape[0] <= ops.SKINNY_ROWS:
        return ops.skinny_linear(x, linear.weight)
    return linear(x)


def _gated(mlp: Mlp) -> DenseMlp:
    assert isinstance(mlp, DenseMlp)  # see `unsupported`
    return mlp


def _gate_and_up(layer: Mlp) -> PlainLinear:
    mlp = _gated(layer)
    gate, up = plain(mlp.gate), plain(mlp.up)
    half = gate.weight.shape[0]
    joined = gate.weight._base
    if joined is None or joined is not up.weight._base:  # else done by an earlier step
        joined = torch.cat((gate.weight, up.weight))
    weight, bias = joined, None
    if gate.bias is not None and up.bias is not None:
        bias = torch.cat((gate.bias, up.bias))
    mlp.gate, mlp.up = (
        PlainLinear(weight[rows], None if bias is None else bias[rows])
        for rows in (slice(0, half), slice(half, None))
    )
    return PlainLinear(weight, bias)
