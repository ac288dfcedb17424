"""A decoder put together from parts: the forward pass that every family shares.

A family's file says which tensors of a checkpoint make which part; what the parts are like
(norms, biases, windows, experts) stands in the DecoderSpec.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from lmi_bench.engine.torch_backend.attention import PagedAttention
from lmi_bench.engine.torch_backend.inputs import PackedStep
from lmi_bench.engine.torch_backend.layers import Linear, Mlp, Norm
from lmi_bench.engine.torch_backend.loading import WeightLoader
from lmi_bench.engine.torch_backend.parallel import Embedding, Head
from lmi_bench.engine.torch_backend.rotary import Rotary, rotate
from lmi_bench.models.shape import ModelShape
from lmi_bench.models.spec import DecoderSpec

Turn = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class AttentionBlock:
    """Projections around paged attention.

    qkv      rows of the query heads, then of the key heads, then of the value heads
    qk_norm  of query and key heads together, before they are turned
    """

    num_heads: int
    num_kv_heads: int
    qkv: Linear
    out: Linear
    qk_norm: Norm | None = None

    def attend(
        self, index: int, x: Tensor, turn: Turn, step: PackedStep, attention: PagedAttention
    ) -> Tensor:
        """What normalised rows x gather from their context, before `out`: (rows, query size)."""
        heads, turned_heads = self.num_heads, self.num_heads + self.num_kv_heads
        qkv = self.qkv(x).view(x.shape[0], turned_heads + self.num_kv_heads, -1)
        turned = qkv[:, :turned_heads]
        if self.qk_norm is not None:
            turned = self.qk_norm(turned)
        turned = rotate(turned, turn)
        return attention(index, turned[:, :heads], turned[:, heads:], qkv[:, turned_heads:], step)


@dataclass(frozen=True, slots=True)
class Layer:
    """x += attention(norm(x)), then x += mlp(norm(x)); both from the same x where `parallel`.

    It runs in two halves, between which rows that give no token may be dropped.
    """

    attention_norm: Norm
    attention: AttentionBlock
    mlp_norm: Norm
    mlp: Mlp
    parallel: bool = False

    def attend(
        self, index: int, x: Tensor, turn: Turn, step: PackedStep, attention: PagedAttention
    ) -> Tensor:
        """What rows x gather from their context, shape (rows, query size)."""
        return self.attention.attend(index, self.attention_norm(x), turn, step, attention)

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """The layer's output from its input and what was gathered."""
        with_attention = self.attention.out.add(attended, x)
        read = x if self.parallel else with_attention
        return self.mlp.add(self.mlp_norm(read), with_attention)


class Decoder:
    """The forward pass of a step; holds weights, no cache and no sequence.

    Its parts are open to the back ends that put the pass together in another way.

    held_bytes  of its matrices, embeddings and head
    quantized   what quantizing did to the matrices; None where nothing is
    compute     what is multiplied
    """

    def __init__(
        self,
        load: WeightLoader,
        shape: ModelShape,
        *,
        embedding: Embedding,
        layers: Sequence[Layer],
        norm: Norm,
        head: Head,
    ) -> None:
        self.shape = shape
        self.spec: DecoderSpec = load.spec
        self.held_bytes = load.held_bytes
        self.quantized = load.quantized
        self.compute = load.precision.compute
        self.rotary = Rotary(
            load.spec.rope, load.spec.head_dim, dtype=self.compute, device=load.device
        )
        self.embedding = embedding
        self.layers = layers
        self.norm = norm
        self.head = head

    def logits(self, step: PackedStep, attention: PagedAttention) -> Tensor:
        """Run a step: its keys and values into the cache, the sampled rows' logits out.

        returns  shape (sampled rows, vocab)
        """
        x = self.embedding(step.token_ids).to(self.compute)
        turn = self.rotary.at(step.positions, step.contexts)
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            attended = layer.attend(index, x, turn, step, attention)
            if index == last:  # from here on a row feeds only its own logits
                attended, x = attended[step.sampled_rows], x[step.sampled_rows]
            x = layer.finish(x, attended)
        return self.head(self.norm(x))
