"""How much of the prompts is the same text at their beginning: what a prefix cache could find."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """In units of the prompts' own elements.

    common    length of the longest beginning that at least half of the prompts have
    repeated  share (0 to 1) of all prompt text that repeats the beginning of another prompt: what
              a cache without end would find again
    """

    common: int
    repeated: float


def shared_prefix(prompts: Sequence[str]) -> SharedPrefix:
    """Of prompts as texts.

    In sorted order what a text shares with all others it shares most with its neighbour, so the
    whole text less the sum over neighbours is the size of their tree.

    >>> shared_prefix(["system a", "system b", "other"])
    SharedPrefix(common=7, repeated=0.3333333333333333)
    """
    ordered = sorted(prompts)
    whole = sum(map(len, ordered))
    if len(ordered) < 2 or not whole:
        return SharedPrefix(0, 0.0)
    half = -(-len(ordered) // 2)
    half = max(2, half)
    common = max(
        _common(ordered[first], ordered[first + half - 1])
        for first in range(len(ordered) - half + 1)
    )
    repeated = sum(_common(before, after) for before, after in pairwise(ordered))
    return SharedPrefix(common, repeated / whole)


def _common(one: str, other: str) -> int:
    """Length of the beginning that both have; halved until it is found, since texts are long."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[:middle] == other[:middle] else (low, middle - 1)
    return low
