"""Shapes for compiled or captured decode steps, and the choice of a step's shape.

A compiled or captured step has fixed sizes. A step of another size is padded to the cheapest shape
that covers it, so nothing is compiled while requests wait; a step that no shape covers, and every
step with a prompt, runs eagerly.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from lmi_bench.core.errors import InputError

_SHAPE: Final = re.compile(r"([0-9]+)x([0-9]+)")
_DEFAULT_SEQUENCES: Final = (1, 4, 16)
_GRAPH_SEQUENCES: Final = (1, 2, 4, 8, *range(16, 257, 16))


@dataclass(frozen=True, slots=True, order=True)
class StaticShape:
    """Number of decoding sequences, and their maximum context including the new token."""

    sequences: int
    context_tokens: int

    def __post_init__(self) -> None:
        if self.sequences < 1 or self.context_tokens < 1:
            raise InputError(f"shape {self}: both numbers must be at least 1")

    def __str__(self) -> str:
        return f"{self.sequences}x{self.context_tokens}"

    def covers(self, sequences: int, context_tokens: int) -> bool:
        """True if a step of this size can be padded to the shape."""
        return sequences <= self.sequences and context_tokens <= self.context_tokens


def parse_shapes(text: str) -> tuple[StaticShape, ...]:
    """Parse `1x512,8x512`: SEQUENCESxTOKENS, comma-separated; raises InputError otherwise."""
    found = []
    for part in text.split(","):
        match = _SHAPE.fullmatch(part.strip())
        if match is None:
            raise InputError(f"shape {part.strip()!r}: write SEQUENCESxTOKENS, such as 1x512,8x512")
        found.append(StaticShape(int(match[1]), int(match[2])))
    return tuple(sorted(set(found)))


def default_shapes(*, max_tokens: int, block_size: int) -> tuple[StaticShape, ...]:
    """Shapes for compiled steps, which read padded contexts: 1, 4 and 16 sequences, each with a
    quarter and all of the maximum length."""
    longest = rounded_up(max_tokens, block_size)
    contexts = sorted({rounded_up(-(-longest // 4), block_size), longest})
    return tuple(
        StaticShape(sequences, context) for sequences in _DEFAULT_SEQUENCES for context in contexts
    )


def graph_shapes(*, most_sequences: int, max_tokens: int) -> tuple[StaticShape, ...]:
    """Shapes for captured steps whose attention reads no padding: one context length, several
    batch sizes."""
    buckets = [n for n in _GRAPH_SEQUENCES if n < most_sequences]
    buckets.append(min(most_sequences, _GRAPH_SEQUENCES[-1]))
    return tuple(StaticShape(sequences, max_tokens) for sequences in buckets)


def fitted(
    shapes: Iterable[StaticShape], *, max_tokens: int, block_size: int
) -> tuple[StaticShape, ...]:
    """Round shapes up to whole blocks; raises InputError if one exceeds the maximum length."""
    whole = set()
    for shape in shapes:
        if shape.context_tokens > rounded_up(max_tokens, block_size):
            raise InputError(
                f"shape {shape}: a sequence has at most {max_tokens:,} tokens here; lower the "
                "second number, or raise the model's length or the cache"
            )
        whole.add(StaticShape(shape.sequences, rounded_up(shape.context_tokens, block_size)))
    return tuple(sorted(whole))


def fitting(
    shapes: Iterable[StaticShape], *, max_tokens: int, block_size: int
) -> tuple[StaticShape, ...]:
    """The shapes within the maximum length: an artefact may have longer ones."""
    longest = rounded_up(max_tokens, block_size)
    return tuple(sorted(shape for shape in shapes if shape.context_tokens <= longest))


def rounded_up(tokens: int, block_size: int) -> int:
    """Round `tokens` up to a multiple of the block size."""
    return -(-tokens // block_size) * block_size


def covering(
    shapes: Sequence[StaticShape], sequences: int, context_tokens: int
) -> StaticShape | None:
    """The shape with the fewest padded tokens that covers the step; None if none does."""
    possible = [shape for shape in shapes if shape.covers(sequences, context_tokens)]
    return min(
        possible, key=lambda shape: (shape.sequences * shape.context_tokens, shape), default=None
    )
