"""Prefix-cache hits of one copy's share of a fleet's requests, to plan with before simulating.

The cache evicts the least recently used blocks of `UNIT` tokens, over requests in order of arrival:
the blocks of running sequences are the last used, so the whole KV cache counts. `simulator` runs
the engine's own prefix cache instead, for the fleets that are best
(`tests/analysis/level/test_prefix_hits.py` compares them).
"""

import random
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, count

from lmi_bench.core.workload import PlannedRequest
from lmi_bench.engine.scheduling.prefix_cache import block_digest

UNIT = 64
_REQUESTS, _LEAST_OF_A_COPY = 2400, 300
_COLD = 0.25  # share of the requests that fill the cache first
_NEIGHBOURS = 2  # requests that are taken to run together: what they share is held once

Requests = Callable[[int], PlannedRequest]
CachedLengths = tuple[int, int, int]
"""Prompt tokens, output tokens, and prompt tokens found in the cache."""
_Digested = tuple[int, int, tuple[bytes, ...]]
"""Prompt tokens, output tokens, and the digests of a request's blocks, those of the answer last."""


@dataclass(frozen=True, slots=True, eq=False)
class PrefixTraffic:
    """Requests whose token ids tell what their prompts have in common.

    at          the request of a number at a rate of so many a second and a seed, with its arrival
    rate_per_s  of the whole fleet; None: of one copy, at its capacity
    keeps       whether the router sends a prompt where its beginning is cached
    """

    at: Callable[[float, int], Requests]
    rate_per_s: float | None = None
    keeps: bool = False
    _known: dict[tuple[float, int], list[_Digested]] = field(init=False, repr=False, default_factory=dict)

    def of_copy(self, rate_per_s: float, copies: int, seed: int) -> Requests:
        """The requests that one of so many copies gets, `rate_per_s` a copy.

        Those of a router that knows no prompts are drawn at random.
        """
        if self.keeps or copies == 1:
            return self.at(rate_per_s, seed)
        whole, draw = self.at(rate_per_s * copies, seed), random.Random(seed)
        numbers = (number for number in count() if draw.random() * copies < 1)
        mine: list[int] = []

        def request(number: int) -> PlannedRequest:
            while len(mine) <= number:
                mine.append(next(numbers))
            return replace(whole(mine[number]), request_id=number)

        return request

    def lengths(self, rate_per_s: float, copies: int, cache_tokens: float) -> list[CachedLengths]:
        """Requests of a copy with what its cache holds of them, once it is warm."""
        return _replayed(self._digested(rate_per_s, copies), cache_tokens)

    def shared_tokens(self, rate_per_s: float, copies: int) -> int:
        """Mean tokens that a prompt has in common with the requests just before it."""
        stream = self._digested(rate_per_s, copies)
        mean = sum(prompt + output for prompt, output, _ in stream) / len(stream)
        found = _replayed(stream, _NEIGHBOURS * mean)
        return round(sum(cached for _, _, cached in found) / len(found))

    def _digested(self, rate_per_s: float, copies: int) -> list[_Digested]:
        key = float(f"{rate_per_s:.2g}"), copies
        if key not in self._known:
            request = self.of_copy(*key, seed=0)
            number = max(_LEAST_OF_A_COPY, _REQUESTS // copies)
            self._known[key] = [_digested(request(place)) for place in range(number)]
        return self._known[key]


def _digested(request: PlannedRequest) -> _Digested:
    ids = [*request.prompt_token_ids, *[0] * (request.output_tokens - 1)]
    blocks = (ids[end - UNIT : end] for end in range(UNIT, len(ids) + 1, UNIT))
    digests = tuple(accumulate(blocks, block_digest, initial=b""))[1:]
    return request.input_tokens, request.output_tokens, digests


def _replayed(stream: Sequence[_Digested], cache_tokens: float) -> list[CachedLengths]:
    cache: OrderedDict[bytes, None] = OrderedDict()
    found = []
    for prompt, output, digests in stream:
        most, hits = (prompt - 1) // UNIT, 0
        while hits < most and digests[hits] in cache:
            hits += 1
        found.append((prompt, output, hits * UNIT))
        for digest in reversed(digests):  # a tail is evicted before its head
            cache[digest] = None
            cache.move_to_end(digest)
        while len(cache) * UNIT > cache_tokens:
            cache.popitem(last=False)
    return found[int(_COLD * len(found)) :]
