"""Which replica answers a request: routing rules over what a router can see.

A rule sees the number of unanswered requests of each replica and nothing else. Chance comes from
outside.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol


class Router(Protocol):
    """Picks a replica for each request in turn."""

    def pick(self, outstanding: Sequence[int]) -> int:
        """The replica of the next request; `outstanding` has one count a replica."""
        ...


class RoundRobin:
    """One replica after the other, however busy they are."""

    def __init__(self) -> None:
        self._next = 0

    def pick(self, outstanding: Sequence[int]) -> int:
        """The replica after the last one."""
        replica = self._next % len(outstanding)
        self._next = replica + 1
        return replica


class RandomChoice:
    """Any replica with equal chance; `draws` are independent and uniform over [0, 1)."""

    def __init__(self, draws: Iterator[float]) -> None:
        self._draws = draws

    def pick(self, outstanding: Sequence[int]) -> int:
        """The replica on which the next draw falls."""
        return int(next(self._draws) * len(outstanding))


class LeastOutstanding:
    """The replica with the fewest unanswered requests, the first of them on a tie."""

    def pick(self, outstanding: Sequence[int]) -> int:
        """The least busy replica."""
        return min(range(len(outstanding)), key=outstanding.__getitem__)
