"""Shapes that a decode step is compiled or captured for, and which of them a step is run in.

A compiled or captured step has fixed sizes. A step of any other size is padded to the cheapest
shape that covers it, so nothing is ever compiled anew while requests wait; a step that no shape
covers, and every step with a prompt in it, runs as if there were none.
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
    """So many decoding sequences, each of at most so many tokens of context, itself included."""

    sequences: int
    context_tokens: int

    def __post_init__(self) -> None:
        if self.sequences < 1 or self.context_tokens < 1:
            raise InputError(f"shape {self}: both numbers must be at least 1")

    def __str__(self) -> str:
        return f"{self.sequences}x{self.context_tokens}"

    def covers(self, sequences: int, context_tokens: int) -> bool:
        """Whether a step of that size can be padded to this one."""
        return sequences <= self.sequences and context_tokens <= self.context_tokens


def parse_shapes(text: str) -> tuple[StaticShape, ...]:
    """`1x512,8x512`: SEQUENCESxTOKENS, separated by commas; InputError for anything else."""
    found = []
    for part in text.split(","):
        match = _SHAPE.fullmatch(part.strip())
        if match is None:
            raise InputError(f"shape {part.strip()!r}: write SEQUENCESxTOKENS, such as 1x512,8x512")
        found.append(StaticShape(int(match[1]), int(match[2])))
    return tuple(sorted(set(found)))


def default_shapes(*, max_tokens: int, block_size: int) -> tuple[StaticShape, ...]:
    """For compiled steps, which read a context padded to its shape's length: few sequences to
    many, each at a quarter and the whole of what fits."""
    longest = rounded_up(max_tokens, block_size)
    contexts = sorted({rounded_up(-(-longest // 4), block_size), longest})
    return tuple(
        StaticShape(sequences, context) for sequences in _DEFAULT_SEQUENCES for context in contexts
    )


def graph_shapes(*, most_sequences: int, max_tokens: int) -> tuple[StaticShape, ...]:
    """For captured steps whose attention reads no padding: one context, sequences in buckets."""
    buckets = [n for n in _GRAPH_SEQUENCES if n < most_sequences]
    buckets.append(min(most_sequences, _GRAPH_SEQUENCES[-1]))
    return tuple(StaticShape(sequences, max_tokens) for sequences in buckets)


def fitted(
    shapes: Iterable[StaticShape], *, max_tokens: int, block_size: int
) -> tuple[StaticShape, ...]:
    """Shapes in whole blocks; InputError for one that is longer than what a sequence may be."""
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
    """Those of the shapes that a sequence can fill: an artefact may have longer ones."""
    longest = rounded_up(max_tokens, block_size)
    return tuple(sorted(shape for shape in shapes if shape.context_tokens <= longest))


def rounded_up(tokens: int, block_size: int) -> int:
    """The least whole number of blocks that holds so many tokens, in tokens."""
    return -(-tokens // block_size) * block_size


def covering(
    shapes: Sequence[StaticShape], sequences: int, context_tokens: int
) -> StaticShape | None:
    """The shape with the fewest padded tokens that holds the step; None where none does."""
    possible = [shape for shape in shapes if shape.covers(sequences, context_tokens)]
    return min(
        possible, key=lambda shape: (shape.sequences * shape.context_tokens, shape), default=None
    )
