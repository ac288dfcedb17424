"""Routing policies: choose the replica for each request.

A policy sees only each replica's number of outstanding requests.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Protocol


class Router(Protocol):
    """Picks a replica for each request in turn."""

    def pick(self, outstanding: Sequence[int]) -> int:
        """The replica for the next request; `outstanding` has one count per replica."""
        ...


class RoundRobin:
    """One replica after the other, regardless of load."""

    def __init__(self) -> None:
        self._next = 0

    def pick(self, outstanding: Sequence[int]) -> int:
        replica = self._next % len(outstanding)
        self._next = replica + 1
        return replica


class RandomChoice:
    """Any replica with equal probability; `draws` are independent and uniform in [0, 1)."""

    def __init__(self, draws: Iterator[float]) -> None:
        self._draws = draws

    def pick(self, outstanding: Sequence[int]) -> int:
        return int(next(self._draws) * len(outstanding))


class LeastOutstanding:
    """The replica with the fewest outstanding requests; the first one on a tie."""

    def pick(self, outstanding: Sequence[int]) -> int:
        return min(range(len(outstanding)), key=outstanding.__getitem__)


def make_router(name: str, seed: int = 0) -> Router:
    """The router called round_robin, least_outstanding or random (hyphens are accepted, too)."""
    match name.replace("-", "_"):
        case "least_outstanding":
            return LeastOutstanding()
        case "random":
            return RandomChoice(iter(random.Random(seed).random, None))
    return RoundRobin()
