"""Statistics of finished requests: finish reasons, and histograms of latencies and lengths.

A request is counted when it ends, for any reason. Times are measured in the engine, without the
network.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise

from lmi_bench.engine.async_engine import Generation

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


class RequestTotals:
    """Counts since the server started. `finished` has vLLM's names of the reasons."""

    def __init__(self) -> None:
        self.finished: Counter[str] = Counter()
        self.first_token_s = Histogram(SECONDS_BOUNDS)
        self.inter_token_s = Histogram(SECONDS_BOUNDS)
        self.end_to_end_s = Histogram(SECONDS_BOUNDS)
        self.queue_s = Histogram(SECONDS_BOUNDS)
        self.prefill_s = Histogram(SECONDS_BOUNDS)
        self.decode_s = Histogram(SECONDS_BOUNDS)
        self.prompt_tokens = Histogram(TOKENS_BOUNDS)
        self.generation_tokens = Histogram(TOKENS_BOUNDS)

    def add(self, generation: Generation, reason: str, num_prompt_tokens: int) -> None:
        """Add a finished request; one that never ran has only an end-to-end latency."""
        self.finished[reason] += 1
        self.prompt_tokens.observe(num_prompt_tokens)
        self.generation_tokens.observe(sum(len(event.token_ids) for event in generation.events))
        submitted_s, scheduled_s = generation.submitted_s, generation.first_scheduled_s
        first_s, finished_s = generation.first_token_s, generation.finished_s
        if finished_s is not None:
            self.end_to_end_s.observe(finished_s - submitted_s)
        if scheduled_s is None:
            return
        self.queue_s.observe(scheduled_s - submitted_s)
        if first_s is None or finished_s is None:
            return
        self.first_token_s.observe(first_s - submitted_s)
        self.prefill_s.observe(first_s - scheduled_s)
        self.decode_s.observe(finished_s - first_s)
        for earlier, later in pairwise(generation.events):
            self.inter_token_s.observe(later.time_s - earlier.time_s)
