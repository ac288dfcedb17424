"""Which adapter a request asks for: drawn by the seed, in exact shares."""

import heapq
import random
from collections.abc import Iterator, Mapping
from itertools import count

from lmi_bench.core.workload import PlannedRequest


class AdapterDraw:
    """Gives each request its adapter, and every turn of a conversation that of the first.

    Each adapter has a moment somewhere in each of its periods of 1 / share; the adapters in the
    order of all moments are the sequence. So the first n requests hold each adapter exactly n times
    its share where that is a whole number for all, and otherwise hardly one more or less.

    shares  by name, relative to each other
    """

    def __init__(self, shares: Mapping[str, float], seed: int) -> None:
        total = sum(shares.values())
        self._names = tuple(shares)
        self._drawn: list[str] = []
        self._next = heapq.merge(*(_moments(name, share / total, seed) for name, share in shares.items()))

    def __call__(self, request: PlannedRequest) -> str:
        """The adapter of a request; the warm-up asks for one after the other."""
        number = request.request_id if request.session is None else request.session
        if number < 0:
            return self._names[(-1 - number) % len(self._names)]
        while number >= len(self._drawn):
            self._drawn.append(next(self._next)[1])
        return self._drawn[number]


def _moments(name: str, share: float, seed: int) -> Iterator[tuple[float, str]]:
    draw = random.Random(f"{seed}/adapter {name}")
    return (((period + draw.random()) / share, name) for period in count())
