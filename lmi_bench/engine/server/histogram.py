"""A Prometheus histogram: counts observations at or below each bound."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

# 1-2-5 steps from 1 ms to 500 s; powers of two up to 128 Ki tokens
SECONDS_BOUNDS = tuple(float(f"{step}e{power}") for power in range(-3, 3) for step in (1, 2, 5))
TOKENS_BOUNDS = tuple(float(2**power) for power in range(18))


class Histogram:
    """Counts observations by upper bound; the last bucket counts those above all bounds."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value; bounds are inclusive, as in Prometheus."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def samples(self, name: str, label: str) -> Iterator[str]:
        """The sample lines: cumulative buckets, sum and count."""
        total = 0
        bounds = [f"{bound:g}" for bound in self._bounds] + ["+Inf"]
        for bound, count in zip(bounds, self._counts, strict=True):
            total += count
            yield f'{name}_bucket{{{label},le="{bound}"}} {total}'
        yield f"{name}_sum{{{label}}} {self._sum:.10g}"
        yield f"{name}_count{{{label}}} {total}"
