"""The decoder's forward pass, common to all model families.

A family's file maps a checkpoint's tensors to parts; the DecoderSpec describes the parts (norms,
biases, windows, experts).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from lmi_bench.engine.torch_backend.attention import PackedStep, PagedAttention
from lmi_bench.engine.torch_backend.layers import Linear, Mlp, Norm
from lmi_bench.engine.torch_backend.loading import Embedding, Head, WeightLoader
from lmi_bench.engine.torch_backend.rotary import Rotary, rotate
from lmi_bench.models.shape import ModelShape
from lmi_bench.models.spec import DecoderSpec

Turn = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class AttentionBlock:
    """Projections around paged attention.

    qkv      rows of the query heads, then of the key heads, then of the value heads
    qk_norm  norm of query and key heads together, before their rotation
    """

    num_heads: int
    num_kv_heads: int
    qkv: Linear
    out: Linear
    qk_norm: Norm | None = None

    def attend(
        self, index: int, x: Tensor, turn: Turn, step: PackedStep, attention: PagedAttention
    ) -> Tensor:
        """Attention of normalised rows x, before `out`: shape (rows, query size)."""
        heads, turned_heads = self.num_heads, self.num_heads + self.num_kv_heads
        qkv = self.qkv(x).view(x.shape[0], turned_heads + self.num_kv_heads, -1)
        turned = qkv[:, :turned_heads]
        if self.qk_norm is not None:
            turned = self.qk_norm(turned)
        turned = rotate(turned, turn)
        return attention(index, turned[:, :heads], turned[:, heads:], qkv[:, turned_heads:], step)


@dataclass(frozen=True, slots=True)
class Layer:
    """x += attention(norm(x)), then x += mlp(norm(x)); both from the same x if `parallel`. It runs
    in two halves; rows that are not sampled can be dropped between them."""

    attention_norm: Norm
    attention: AttentionBlock
    mlp_norm: Norm
    mlp: Mlp
    parallel: bool = False

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """The layer's output from its input and the attention."""
        with_attention = self.attention.out.add(attended, x)
        read = x if self.parallel else with_attention
        return self.mlp.add(self.mlp_norm(read), with_attention)


class Decoder:
    """The forward pass of a step; has weights but no cache and no sequences.

    Its parts are public for back ends with another forward pass.

    held_bytes  bytes of matrices, embeddings and head
    quantized   bytes before and after quantization; None without quantization
    compute     number format of products
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
        """Run a step: store its keys and values; returns logits, shape (sampled rows, vocab)."""
        x = self.embedding(step.token_ids).to(self.compute)
        turn = self.rotary.at(step.positions, step.contexts)
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            normed = layer.attention_norm(x)
            attended = layer.attention.attend(index, normed, turn, step, attention)
            if index == last:  # from here on a row feeds only its own logits
                attended, x = attended[step.sampled_rows], x[step.sampled_rows]
            x = layer.finish(x, attended)
        return self.head(self.norm(x))
