"""Requests whose lengths are drawn from distributions, or read from recorded traffic.

Request n has the same lengths at every level, in every run of the seed; only its words change.
"""

from __future__ import annotations

import random
from dataclasses import replace

from lmi_bench.core.lengths import LengthDistribution, parse_lengths
from lmi_bench.core.scenario import WorkloadSection
from lmi_bench.core.traces import MOONCAKE_BLOCK_TOKENS, Trace, TraceRequest
from lmi_bench.core.workload import LevelSpec, PlannedRequest
from lmi_bench.loadgen.prompts.prompts import Lengths, Part, PromptText, level_place, prefix_parts


def distributions(workload: WorkloadSection) -> tuple[LengthDistribution, LengthDistribution]:
    """Input and output lengths of a workload; fixed where it names no distribution."""
    given = (
        workload.input_lengths or f"fixed({workload.input_tokens})",
        workload.output_lengths or f"fixed({workload.output_tokens})",
    )
    return parse_lengths(given[0]), parse_lengths(given[1])


def mean_lengths(trace: Trace) -> Lengths:
    """Mean lengths of a trace, rounded to tokens."""
    n = len(trace.requests)
    return Lengths(
        round(sum(request.input_tokens for request in trace.requests) / n),
        round(sum(request.output_tokens for request in trace.requests) / n),
    )


class DrawnPrompts:
    """Requests with drawn lengths."""

    def __init__(
        self,
        input_lengths: LengthDistribution,
        output_lengths: LengthDistribution,
        text: PromptText,
        *,
        seed: int,
        salt: str = "",
        ignore_eos: bool = True,
        shared_prefix: int = 0,
    ) -> None:
        self._lengths = (input_lengths, output_lengths)
        self._text = text
        self._seed = seed
        self._salt = salt
        self._ignore_eos = ignore_eos
        self._shared_prefix = shared_prefix

    def request(self, level: LevelSpec, number: int) -> PlannedRequest:
        """Request `number` of a level; negative numbers are its warm-up. Due at 0.0."""
        draw = random.Random(f"{self._seed}/lengths/{number}")
        planned = PlannedRequest(
            request_id=number,
            arrival_s=0.0,
            input_tokens=self._lengths[0].draw(draw),
            output_tokens=self._lengths[1].draw(draw),
            ignore_eos=self._ignore_eos,
        )
        words = random.Random(f"{self._seed}/{self._salt}/{level_place(level)}/{number}")
        shared = prefix_parts(self._shared_prefix, self._seed, self._salt)
        return self._text.fill(planned, words, shared)


class TracePrompts:
    """Requests with a trace's lengths and, at a level of a rate, its times stretched to it."""

    def __init__(
        self,
        trace: Trace,
        text: PromptText,
        *,
        seed: int,
        salt: str = "",
        ignore_eos: bool = True,
        shared_prefix: int = 0,
    ) -> None:
        self._trace = trace
        self._text = text
        self._seed = seed
        self._salt = salt
        self._ignore_eos = ignore_eos
        self._shared_prefix = shared_prefix

    def request(self, level: LevelSpec, number: int) -> PlannedRequest:
        """Request `number` of a level; beyond the trace's end its lengths begin anew."""
        place = number % len(self._trace.requests)
        recorded = self._trace.requests[place]
        planned = PlannedRequest(
            request_id=number,
            arrival_s=0.0,
            input_tokens=recorded.input_tokens,
            output_tokens=recorded.output_tokens,
            ignore_eos=self._ignore_eos,
        )
        if level.rate_per_s is not None and number >= 0:
            planned = replace(planned, arrival_s=self._trace.due_s(place, level.rate_per_s))
        words = random.Random(f"{self._seed}/{self._salt}/{level_place(level)}/{number}")
        return self._text.fill(planned, words, self._shared(level, number, recorded))

    def _shared(self, level: LevelSpec, number: int, recorded: TraceRequest) -> list[Part]:
        """Its recorded blocks: those of one id say the same, at every request of a level."""
        if not recorded.hash_ids or number < 0:
            return prefix_parts(self._shared_prefix, self._seed, self._salt)
        place = f"{self._seed}/{self._salt}/{level_place(level)}"
        return [
            (MOONCAKE_BLOCK_TOKENS, random.Random(f"{place}/block {each}"))
            for each in recorded.hash_ids
        ]
