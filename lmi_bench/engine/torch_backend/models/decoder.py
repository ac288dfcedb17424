"""The decoder's forward pass, common to all model families.

`families` maps a checkpoint's tensors to parts; the DecoderSpec describes the parts (norms, biases,
windows, experts).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lmi_bench.engine.quantization import QuantizedBytes
from lmi_bench.engine.torch_backend.layers import Linear, Mlp, Norm
from lmi_bench.engine.torch_backend.loading import Embedding, Head
from lmi_bench.engine.torch_backend.precision import Precision
from lmi_bench.engine.torch_backend.rotary import Rotary, rotate
from lmi_bench.models.shape import ModelShape
from lmi_bench.models.spec import DecoderSpec

Turn = tuple[Tensor, Tensor]

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""Stores a layer's keys and values, and gives its attention over the cache: from the layer's index,
queries (rows, heads, head_dim), keys and values (rows, kv_heads, head_dim) to (rows, features)."""


@dataclass(frozen=True, slots=True)
class AttentionBlock:
    """Projections around paged attention.

    qkv      rows of the query heads, then of the key heads, then of the value heads
    qk_norm  norm of query and key heads together, before their rotation
    sinks    scores that take weight from every key, shape (num_heads,)
    """

    num_heads: int
    num_kv_heads: int
    qkv: Linear
    out: Linear
    qk_norm: Norm | None = None
    sinks: Tensor | None = None

    def attend(self, index: int, x: Tensor, turn: Turn, attend: Attend) -> Tensor:
        """Attention of normalised rows x, before `out`: shape (rows, query size)."""
        heads, turned_heads = self.num_heads, self.num_heads + self.num_kv_heads
        qkv = self.qkv(x).view(x.shape[0], turned_heads + self.num_kv_heads, -1)
        turned = qkv[:, :turned_heads]
        if self.qk_norm is not None:
            turned = self.qk_norm(turned)
        turned = rotate(turned, turn)
        return attend(index, turned[:, :heads], turned[:, heads:], qkv[:, turned_heads:])


@dataclass(frozen=True, slots=True)
class LatentBlock:
    """Attention over one latent vector per token, which is the key and value of every head
    (DeepSeek-V2, arXiv:2405.04434): each head's own keys are made part of its queries.

    query        makes queries from x, or from the `query_rank` values that `narrow` makes
    cached       makes a token's latent and its key's rotating features; `norm` is of the latent
    keys, values of each head from the latent, shape (heads, features, rank)
    """

    query: Linear
    narrow: tuple[Linear, Norm] | None
    cached: Linear
    norm: Norm
    keys: Tensor
    values: Tensor
    out: Linear
    sinks: None = None

    def attend(self, index: int, x: Tensor, turn: Turn, attend: Attend) -> Tensor:
        """As `AttentionBlock.attend`."""
        heads, plain, rank = self.keys.shape
        cached = self.cached(x)
        latent, turned = self.norm(cached[:, :rank]), rotate(cached[:, None, rank:], turn)
        key = torch.cat((latent[:, None], turned), dim=-1)
        if self.narrow is not None:
            x = self.narrow[1](self.narrow[0](x))
        query = self.query(x).view(len(x), heads, -1)
        asked = torch.einsum("rhf,hfl->rhl", query[..., :plain], self.keys)
        query = torch.cat((asked, rotate(query[..., plain:], turn)), dim=-1)
        seen = attend(index, query, key, key).view(query.shape)[..., :rank]
        return torch.einsum("rhl,hfl->rhf", seen, self.values).flatten(1)


@dataclass(frozen=True, slots=True)
class Layer:
    """x += attention(norm(x)), then x += mlp(norm(x)); both from the same x if `parallel`. It runs
    in two halves; rows that are not sampled can be dropped between them.

    out_norms  of what attention and MLP add to x; none: they add it as it is
    """

    attention_norm: Norm
    attention: AttentionBlock | LatentBlock
    mlp_norm: Norm
    mlp: Mlp
    parallel: bool = False
    out_norms: tuple[Norm, ...] = ()

    @property
    def block(self) -> AttentionBlock:
        """Its attention, for back ends that have no other kind."""
        assert isinstance(self.attention, AttentionBlock)
        return self.attention

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """The layer's output from its input and the attention."""
        if self.out_norms:
            x = x + self.out_norms[0](self.attention.out(attended))
            return x + self.out_norms[1](self.mlp.add(self.mlp_norm(x), x.new_zeros(x.shape)))
        with_attention = self.attention.out.add(attended, x)
        read = x if self.parallel else with_attention
        return self.mlp.add(self.mlp_norm(read), with_attention)


@dataclass(slots=True, eq=False)
class Decoder:
    """The forward pass of a step; has weights but no cache and no sequences.

    Its parts are public for back ends with another forward pass.

    precision   number formats of weights and products
    rotary      of every layer, or of those without a window if there is a `window_rotary`
    held_bytes  bytes of matrices, embeddings and head
    quantized   bytes before and after quantization; None without quantization
    unread      words about tensors of the file that no layer reads; empty without any
    """

    shape: ModelShape
    spec: DecoderSpec
    precision: Precision
    rotary: Rotary
    embedding: Embedding
    layers: Sequence[Layer]
    norm: Norm
    head: Head
    held_bytes: int
    quantized: QuantizedBytes | None
    unread: str
    window_rotary: Rotary | None = None

    def logits(
        self,
        token_ids: Tensor,
        positions: Tensor,
        contexts: Tensor,
        attend: Attend,
        sampled_rows: Tensor | slice = slice(None),
    ) -> Tensor:
        """Run a step; returns logits, shape (sampled rows, vocab).

        token_ids, positions, contexts  shape (rows,), as in PackedStep
        """
        x = self.embedding(token_ids).to(self.precision.compute)
        if self.spec.embedding_scale != 1.0:  # rounded as the rows are; a number, for graphs
            x = x * torch.tensor(self.spec.embedding_scale, dtype=x.dtype).item()
        turn = near = self.rotary.at(positions, contexts)
        if self.window_rotary is not None:
            near = self.window_rotary.at(positions, contexts)
        windows, cap = self.spec.windows, self.spec.logit_cap
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            own = turn if windows[index] is None else near
            attended = layer.attention.attend(index, layer.attention_norm(x), own, attend)
            if index == last:  # from here on a row feeds only its own logits
                attended, x = attended[sampled_rows], x[sampled_rows]
            x = layer.finish(x, attended)
        logits = self.head(self.norm(x))
        return torch.tanh(logits / cap) * cap if cap else logits
