"""Routing policies: choose the replica for each request.

A policy's `pick` sees each replica's number of outstanding requests, and the prompt.
"""

import random
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence

from lmi_bench.core.errors import InputError
from lmi_bench.engine.scheduling.prefix_cache import block_digest


class RoundRobin:
    """One replica after the other, regardless of load."""

    def __init__(self) -> None:
        self._next = 0

    def pick(self, outstanding: Sequence[int], prompt: Sequence[int] = ()) -> int:
        replica = self._next % len(outstanding)
        self._next = replica + 1
        return replica


class RandomChoice:
    """Any replica with equal probability; `draws` are independent and uniform in [0, 1)."""

    def __init__(self, draws: Iterator[float]) -> None:
        self._draws = draws

    def pick(self, outstanding: Sequence[int], prompt: Sequence[int] = ()) -> int:
        return int(next(self._draws) * len(outstanding))


class LeastOutstanding:
    """The replica with the fewest outstanding requests; the first one on a tie."""

    def pick(self, outstanding: Sequence[int], prompt: Sequence[int] = ()) -> int:
        return min(range(len(outstanding)), key=outstanding.__getitem__)


class PrefixAffine:
    """A replica that got the longest known beginning of the prompt, in blocks of `BLOCK` tokens.

    The least loaded of them; if that has half as many requests again, and `AHEAD` more, than the
    least loaded of all, this one. The beginnings used longest ago are forgotten.
    """

    BLOCK, AHEAD, MOST_BLOCKS = 64, 4, 200_000

    def __init__(self) -> None:
        self._replicas_of: OrderedDict[bytes, int] = OrderedDict()  # a bit for each replica

    def pick(self, outstanding: Sequence[int], prompt: Sequence[int] = ()) -> int:
        digests: list[bytes] = []
        holders, is_known = 0, True
        for end in range(self.BLOCK, len(prompt) + 1, self.BLOCK):
            before = digests[-1] if digests else b""
            digests.append(block_digest(before, prompt[end - self.BLOCK : end]))
            found = self._replicas_of.get(digests[-1], 0) if is_known else 0
            is_known, holders = found != 0, found or holders
        replicas = range(len(outstanding))
        chosen = least = min(replicas, key=outstanding.__getitem__)
        if holders:
            chosen = min(replicas, key=lambda n: (not holders >> n & 1, outstanding[n]))
            if outstanding[chosen] > 1.5 * outstanding[least] + self.AHEAD:
                chosen = least
        for digest in reversed(digests):  # tails are forgotten before heads
            self._replicas_of[digest] = self._replicas_of.pop(digest, 0) | 1 << chosen
        while len(self._replicas_of) > self.MOST_BLOCKS:
            self._replicas_of.popitem(last=False)
        return chosen


Router = RoundRobin | RandomChoice | LeastOutstanding | PrefixAffine


def make_router(name: str, seed: int = 0) -> Router:
    """The router of this name (or with hyphens); raises InputError for another one."""
    known: dict[str, Callable[[], Router]] = {
        "round_robin": RoundRobin,
        "least_outstanding": LeastOutstanding,
        "prefix_affine": PrefixAffine,
        "random": lambda: RandomChoice(iter(random.Random(seed).random, None)),
    }
    if (made := known.get(name.replace("-", "_"))) is None:
        raise InputError(f"--router {name}: use one of {', '.join(known).replace('_', '-')}")
    return made()
