"""One step's sequences packed into rows, and what attention needs to find their pages.

The rows of all sequences stand one after the other in one matrix, so every linear layer runs
once a step whatever the mix. Sequences with several rows (prompts, chunks, drafts to verify)
come first, those with one row (decoding) last and by context length, so that neighbours can
share one gather with little padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from lmi_bench.engine.torch_backend.kv_cache import KvLayoutShape, head_page_rows, slots_of

_GATHER_BYTES: Final = 16 << 20  # most keys gathered at once, a few times a core's second cache
_MASKED: Final = -1e30  # finite, so that no row of a softmax can turn to NaN


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """One sequence's part of a step, with ids known and its whole block table.

    sampled  rows from the end of `token_ids` whose logits are wanted: 0, 1, or 1 + drafted ones
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
class MaskFormats:
    """What attention computes in, and so what its masks come in.

    prompt, decode  of sequences with several rows and with one
    value_rows      whether decoding reads values by token rather than by page
    """

    prompt: torch.dtype
    decode: torch.dtype
    value_rows: bool


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Rows start..stop of one sequence. Behind cached tokens `page_rows` and `bias` are given.

    page_rows  its pages, shape (kv_heads * pages,)
    bias       added to its scores, shape (rows, context): 0, or very low where a key is later
    """

    start: int
    stop: int
    context_tokens: int
    page_rows: Tensor | None = None
    bias: Tensor | None = None


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Rows start..stop, one a sequence, whose pages are gathered together.

    page_rows  shape (sequences * kv_heads * pages,), short tables padded
    bias       added to the scores, shape (sequences * kv_heads, 1, pages * block_size)
    value_rows where each cached token stands, counted in head_dim vectors, shape (sequences *
               kv_heads, pages * block_size); only where MaskFormats asks for it
    """

    start: int
    stop: int
    page_rows: Tensor
    bias: Tensor
    value_rows: Tensor | None


@dataclass(frozen=True, slots=True)
class PackedStep:
    """The rows of one step on the device.

    token_ids, positions  shape (rows,)
    slots                 where each row's keys and values go, shape (rows * kv_heads,)
    sampled_rows          rows whose logits are wanted, in the order of the sequences given
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    prompts: tuple[PromptRows, ...]
    decodes: tuple[DecodeGroup, ...]
    sampled_rows: Tensor


def pack(
    sequences: Sequence[SequenceRows],
    shape: KvLayoutShape,
    formats: MaskFormats,
    device: torch.device,
) -> PackedStep:
    """Lay out one step; `sampled_rows` keeps the order of `sequences` whatever the rows' order."""
    several = [i for i, rows in enumerate(sequences) if len(rows.token_ids) > 1]
    single = [i for i, rows in enumerate(sequences) if len(rows.token_ids) == 1]
    single.sort(key=lambda i: sequences[i].first_position)
    order = several + single

    token_ids: list[int] = []
    positions: list[int] = []
    blocks: list[int] = []
    end_rows = [0] * len(sequences)
    for i in order:
        rows = sequences[i]
        token_ids.extend(rows.token_ids)
        span = range(rows.first_position, rows.context_tokens)
        positions.extend(span)
        table = rows.block_table
        blocks.extend(table[position // shape.block_size] for position in span)
        end_rows[i] = len(token_ids)
    sampled_rows = [
        row
        for i, rows in enumerate(sequences)
        for row in range(end_rows[i] - rows.sampled, end_rows[i])
    ]

    position_rows = torch.tensor(positions, device=device)
    return PackedStep(
        token_ids=torch.tensor(token_ids, device=device),
        positions=position_rows,
        slots=slots_of(
            torch.tensor(blocks, device=device), position_rows % shape.block_size, shape
        ),
        prompts=tuple(
            _prompt_rows(sequences[i], end_rows[i], shape, formats.prompt, device) for i in several
        ),
        decodes=tuple(
            _decode_group(
                [sequences[i] for i in group], end_rows[group[0]] - 1, shape, formats, device
            )
            for group in _groups(single, sequences, shape)
        ),
        sampled_rows=torch.tensor(sampled_rows, dtype=torch.int64, device=device),
    )


def _prompt_rows(
    rows: SequenceRows, stop: int, shape: KvLayoutShape, compute: torch.dtype, device: torch.device
) -> PromptRows:
    start = stop - len(rows.token_ids)
    if rows.first_position == 0:
        return PromptRows(start, stop, rows.context_tokens)
    pages = -(-rows.context_tokens // shape.block_size)
    table = torch.tensor([list(rows.block_table[:pages])], device=device)
    keys = torch.arange(rows.context_tokens, device=device)
    queries = torch.arange(rows.first_position, rows.context_tokens, device=device)
    bias = torch.zeros(len(queries), len(keys), dtype=compute, device=device)
    bias.masked_fill_(keys > queries[:, None], _MASKED)
    page_rows = head_page_rows(table, shape.num_kv_heads)
    return PromptRows(start, stop, rows.context_tokens, page_rows, bias)


def _groups(
    single: list[int], sequences: Sequence[SequenceRows], shape: KvLayoutShape
) -> list[list[int]]:
    """Decode rows cut into runs whose gathered keys, padding included, stay within the limit."""
    page_bytes = shape.bytes_per_block // (2 * shape.num_layers)
    groups: list[list[int]] = []
    for i in single:
        # lengths rise, so the newest member has the most pages
        pages = -(-sequences[i].context_tokens // shape.block_size)
        if groups and (len(groups[-1]) + 1) * pages * page_bytes <= _GATHER_BYTES:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


def _decode_group(
    members: Sequence[SequenceRows],
    start: int,
    shape: KvLayoutShape,
    formats: MaskFormats,
    device: torch.device,
) -> DecodeGroup:
    pages = -(-members[-1].context_tokens // shape.block_size)
    tables = []
    for rows in members:
        used = list(rows.block_table[:pages])
        tables.append(used + used[:1] * (pages - len(used)))  # padding: any page, masked below
    page_rows = head_page_rows(torch.tensor(tables, device=device), shape.num_kv_heads)
    offsets = torch.arange(shape.block_size, device=device)
    contexts = torch.tensor([rows.context_tokens for rows in members], device=device)
    masked = torch.arange(pages * shape.block_size, device=device) >= contexts[:, None]
    bias = torch.zeros(masked.shape, dtype=formats.decode, device=device)
    bias = bias.masked_fill_(masked, _MASKED).repeat_interleave(shape.num_kv_heads, dim=0)
    value_rows = None
    if formats.value_rows:
        value_rows = (page_rows[:, None] * shape.block_size + offsets).view(bias.shape)
    return DecodeGroup(start, start + len(members), page_rows, bias[:, None], value_rows)
