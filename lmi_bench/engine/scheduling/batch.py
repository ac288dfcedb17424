"""The plain values that the scheduler and the executor exchange.

They contain no sequence, queue or callback, so a batch can be logged, compared or sent to another
process.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from lmi_bench.core.errors import EngineError
from lmi_bench.engine.scheduling.sampling import Ranked, SamplingParams
from lmi_bench.engine.scheduling.step_shape import StepShape

LAST_SAMPLED: Final = -1
"""Placeholder for the token that this sequence's previous step sampled: an executor that keeps
sampled tokens on its device need not wait for the host to read them."""

DRAFTED: Final = -2
"""Placeholder for a token that the executor drafts with a draft model before verification."""


class StepKind(StrEnum):
    """What a sequence does in a step."""

    PREFILL = "prefill"
    DECODE = "decode"
    VERIFY = "verify"


@dataclass(slots=True)  # one a token: frozen, it takes six times as long to make
class BatchEntry:
    """One sequence's part of a step.

    token_ids       ids to compute in this step, in order; LAST_SAMPLED if the host has not yet
                    seen the id
    first_position  position of token_ids[0]; everything before it is in the cache
    new_block_ids   blocks appended to the sequence's block table before this step; all blocks if
                    the sequence begins. A block outside every layer's window stays in the table
                    but may belong to another sequence by now
    samples         True if the last row yields a token (False in a prompt's earlier chunks)
    draft_length    draft tokens at the end of token_ids (verify only), possibly DRAFTED
    num_generated   tokens that the sequence had generated before this step
    cached_token_ids  tokens before first_position that a beginning sequence takes from the
                      prefix cache
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
        """True if the sequence starts or restarts in this step."""
        return self.first_position == len(self.cached_token_ids)

    def check(self, output: "StepOutput") -> None:
        """Raise EngineError if the executor's output is not one that this entry can have."""
        count = len(output.token_ids)
        if self.kind is StepKind.VERIFY:
            right = count <= self.draft_length + 1
        else:
            right = count == self.samples
        if not right or output.seq_id != self.seq_id:
            raise EngineError(
                f"the executor returned {count} tokens of sequence {output.seq_id} for the "
                f"{self.kind} of sequence {self.seq_id}"
            )


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One step. `released_seq_ids` have ended or were preempted: drop their state first."""

    step_id: int
    entries: tuple[BatchEntry, ...]
    shape: StepShape
    released_seq_ids: tuple[int, ...] = ()


PromptLogprobs = tuple[tuple[float, Ranked], ...]
"""Log-probability of each token of a prompt but the first, and the likeliest at its position."""


@dataclass(slots=True)
class StepOutput:
    """One sequence's result of a step: 0 to draft_length + 1 tokens.

    logprobs      natural log-probabilities of those tokens, if requested
    top_logprobs  the most likely tokens at each position, if requested
    prompt        of the prompt's tokens from the second on, if requested, beside the first token
    """

    seq_id: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] | None = None
    top_logprobs: tuple[Ranked, ...] | None = None
    prompt: PromptLogprobs | None = None


@dataclass(slots=True)
class CommittedTokens(StepOutput):
    """Tokens that a step added to a sequence; `finish_reason` is set with its last tokens.

    drafted, accepted  draft tokens in this step, and how many were accepted
    """

    finish_reason: str | None = None
    drafted: int = 0
    accepted: int = 0


@dataclass(frozen=True, slots=True)
class WaitUntil:
    """Nothing to run before `at_s` unless a request arrives first."""

    at_s: float
