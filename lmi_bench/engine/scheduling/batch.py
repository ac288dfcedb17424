"""The plain values between the scheduler and whatever executes a step.

They hold no sequence, queue or callback, so a batch can be logged, compared or sent to another
process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from lmi_bench.engine.scheduling.sampling import Ranked, SamplingParams
from lmi_bench.engine.scheduling.step_shape import StepShape

LAST_SAMPLED: Final = -1
"""A token id that stands for the token which this sequence's previous step sampled: an executor
that keeps sampled tokens on its device need not wait for the host to read them."""

DRAFTED: Final = -2
"""A token id that the executor is to guess, with a model of its own, before it is verified."""


class StepKind(StrEnum):
    """What a sequence does in a step."""

    PREFILL = "prefill"
    DECODE = "decode"
    VERIFY = "verify"


@dataclass(frozen=True, slots=True)
class BatchEntry:
    """One sequence's part of a step.

    token_ids       ids to compute in this step, in order; LAST_SAMPLED where the host has not
                    seen the id yet
    first_position  position of token_ids[0]; everything before it is in the cache
    new_block_ids   blocks appended to the sequence's block table before this step; the table
                    of a sequence that begins starts with them. A block that the windows of all
                    layers have left behind stays in the table, but may be another's by now
    samples         whether the row of the last token gives a token (not in a prompt's earlier
                    chunks)
    draft_length    drafted tokens at the end of token_ids (verify only), perhaps DRAFTED
    num_generated   tokens that the sequence had generated before this step
    cached_token_ids  the tokens before first_position, where other sequences computed them into
                      the blocks with which this one begins
    """

    seq_id: int
    kind: StepKind
    token_ids: Sequence[int]
    first_position: int
    new_block_ids: tuple[int, ...]
    samples: bool
    sampling: SamplingParams
    draft_length: int = 0
    num_generated: int = 0
    cached_token_ids: Sequence[int] = ()

    @property
    def begins(self) -> bool:
        """Whether the sequence starts here, or starts anew."""
        return self.first_position == len(self.cached_token_ids)


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One step. `released_seq_ids` ended or were preempted: their state may be dropped first."""

    step_id: int
    entries: tuple[BatchEntry, ...]
    shape: StepShape
    released_seq_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one sequence got from a step: 0 to draft_length + 1 tokens.

    logprobs      natural log-probabilities of those tokens, where they were asked for
    top_logprobs  of each of them, likewise
    """

    seq_id: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] | None = None
    top_logprobs: tuple[Ranked, ...] | None = None


@dataclass(frozen=True, slots=True)
class CommittedTokens:
    """What a step gave one sequence for good; `finish_reason` is set with its last tokens.

    drafted, accepted  tokens guessed for this step, and how many of them held
    """

    seq_id: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None
    finish_reason: str | None
    drafted: int = 0
    accepted: int = 0
    top_logprobs: tuple[Ranked, ...] | None = None


@dataclass(frozen=True, slots=True)
class WaitUntil:
    """Nothing to run before `at_s` unless a request arrives first."""

    at_s: float


@dataclass(frozen=True, slots=True)
class Idle:
    """Nothing to run until a request arrives."""
