"""Statistics of finished requests: finish reasons, latencies and lengths.

A request is counted when it ends, for any reason. Times are measured in the engine, without the
network.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from lmi_bench.engine.async_engine import Generation
from lmi_bench.engine.server.histogram import SECONDS_BOUNDS, TOKENS_BOUNDS, Histogram


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
