"""The work of one step, in counts from which a step-time model predicts its time."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class StepShape:
    """The work of one step, summed over its sequences. All are token or sequence counts.

    prefill_sequences      sequences whose prompt tokens are computed in this step
    prefill_tokens         prompt tokens computed in this step
    prefill_context_pairs  (query, key) pairs of their causal attention: for a chunk of n tokens
                           after c cached ones, n * c + n * (n + 1) / 2
    prefill_context_tokens cached tokens that the prompt chunks read (0 without chunking)
    decode_sequences       sequences that decode or verify
    decode_tokens          tokens computed for them: one each, k + 1 with k draft tokens
    decode_context_tokens  cached tokens that they read: the sum of their context lengths,
                           including this step's tokens
    copied_tokens          tokens found in the prefix cache of which the host had the blocks
    """

    prefill_sequences: int = 0
    prefill_tokens: int = 0
    prefill_context_pairs: int = 0
    prefill_context_tokens: int = 0
    decode_sequences: int = 0
    decode_tokens: int = 0
    decode_context_tokens: int = 0
    copied_tokens: int = 0

    @classmethod
    def decoding(cls, rows: int, context_tokens: int) -> "StepShape":
        """Of that many sequences a token each, over so much context in all."""
        return cls(decode_sequences=rows, decode_tokens=rows, decode_context_tokens=context_tokens)

    @property
    def num_tokens(self) -> int:
        """Rows of the step's matrix products."""
        return self.prefill_tokens + self.decode_tokens


class StepTime(Protocol):
    """A model that predicts a step's time."""

    def step_time_s(self, shape: StepShape) -> float:
        """Seconds from the step's start to its tokens."""
