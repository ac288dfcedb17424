"""Drafters: propose a sequence's next tokens, which the model then verifies in one step.

A draft never changes the output: every token is the model's own choice at that position.
Source: Leviathan et al. 2023, arXiv:2211.17192; n-gram drafts: Saxena 2023, prompt lookup decoding.
"""

import hashlib
from collections import abc

from lmi_bench.core.errors import InputError
from lmi_bench.engine.scheduling.batch import DRAFTED
from lmi_bench.engine.scheduling.sequence import Sequence

Drafter = abc.Callable[[Sequence, int], tuple[int, ...]]
"""Drafts at most n next tokens of a sequence, whose last token is always known."""


class ExecutorDrafter:
    """Leaves drafting to the executor, which runs a draft model. Returns `num_tokens` times
    DRAFTED, so that the scheduler reserves their cache slots."""

    def __init__(self, num_tokens: int) -> None:
        self._draft = (DRAFTED,) * _checked(num_tokens)

    def __call__(self, seq: Sequence, most: int) -> tuple[int, ...]:
        return self._draft[:most]


class NgramDrafter:
    """Drafts the tokens that followed the latest earlier occurrence of the sequence's last n-gram.

    num_tokens         maximum draft length
    longest, shortest  n-gram lengths, tried from longest to shortest. A draft that reaches the
                       end of the text continues with the same period

    It helps if the output repeats its input or itself: summaries, edits, code.
    """

    def __init__(self, num_tokens: int, *, longest: int = 3, shortest: int = 2) -> None:
        if not 1 <= shortest <= longest:
            raise InputError(f"n-gram lengths must be at least 1 and in order, got {shortest} to {longest}")
        self._num_tokens = _checked(num_tokens)
        self._lengths = range(longest, shortest - 1, -1)

    def __call__(self, seq: Sequence, most: int) -> tuple[int, ...]:
        """The draft; empty if the last tokens have not occurred before."""
        if not isinstance(seq.drafting, _Index):
            seq.drafting = _Index(seq.prompt_token_ids)
        index = seq.drafting
        index.extend(seq.output_token_ids, self._lengths)
        return index.guess(min(most, self._num_tokens), self._lengths)


class _Index:
    """A sequence's tokens, and the position after the latest occurrence of each n-gram."""

    __slots__ = ("_after", "_num_indexed", "_num_prompt_tokens", "_tokens")

    def __init__(self, prompt_token_ids: abc.Sequence[int]) -> None:
        self._tokens = list(prompt_token_ids)
        self._num_prompt_tokens = len(self._tokens)
        self._after: dict[tuple[int, ...], int] = {}
        self._num_indexed = 0

    def extend(self, output_token_ids: abc.Sequence[int], lengths: range) -> None:
        """Index new output tokens; the n-grams at the very end have no following token yet."""
        tokens = self._tokens
        tokens.extend(output_token_ids[len(tokens) - self._num_prompt_tokens :])
        for end in range(self._num_indexed + 1, len(tokens)):
            for length in lengths:
                if length <= end:
                    self._after[tuple(tokens[end - length : end])] = end
        self._num_indexed = max(self._num_indexed, len(tokens) - 1)

    def guess(self, most: int, lengths: range) -> tuple[int, ...]:
        tokens = self._tokens
        for length in lengths:
            after = self._after.get(tuple(tokens[-length:])) if length <= len(tokens) else None
            if after is not None:
                period = len(tokens) - after
                return tuple(tokens[after + step % period] for step in range(most))
        return ()


def tokens_gained(acceptance: float, seq_id: int, first_position: int, draft_length: int) -> int:
    """Tokens of a simulated step that verifies `draft_length` tokens after `first_position`.

    acceptance  probability, 0 to 1, that a draft token is accepted once those before it are; the
                draw depends only on sequence and position
    """
    count = 1
    while acceptance and count <= draft_length:
        place = f"{seq_id}:{first_position + count}".encode()
        draw = int.from_bytes(hashlib.blake2b(place, digest_size=8).digest(), "big")
        if draw >= acceptance * 2**64:
            break
        count += 1
    return count


def _checked(num_tokens: int) -> int:
    if num_tokens < 1:
        raise InputError(f"the number of drafted tokens must be at least 1, got {num_tokens}")
    return num_tokens
