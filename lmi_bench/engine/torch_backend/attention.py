"""Packs a step's sequences into rows, and computes their causal attention over the paged cache.

All rows are concatenated into one matrix, so every linear layer runs once per step. Sequences with
several rows (prompts, chunks, drafts to verify) come first; those with one row (decoding) come
last, sorted by context length, so that neighbours share one gather with little padding. Layers with
a sliding window get their own view, with only the pages within it.

Prompt rows use torch's scaled_dot_product_attention, which is built for many queries. A decode
row has one query, for which SDPA on a CPU is 5 to 10 times slower than plain matrix products: its
pages are gathered into reused buffers and multiplied as one batch.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from lmi_bench.engine.torch_backend.kv_cache import KvCache, KvLayoutShape, head_page_rows, slots_of
from lmi_bench.engine.torch_backend.models.decoder import Decoder

_GATHER_BYTES: Final = 16 << 20  # limit of keys gathered at once, a few times a core's L2 cache
_WINDOW_ROWS: Final = 256  # minimum rows of a prompt that share the keys of their windows
_MASKED: Final = -1e30


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """One sequence's part of a step, with its token ids and whole block table.

    sampled  number of last rows whose logits are needed: 0, 1, or 1 + draft tokens
    """

    token_ids: Sequence[int]
    first_position: int
    block_table: Sequence[int]
    sampled: int

    @property
    def context_tokens(self) -> int:
        """Tokens in the cache after this step."""
        return self.first_position + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Rows of one sequence, which read only their own keys, or cached ones.

    page_rows  for cached keys: the pages of every head, shape (kv_heads * pages,)
    bias       with `page_rows`: added to the scores, shape (rows, keys read); 0, or very low if a
               key is later or outside the window
    """

    rows: slice
    page_rows: Tensor | None = None
    bias: Tensor | None = None


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Rows, one per sequence, whose pages are gathered together.

    page_rows  shape (sequences * kv_heads * pages,), short tables padded
    bias       added to the scores, shape (sequences * kv_heads, 1, pages * block_size)
    """

    rows: slice
    page_rows: Tensor
    bias: Tensor


@dataclass(frozen=True, slots=True)
class PackedStep:
    """The rows of one step on the device.

    token_ids, positions  shape (rows,)
    contexts              tokens of each row's sequence after this step, shape (rows,)
    slots                 cache slots for each row's keys and values, shape (rows * kv_heads,)
    prompts, decodes      the keys that each row reads, for each of the layers' distinct windows
    sampled_rows          rows whose logits are needed, in the order of the given sequences
    """

    token_ids: Tensor
    positions: Tensor
    contexts: Tensor
    slots: Tensor
    prompts: tuple[tuple[PromptRows, ...], ...]
    decodes: tuple[tuple[DecodeGroup, ...], ...]
    sampled_rows: Tensor


@dataclass(frozen=True, slots=True)
class _Packer:
    """Finds a step's keys for the layers with one window, in tokens; None: full attention."""

    shape: KvLayoutShape
    dtype: torch.dtype
    window: int | None
    device: torch.device

    def prompt_rows(self, rows: SequenceRows, stop: int) -> Iterator[PromptRows]:
        """One sequence's rows; split if a window would leave most of a long mask empty."""
        window, device, size = self.window, self.device, self.shape.block_size
        everything = window is None or rows.context_tokens <= window
        if everything and rows.first_position == 0:
            yield PromptRows(slice(stop - len(rows.token_ids), stop))
            return
        length = len(rows.token_ids) if everything else max(window or 0, _WINDOW_ROWS)
        for first in range(rows.first_position, rows.context_tokens, length):
            end = min(first + length, rows.context_tokens)
            first_page, stop_page = self._pages_seen(first + 1, end)
            table = torch.tensor([list(rows.block_table[first_page:stop_page])], device=device)
            keys = torch.arange(first_page * size, end, device=device)
            queries = torch.arange(first, end, device=device)[:, None]
            before = stop - rows.context_tokens
            page_rows = head_page_rows(table, self.shape.num_kv_heads)
            bias = mask_bias(keys, queries, window, self.dtype)
            yield PromptRows(slice(before + first, before + end), page_rows, bias)

    def decode_groups(self, single: Sequence[SequenceRows], first_row: int) -> Iterator[DecodeGroup]:
        """Split decode rows so that each group's gathered keys, with padding, stay in the limit."""
        page_bytes = self.shape.page_bytes
        members: list[tuple[SequenceRows, int, int]] = []
        widest = 0
        for rows in single:
            first, stop = self._pages_seen(rows.context_tokens, rows.context_tokens)
            widest = max(widest, stop - first)
            if members and (len(members) + 1) * widest * page_bytes > _GATHER_BYTES:
                yield self._decode_group(members, first_row)
                first_row += len(members)
                members, widest = [], stop - first
            members.append((rows, first, stop))
        if members:
            yield self._decode_group(members, first_row)

    def _decode_group(self, members: Sequence[tuple[SequenceRows, int, int]], start: int) -> DecodeGroup:
        """One group from its sequences, each with the range of its pages."""
        size, kv_heads, device = self.shape.block_size, self.shape.num_kv_heads, self.device
        pages = max(stop - first for _, first, stop in members)
        tables, positions = [], []
        for rows, first, stop in members:
            used = list(rows.block_table[first:stop])
            tables.append(used + used[:1] * (pages - len(used)))  # padding: any page, masked below
            positions.append(rows.context_tokens - 1 - first * size)  # from its first page's first token
        page_rows = head_page_rows(torch.tensor(tables, device=device), kv_heads)
        keys, queries = torch.arange(pages * size, device=device), torch.tensor(positions, device=device)
        bias = mask_bias(keys, queries[:, None], self.window, self.dtype).repeat_interleave(kv_heads, dim=0)
        return DecodeGroup(slice(start, start + len(members)), page_rows, bias[:, None])

    def _pages_seen(self, first_context: int, last_context: int) -> tuple[int, int]:
        """Page range seen by rows whose contexts (including the row) are first..last tokens."""
        first_key = 0 if self.window is None else max(0, first_context - self.window)
        return first_key // self.shape.block_size, -(-last_context // self.shape.block_size)


def mask_bias(keys: Tensor, queries: Tensor, window: int | None, dtype: torch.dtype) -> Tensor:
    """A mask to add to the scores of these positions: 0, or where a key is later than the query or
    outside its window very low but finite in that format, so that a softmax never gives NaN.

    keys  shape (keys,); queries: shape (rows, 1)
    """
    unseen = keys > queries
    if window is not None:
        unseen = unseen | (keys <= queries - window)
    bias = torch.zeros(unseen.shape, dtype=dtype, device=unseen.device)
    return bias.masked_fill_(unseen, max(_MASKED, torch.finfo(dtype).min))


class PagedAttention:
    """Attention of every layer of one model over one cache: softmax(scale * q k) v, where scores
    may be capped, cap * tanh(scores / cap), and a sink of a head adds exp(sink) to the sum that
    divides its weights. It computes in the model's compute format.
    """

    def __init__(self, cache: KvCache, model: Decoder) -> None:
        shape, spec = cache.shape, model.spec
        self._cache = cache
        self._num_kv_heads = shape.num_kv_heads
        self._group = spec.num_heads // shape.num_kv_heads
        self._head_dim = shape.head_dim
        self._scale = spec.score_scale
        self._cap = spec.score_cap
        self._sinks = [layer.attention.sinks for layer in model.layers]
        windows, dtype, device = [*dict.fromkeys(spec.windows)], model.precision.compute, cache.keys[0].device
        self._packers = [_Packer(shape, dtype, window, device) for window in windows]
        self._window_of_layer = [windows.index(window) for window in spec.windows]
        self._buffers: dict[str, Tensor] = {}
        if device.type == "cuda":  # its plan for each new length of a prompt takes 50 ms
            torch.backends.cuda.enable_cudnn_sdp(False)

    def pack(self, sequences: Sequence[SequenceRows]) -> PackedStep:
        """Pack one step; `sampled_rows` keeps the order of `sequences`."""
        shape, device, packers = self._cache.shape, self._cache.keys[0].device, self._packers
        several = [i for i, rows in enumerate(sequences) if len(rows.token_ids) > 1]
        single = [i for i, rows in enumerate(sequences) if len(rows.token_ids) == 1]
        single.sort(key=lambda i: sequences[i].first_position)

        token_ids: list[int] = []
        positions: list[int] = []
        contexts: list[int] = []
        blocks: list[int] = []
        end_rows = [0] * len(sequences)
        for i in several + single:
            rows = sequences[i]
            token_ids.extend(rows.token_ids)
            span = range(rows.first_position, rows.context_tokens)
            positions.extend(span)
            contexts.extend([rows.context_tokens] * len(span))
            table = rows.block_table
            blocks.extend(table[position // shape.block_size] for position in span)
            end_rows[i] = len(token_ids)
        sampled_rows = [
            row for i, rows in enumerate(sequences) for row in range(end_rows[i] - rows.sampled, end_rows[i])
        ]

        position_rows = torch.tensor(positions, device=device)
        prompts = [(sequences[i], end_rows[i]) for i in several]
        decodes = [sequences[i] for i in single]
        return PackedStep(
            token_ids=torch.tensor(token_ids, device=device),
            positions=position_rows,
            contexts=torch.tensor(contexts, device=device),
            slots=slots_of(torch.tensor(blocks, device=device), position_rows % shape.block_size, shape),
            prompts=tuple(tuple(part for each in prompts for part in packer.prompt_rows(*each)) for packer in packers),
            decodes=tuple(tuple(packer.decode_groups(decodes, len(token_ids) - len(decodes))) for packer in packers),
            sampled_rows=torch.tensor(sampled_rows, dtype=torch.int64, device=device),
        )

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, step: PackedStep) -> Tensor:
        """Store the step's keys and values, then attend over all positions up to each row.

        q        shape (rows, heads, head_dim); k, v: shape (rows, kv_heads, head_dim)
        returns  shape (rows, heads * head_dim)
        """
        self._cache.write(layer, k, v, step.slots)
        return self.stored(layer, q, k, v, step)

    def stored(self, layer: int, q: Tensor, k: Tensor, v: Tensor, step: PackedStep) -> Tensor:
        """The same, with keys and values that are in the cache already."""
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        window = self._window_of_layer[layer]
        for prompt in step.prompts[window]:
            rows = prompt.rows
            out[rows] = self._prompt(layer, q[rows], k[rows], v[rows], prompt)
        for group in step.decodes[window]:
            out[group.rows] = self._decode(layer, q[group.rows], group)
        return out.view(out.shape[0], -1)

    def _prompt(self, layer: int, q: Tensor, k: Tensor, v: Tensor, prompt: PromptRows) -> Tensor:
        """One sequence's rows over its own keys; result shape (rows, heads, head_dim)."""
        rows, kv_heads, group, bias = q.shape[0], self._num_kv_heads, self._group, prompt.bias
        if prompt.page_rows is None or bias is None:  # as rounded as later steps find them in the cache
            shape = self._cache.shape
            keys, values = (shape.stored(x).view(shape.dtype).to(q.dtype).transpose(0, 1) for x in (k, v))
        else:
            keys, values = (
                torch.index_select(pages, 0, prompt.page_rows)
                .view(self._cache.shape.dtype)
                .view(kv_heads, -1, self._head_dim)[:, : bias.shape[1]]
                .to(q.dtype)
                for pages in self._cache.head_pages(layer)
            )
        # SDPA has no form for these; the scores of all heads at once would take much memory
        if self._cap or self._sinks[layer] is not None:
            grouped = q.view(rows, kv_heads, group, -1)
            if bias is None:
                own = torch.arange(rows, device=q.device)
                bias = mask_bias(own, own[:, None], None, q.dtype)
            weights = (
                self._weights(layer, grouped[:, h] @ keys[h].T * self._scale, bias[:, None], h) for h in range(kv_heads)
            )
            return torch.cat([part @ values[head] for head, part in enumerate(weights)], dim=1)
        # KV heads are SDPA's batch; expand shares each with its query heads without a copy
        shared = (kv_heads, group, keys.shape[1], self._head_dim)
        keys, values = keys[:, None].expand(shared), values[:, None].expand(shared)
        if q.is_cuda and bias is not None:
            # under a mask, torch 2.11 reads shared keys wrongly where their number is
            # 32 n + 1 (pytorch/pytorch issue 191937)
            keys, values = keys.contiguous(), values.contiguous()
        attended = functional.scaled_dot_product_attention(
            q.view(rows, kv_heads, group, self._head_dim).permute(1, 2, 0, 3),
            keys,
            values,
            attn_mask=bias,
            is_causal=bias is None,
            scale=self._scale,
        )
        return attended.permute(2, 0, 1, 3).reshape(rows, -1, self._head_dim)

    def _weights(self, layer: int, scores: Tensor, bias: Tensor, head: int | None) -> Tensor:
        """Weights of scores, which are capped before the bias is added, in the order (rows of
        `head`, group, keys), or with None (sequences of all KV heads, group, keys)."""
        if self._cap:
            scores = torch.tanh(scores / self._cap) * self._cap
        scores, sinks = scores + bias, self._sinks[layer]
        if sinks is None:
            return torch.softmax(scores, dim=-1)
        heads = slice(None) if head is None else slice(head, head + 1)
        sink = sinks.view(self._num_kv_heads, self._group, 1)[heads].to(scores.dtype)
        sink = sink.repeat(len(scores) // len(sink), 1, 1)
        return torch.softmax(torch.cat((scores, sink), dim=-1), dim=-1)[..., :-1].contiguous()

    def _decode(self, layer: int, q: Tensor, group: DecodeGroup) -> Tensor:
        """One row per sequence; result shape (sequences, heads, head_dim)."""
        batch, _, context = group.bias.shape
        dtype = group.bias.dtype
        key_pages, value_pages = self._cache.head_pages(layer)
        queries = q.to(dtype).reshape(batch, self._group, self._head_dim)
        scores = self._buffer("scores", (batch, self._group, context), dtype)
        keys = self._gather(key_pages, group, dtype)
        plain, keys = not self._cap and self._sinks[layer] is None, keys.transpose(1, 2)
        bias, beta = group.bias, int(plain)
        torch.baddbmm(bias, queries, keys, beta=beta, alpha=self._scale, out=scores)
        weights = torch.softmax(scores, -1) if plain else self._weights(layer, scores, bias, None)
        attended = torch.bmm(weights, self._gather(value_pages, group, dtype))
        return attended.view(q.shape).to(q.dtype)

    def _gather(self, pages: Tensor, group: DecodeGroup, dtype: torch.dtype) -> Tensor:
        """A group's keys or values, shape (sequences * kv_heads, context, head_dim)."""
        size = (group.page_rows.shape[0], *pages.shape[1:])
        gathered = self._buffer("pages", size, pages.dtype)
        torch.index_select(pages, 0, group.page_rows, out=gathered)
        gathered = gathered.view(self._cache.shape.dtype)
        if gathered.dtype != dtype:
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
