"""Causal attention of one step over the paged cache.

Prompt rows use torch's scaled_dot_product_attention, which is built for many queries. A decode
row has one query, for which SDPA on a CPU is 5 to 10 times slower than plain matrix products: its
pages are gathered into reused buffers and multiplied as one batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from lmi_bench.engine.torch_backend.inputs import (
    DecodeGroup,
    MaskFormats,
    PackedStep,
    PromptRows,
)
from lmi_bench.engine.torch_backend.kv_cache import KvCache


class PagedAttention:
    """Attention of every layer of one model over one cache.

    With keys per query head (MHA), decoding is bound by reading the cache: it computes in the
    cache's format and sums values in place, which saves half of the gathering. With shared keys
    (GQA) each key read serves several queries, and it computes in the model's compute format.

    mask_formats  formats that packed steps must be made with
    """

    def __init__(
        self,
        cache: KvCache,
        num_heads: int,
        compute: torch.dtype,
        windows: Sequence[int | None] = (),
    ) -> None:
        """windows  per layer, in tokens, None: full attention; empty: full in every layer"""
        shape = cache.shape
        self._cache = cache
        self._num_kv_heads = shape.num_kv_heads
        self._group = num_heads // shape.num_kv_heads
        self._head_dim = shape.head_dim
        self._scale = shape.head_dim**-0.5
        # a CPU has no arithmetic in half precision
        narrow = shape.dtype == torch.float16 and compute != torch.float16
        alone = self._group == 1 and not narrow
        windows = windows or (None,) * shape.num_layers
        different = tuple(dict.fromkeys(windows))
        self._view_of_layer = [different.index(window) for window in windows]
        self.mask_formats = MaskFormats(
            compute, shape.dtype if alone else compute, alone, different
        )
        self._buffers: dict[str, Tensor] = {}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, step: PackedStep) -> Tensor:
        """Store the step's keys and values, then attend over all positions up to each row.

        q        shape (rows, heads, head_dim); k, v: shape (rows, kv_heads, head_dim)
        returns  shape (rows, heads * head_dim)
        """
        self._cache.write(layer, k, v, step.slots)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        view = step.views[self._view_of_layer[layer]]
        for prompt in view.prompts:
            rows = slice(prompt.start, prompt.stop)
            out[rows] = self._prompt(layer, q[rows], k[rows], v[rows], prompt)
        for group in view.decodes:
            rows = slice(group.start, group.stop)
            out[rows] = self._decode(layer, q[rows], group)
        return out.view(out.shape[0], -1)

    def _prompt(self, layer: int, q: Tensor, k: Tensor, v: Tensor, prompt: PromptRows) -> Tensor:
        """One sequence's rows over its own keys; result shape (rows, heads, head_dim)."""
        rows, kv_heads, group = q.shape[0], self._num_kv_heads, self._group
        if prompt.page_rows is None:
            keys, values = k.transpose(0, 1), v.transpose(0, 1)
        else:
            keys, values = (
                torch.index_select(pages, 0, prompt.page_rows)
                .view(kv_heads, -1, self._head_dim)[:, : prompt.num_keys]
                .to(q.dtype)
                for pages in self._cache.head_pages(layer)
            )
        # KV heads are SDPA's batch; expand shares each with its query heads without a copy
        shared = (kv_heads, group, keys.shape[1], self._head_dim)
        attended = functional.scaled_dot_product_attention(
            q.view(rows, kv_heads, group, self._head_dim).permute(1, 2, 0, 3),
            keys[:, None].expand(shared),
            values[:, None].expand(shared),
            attn_mask=prompt.bias,
            is_causal=prompt.bias is None,
            scale=self._scale,
        )
        return attended.permute(2, 0, 1, 3).reshape(rows, -1, self._head_dim)

    def _decode(self, layer: int, q: Tensor, group: DecodeGroup) -> Tensor:
        """One row per sequence; result shape (sequences, heads, head_dim)."""
        batch, _, context = group.bias.shape
        dtype = group.bias.dtype
        key_pages, value_pages = self._cache.head_pages(layer)
        queries = q.to(dtype).reshape(batch, self._group, self._head_dim)
        scores = self._buffer("scores", (batch, self._group, context), dtype)
        keys = self._gather(key_pages, group, dtype)
        torch.baddbmm(group.bias, queries, keys.transpose(1, 2), alpha=self._scale, out=scores)
        weights = torch.softmax(scores, dim=-1)
        if group.value_rows is None:
            attended = torch.bmm(weights, self._gather(value_pages, group, dtype))
        else:  # a weighted sum of indexed rows, without a copy of the values
            attended = functional.embedding_bag(
                group.value_rows,
                value_pages.view(-1, self._head_dim),
                per_sample_weights=weights.view(batch, context),
                mode="sum",
            )
        return attended.view(q.shape).to(q.dtype)

    def _gather(self, pages: Tensor, group: DecodeGroup, dtype: torch.dtype) -> Tensor:
        """A group's keys or values, shape (sequences * kv_heads, context, head_dim)."""
        size = (group.page_rows.shape[0], *pages.shape[1:])
        gathered = self._buffer("pages", size, pages.dtype)
        torch.index_select(pages, 0, group.page_rows, out=gathered)
        if pages.dtype != dtype:
            gathered = self._buffer("wide_pages", size, dtype).copy_(gathered)
        batch, _, context = group.bias.shape
        return gathered.view(batch, context, self._head_dim)

    def _buffer(self, name: str, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Part of a buffer that only grows: new memory costs a page fault every 4 KiB."""
        count = math.prod(size)
        held = self._buffers.get(name)
        if held is None or held.numel() < count:
            held = torch.empty(count, dtype=dtype, device=self._cache.keys[0].device)
            self._buffers[name] = held
        return held[:count].view(size)
