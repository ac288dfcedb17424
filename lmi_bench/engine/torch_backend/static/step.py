"""A decode step as a pure function of tensors with fixed sizes.

It computes the same as `Decoder.logits` for sequences of one row each, but without data-dependent
branches: contexts are padded to the shape's length and masked. So it can be exported and compiled,
or captured. It has no weights: matrices are called by number (`parts`) and norms are inputs, so a
compiled step fits every model of the same shape.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from lmi_bench.engine.torch_backend.inputs import masked_score
from lmi_bench.engine.torch_backend.kv_cache import KvLayoutShape, head_page_rows
from lmi_bench.engine.torch_backend.layers import Norm
from lmi_bench.engine.torch_backend.models.decoder import AttentionBlock, Decoder, Layer
from lmi_bench.engine.torch_backend.rotary import rotate
from lmi_bench.engine.torch_backend.static.parts import Part, call_part

_EMBEDDING, _HEAD, _FIRST_LAYER, _PARTS_PER_LAYER = 0, 1, 2, 3


class DecodeStep(torch.nn.Module):
    """The step of one model; run it with `parts_of` in use and `norm_tensors`."""

    def __init__(self, model: Decoder, layout: KvLayoutShape) -> None:
        super().__init__()
        self._model = model
        self._layout = layout
        windows = model.spec.layer_windows
        self._windows = tuple(dict.fromkeys(windows))
        self._bias_of_layer = [self._windows.index(window) for window in windows]

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        block_tables: Tensor,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        norm_tensors: Sequence[Tensor],
    ) -> Tensor:
        """Store every row's keys and values; returns logits, shape (sequences, vocab).

        token_ids, positions  shape (sequences,)
        block_tables          shape (sequences, pages)
        keys, values          per layer, from KvCache
        norm_tensors          from `norm_tensors`
        """
        model, layout = self._model, self._layout
        norms = _Norms(norm_tensors)
        like = norm_tensors[0]  # every part computes in the number format of the norms
        hidden = model.spec.hidden_size
        size = layout.block_size
        place = (
            block_tables.gather(1, (positions // size)[:, None]),
            torch.arange(layout.num_kv_heads, device=positions.device)[None],
            (positions % size)[:, None],
        )
        page_rows = head_page_rows(block_tables, layout.num_kv_heads)
        biases = self._biases(positions, block_tables.shape[1] * size, like.dtype)
        turn = model.rotary.at(positions, positions + 1)
        x = call_part(_EMBEDDING, token_ids, like, hidden)
        for index, layer in enumerate(model.layers):
            number = _FIRST_LAYER + _PARTS_PER_LAYER * index
            block = layer.attention
            features = (block.num_heads + 2 * block.num_kv_heads) * layout.head_dim
            qkv = call_part(number, norms.next(layer.attention_norm)(x), x, features)
            attended = self._attend(
                _rotated(qkv, block, turn, norms),
                qkv,
                block,
                (keys[index], values[index]),
                place,
                page_rows,
                biases[self._bias_of_layer[index]],
            )
            with_attention = call_part(number + 1, attended, x, hidden)
            read = norms.next(layer.mlp_norm)(x if layer.parallel else with_attention)
            x = call_part(number + 2, read, with_attention, hidden)
        return call_part(_HEAD, norms.next(model.norm)(x), x, model.spec.vocab_size)

    def _biases(self, positions: Tensor, tokens: int, dtype: torch.dtype) -> list[Tensor]:
        """Masks for each distinct window, added to the scores; shape (sequences * kv_heads, 1,
        tokens)."""
        columns = torch.arange(tokens, device=positions.device)
        biases = []
        for window in self._windows:
            unseen = columns > positions[:, None]
            if window is not None:
                unseen = unseen | (columns <= positions[:, None] - window)
            bias = torch.zeros(unseen.shape, dtype=dtype, device=positions.device)
            bias = bias.masked_fill(unseen, masked_score(dtype))
            biases.append(bias.repeat_interleave(self._layout.num_kv_heads, dim=0)[:, None])
        return biases

    def _attend(
        self,
        turned: Tensor,
        qkv: Tensor,
        block: AttentionBlock,
        cache: tuple[Tensor, Tensor],
        place: tuple[Tensor, Tensor, Tensor],
        page_rows: Tensor,
        bias: Tensor,
    ) -> Tensor:
        """Store rotated keys and values, then attend; result shape (sequences, query size).

        place  block, head and offset of each row's heads; broadcast to (sequences, kv_heads)
        """
        layout, count = self._layout, qkv.shape[0]
        head_dim, kv_heads = layout.head_dim, layout.num_kv_heads
        heads = block.num_heads
        stored = (turned[:, heads:], qkv.view(count, -1, head_dim)[:, heads + kv_heads :])
        seen = []
        for pages, rows in zip(cache, stored, strict=True):
            # write to the input itself: through a view, the compiler copies the whole cache
            pages.index_put_(place, rows.to(layout.dtype))
            gathered = pages.view(-1, layout.block_size, head_dim).index_select(0, page_rows)
            seen.append(gathered.view(count * kv_heads, -1, head_dim).to(qkv.dtype))
        queries = turned[:, :heads].reshape(count * kv_heads, -1, head_dim)
        scores = torch.baddbmm(bias, queries, seen[0].transpose(1, 2), alpha=head_dim**-0.5)
        return torch.bmm(torch.softmax(scores, dim=-1), seen[1]).reshape(count, -1)


def norm_tensors(model: Decoder) -> list[Tensor]:
    """The parameters of a model's norms, in the order in which a step reads them."""
    norms: list[Norm] = []
    for layer in model.layers:
        norms.append(layer.attention_norm)
        if layer.attention.qk_norm is not None:
            norms.append(layer.attention.qk_norm)
        norms.append(layer.mlp_norm)
    norms.append(model.norm)
    return [tensor for norm in norms for tensor in norm.tensors]


def parts_of(model: Decoder) -> list[Part]:
    """The model's parts in the order of a step's numbers."""

    def embed(token_ids: Tensor, residual: Tensor) -> Tensor:
        return model.embedding(token_ids).to(residual.dtype)

    def head(x: Tensor, _: Tensor) -> Tensor:
        return model.head(x)

    return [embed, head, *(part for layer in model.layers for part in _layer_parts(layer))]


def _layer_parts(layer: Layer) -> tuple[Part, Part, Part]:
    def project(x: Tensor, _: Tensor) -> Tensor:
        return layer.attention.qkv(x)

    return project, layer.attention.out.add, layer.mlp.add


def _rotated(
    qkv: Tensor, block: AttentionBlock, turn: tuple[Tensor, Tensor], norms: _Norms
) -> Tensor:
    """Queries and keys, normalised if the model does so, and rotated by their positions."""
    heads = block.num_heads + block.num_kv_heads
    turned = qkv.view(qkv.shape[0], heads + block.num_kv_heads, -1)[:, :heads]
    if block.qk_norm is not None:
        turned = norms.next(block.qk_norm)(turned)
    return rotate(turned, turn)


class _Norms:
    """Returns a step's norms in order, with their tensors from the step's inputs."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors: Iterator[Tensor] = iter(tensors)

    def next(self, norm: Norm) -> Norm:
        return norm.with_tensors([next(self._tensors) for _ in norm.tensors])
