"""The simulated engine's tokenizer: one word is one token.

The simulated executor has no model folder. A text of n words separated by white space encodes to
n tokens, and n tokens decode to n words, so every length is what the client planned.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence

from lmi_bench.core.errors import InputError


class PlainTokenizer:
    """Token n is the word `tn` after a space; any other word hashes to one of the ids."""

    eos_token_ids: tuple[int, ...] = ()

    def __init__(self, vocab_size: int = 32_000) -> None:
        if vocab_size < 1:
            raise InputError(f"vocab_size must be at least 1, got {vocab_size}")
        self.vocab_size = vocab_size

    def encode(self, text: str) -> list[int]:
        """One id per word; words from `decode` get their own ids back."""
        return [self._word_id(word) for word in text.split()]

    def decode(self, token_ids: Sequence[int]) -> str:
        """The words of the ids, each after a space."""
        return "".join([f" t{token_id}" for token_id in token_ids])

    def special_token(self, token_id: int) -> None:
        """None: every token is a word."""

    def detokenizer(self, behind: Sequence[int] = ()) -> PlainDetokenizer:
        """A decoder for one stream; earlier tokens have no effect."""
        return PlainDetokenizer(self)

    def _word_id(self, word: str) -> int:
        digits = word[1:]
        if word[0] == "t" and digits.isascii() and digits.isdigit() and len(digits) < 10:
            token_id = int(digits)
            if token_id < self.vocab_size and str(token_id) == digits:
                return token_id
        return zlib.crc32(word.encode("utf-8", errors="replace")) % self.vocab_size


class PlainDetokenizer:
    """Decodes each token immediately, since words do not depend on their neighbours."""

    def __init__(self, tokenizer: PlainTokenizer) -> None:
        self._tokenizer = tokenizer

    def push(self, token_ids: Iterable[int]) -> str:
        """The words of these tokens."""
        return self._tokenizer.decode(list(token_ids))

    def finish(self) -> str:
        """Always empty."""
        return ""
