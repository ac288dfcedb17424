"""A model's steps in Triton kernels: four launches a layer beside its products and attention."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Final

import torch
from torch import Tensor
from triton.errors import TritonError

from lmi_bench.core.errors import EngineError
from lmi_bench.engine.torch_backend.attention import PackedStep
from lmi_bench.engine.torch_backend.kv_cache import slots_of
from lmi_bench.engine.torch_backend.layers import DenseMlp, ExpertMlp, Linear, Mlp, PlainLinear, plain
from lmi_bench.engine.torch_backend.models.decoder import Attend
from lmi_bench.engine.torch_backend.runner import TorchForward
from lmi_bench.engine.torch_backend.static.forward import StepBuffers, StepResult
from lmi_bench.engine.triton_backend import ops
from lmi_bench.engine.triton_backend.experts import StackedExperts
from lmi_bench.models.spec import DecoderSpec, NormKind

_LEAST_PAGE: Final = 16


def unsupported(spec: DecoderSpec, block_size: int) -> str | None:
    """Why these kernels cannot run this model, as a clause after "because"; else None."""
    if spec.parallel or spec.gelu or not spec.gated_mlp or spec.norm is not NormKind.RMS:
        return f"there are no kernels for {spec.family}'s layers"
    if spec.sinks or spec.latent_rank:
        return "there are no kernels for sinks or latent attention"
    if block_size < _LEAST_PAGE or block_size & (block_size - 1):
        return f"KV blocks of {block_size} tokens are not a power of two >= {_LEAST_PAGE}"
    if spec.head_dim % 2:
        return f"a head size of {spec.head_dim} is odd"
    return None


class TritonStep(TorchForward):
    """Steps of one model over one cache; check `unsupported` first. Those with prompts, chunks or
    drafts have the same kernels around torch's attention.

    Gate and up of each layer are joined into one matrix, and the model's own layers become views of
    its halves, so that nothing is stored twice.
    """

    def __init__(self, eager: TorchForward) -> None:
        super().__init__(eager.model, eager.cache, num_blocks=eager.num_blocks)
        self._joined = [_joined(layer.mlp) for layer in self.model.layers]

    def __call__(self, buffers: StepBuffers) -> StepResult:
        """Store every row's keys and values; returns its logits. Raises EngineError if a kernel
        does not compile for this GPU or exceeds its resources."""
        positions, tables, shape = buffers.positions, buffers.block_tables, self.cache.shape
        size, windows = shape.block_size, self.model.spec.windows
        splits = ops.splits_for(tables.shape[0], shape.num_kv_heads, tables.shape[1])

        def attend(index: int, q: Tensor, _k: Tensor, _v: Tensor) -> Tensor:
            pages, window = (self.cache.keys[index], self.cache.values[index]), windows[index]
            return ops.paged_attention(q, pages, tables, positions, window=window, splits=splits)

        blocks = tables.gather(1, (positions // size)[:, None])[:, 0]
        rows = (buffers.token_ids, positions, positions + 1)
        with _explained():
            logits = self._logits(*rows, slots_of(blocks, positions % size, shape), attend)
            return StepResult(logits, logits.argmax(dim=-1))

    def run(self, step: PackedStep) -> Tensor:
        attend = partial(self.attention.stored, step=step)
        rows = (step.token_ids, step.positions, step.contexts, step.slots)
        with _explained():
            return self._logits(*rows, attend, step.sampled_rows)

    def _logits(
        self,
        token_ids: Tensor,
        positions: Tensor,
        contexts: Tensor,
        slots: Tensor,
        attend: Attend,
        sampled_rows: Tensor | slice = slice(None),
    ) -> Tensor:
        """As `Decoder.logits`, with an `attend` whose keys and values are in the cache."""
        model, cache = self.model, self.cache
        cos, sin = (part[:, 0] for part in model.rotary.at(positions, contexts))
        heads, head_dim, last = model.spec.num_heads, model.spec.head_dim, len(model.layers) - 1
        x = model.embedding(token_ids).to(model.precision.compute)
        delta: Tensor | None = None
        for index, layer in enumerate(model.layers):
            attention, mlp = layer.block, layer.mlp
            qkv = attention.qkv(ops.add_rms_norm(x, delta, layer.attention_norm))
            pages = (cache.keys[index], cache.values[index])
            turned = ops.turn_and_store(qkv, attention.qk_norm, (cos, sin), slots, pages, heads)
            values = qkv.view(len(qkv), -1, head_dim)[:, turned.shape[1] :]
            attended = attend(index, turned[:, :heads], turned[:, heads:], values)
            if index == last:  # from here on a row feeds only its own logits
                attended, x = attended[sampled_rows], x[sampled_rows]
            normed = ops.add_rms_norm(x, attention.out(attended), layer.mlp_norm)
            if (joined := self._joined[index]) is None:
                x, delta = mlp.add(normed, x), None
            else:
                gate_and_up, down = joined
                delta = down(ops.silu_multiply(gate_and_up(normed)))
        return model.head(ops.add_rms_norm(x, delta, model.norm))


@contextmanager
def _explained() -> Iterator[None]:
    """Names another back end where a kernel does not compile or asks too much of a GPU."""
    try:
        yield
    except TritonError as exc:
        reason = str(exc).strip().partition("\n")[0]
        raise EngineError(
            f"a Triton kernel does not run on this GPU: {reason}; start with --backend torch --device cuda"
        ) from exc


def _joined(mlp: Mlp) -> tuple[PlainLinear, Linear] | None:
    """Gate and up of a dense layer as one, and its down; None for experts, which are then grouped,
    and for quantized weights."""
    if isinstance(mlp, ExpertMlp) and isinstance(mlp.experts[0].up, PlainLinear):
        mlp.grouped = mlp.grouped or StackedExperts(mlp)
    if not isinstance(mlp, DenseMlp) or not isinstance(mlp.up, PlainLinear):
        return None
    gate, up = plain(mlp.gate), plain(mlp.up)
    half = gate.weight.shape[0]
    weight, bias = gate.weight._base, None
    if weight is None or weight is not up.weight._base:  # else done by an earlier step
        weight = torch.cat((gate.weight, up.weight))
    if gate.bias is not None and up.bias is not None:
        bias = torch.cat((gate.bias, up.bias))
    mlp.gate, mlp.up = (
        PlainLinear(weight[rows], None if bias is None else bias[rows]) for rows in (slice(0, half), slice(half, None))
    )
    return PlainLinear(weight, bias), mlp.down
