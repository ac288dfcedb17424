"""Guesses of a sequence's next tokens, which the model then verifies all in one step.

A guess costs nothing but the rows that verify it, and never changes what is generated: a token is
only ever what the model itself chose at that position.
Source: Leviathan et al. 2023, arXiv:2211.17192; for look-up Saxena 2023, prompt look-up decoding.
"""

from __future__ import annotations

import hashlib
from collections import abc

from lmi_bench.core.errors import InputError
from lmi_bench.engine.scheduling.batch import DRAFTED
from lmi_bench.engine.scheduling.sequence import Sequence

Drafter = abc.Callable[[Sequence, int], tuple[int, ...]]
"""Guesses at most n next tokens of a sequence; its last token is always known."""


class ExecutorDrafter:
    """Leaves the guessing to the executor, which runs a smaller model for it.

    Gives `num_tokens` times DRAFTED, so that the slots of the guesses are seen to.
    """

    def __init__(self, num_tokens: int) -> None:
        self._draft = (DRAFTED,) * _checked(num_tokens)

    def __call__(self, seq: Sequence, most: int) -> tuple[int, ...]:
        """As many places as the engine is to guess."""
        return self._draft[:most]


class NgramDrafter:
    """Looks the last tokens up in the sequence itself and guesses what followed them there.

    num_tokens         most tokens of a guess
    longest, shortest  lengths of the run of tokens that is looked up, the longest first. Where it
                       stood last counts; a guess that reaches the end of the text goes on with
                       the same period

    It helps where the output repeats its input or itself: summaries, edits, code.
    """

    def __init__(self, num_tokens: int, *, longest: int = 3, shortest: int = 2) -> None:
        if not 1 <= shortest <= longest:
            raise InputError(
                f"n-gram lengths must be at least 1 and in order, got {shortest} to {longest}"
            )
        self._num_tokens = _checked(num_tokens)
        self._lengths = range(longest, shortest - 1, -1)

    def __call__(self, seq: Sequence, most: int) -> tuple[int, ...]:
        """The guess; empty where the last tokens are new."""
        if not isinstance(seq.drafting, _Index):
            seq.drafting = _Index(seq.prompt_token_ids)
        index = seq.drafting
        index.extend(seq.output_token_ids, self._lengths)
        return index.guess(min(most, self._num_tokens), self._lengths)


class _Index:
    """A sequence's tokens, and after which place each run of them last stood."""

    __slots__ = ("_after", "_num_indexed", "_num_prompt_tokens", "_tokens")

    def __init__(self, prompt_token_ids: abc.Sequence[int]) -> None:
        self._tokens = list(prompt_token_ids)
        self._num_prompt_tokens = len(self._tokens)
        self._after: dict[tuple[int, ...], int] = {}
        self._num_indexed = 0

    def extend(self, output_token_ids: abc.Sequence[int], lengths: range) -> None:
        """Take in new output tokens; the runs at the very end have no following token yet."""
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


def guess_holds(acceptance: float, seq_id: int, position: int) -> bool:
    """Whether a simulated guess holds if those before it did: a fixed draw of its place.

    acceptance  its chance, 0 to 1
    """
    if not acceptance:
        return False
    digest = hashlib.blake2b(f"{seq_id}:{position}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < acceptance * 2**64


def tokens_gained(acceptance: float, seq_id: int, first_position: int, draft_length: int) -> int:
    """Tokens of a simulated step that verifies `draft_length` guesses behind `first_position`."""
    count = 1
    while count <= draft_length and guess_holds(acceptance, seq_id, first_position + count):
        count += 1
    return count


def _checked(num_tokens: int) -> int:
    if num_tokens < 1:
        raise InputError(f"the number of drafted tokens must be at least 1, got {num_tokens}")
    return num_tokens
