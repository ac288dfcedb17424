"""The simulated engine's tokenizer beside a model's, and stop strings."""

import zlib
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from lmi_bench.core.errors import CapacityError, InputError
from lmi_bench.engine.tokenizer import Detokenizer, Tokenizer


class PlainTokenizer:
    """Token n is the word `tn` after a space; any other word hashes to one of the ids. It has what
    the server needs of `Tokenizer`."""

    eos_token_ids: tuple[int, ...] = ()
    sampling: Mapping[str, float] = MappingProxyType({})
    max_new_tokens: int | None = None
    longest_token_bytes: int | None = None  # a word is as long as it is
    has_channels = False

    def __init__(self, vocab_size: int = 32_000) -> None:
        if vocab_size < 1:
            raise InputError(f"vocab_size must be at least 1, got {vocab_size}")
        self.vocab_size = vocab_size

    def encode(self, text: str, *, add_special_tokens: bool = True, most: int | None = None) -> list[int]:
        words = text.split(None, -1 if most is None else most)
        if most is not None and len(words) > most:
            raise CapacityError(f"the text has more than {most} tokens")
        return [self._word_id(word) for word in words]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return "".join([f" t{token_id}" for token_id in token_ids])

    def token_text(self, token_id: int) -> str:
        return self.decode([token_id])

    def token_bytes(self, token_id: int) -> bytes:
        return self.token_text(token_id).encode()

    def special_token(self, token_id: int) -> None:
        """None: every token is a word."""

    def detokenizer(self, behind: Sequence[int] = (), *, special: bool = False) -> "PlainTokenizer":
        """Itself: words do not depend on their neighbours."""
        return self

    def push(self, token_ids: Iterable[int]) -> str:
        return self.decode(list(token_ids))

    def finish(self) -> str:
        return ""

    def _word_id(self, word: str) -> int:
        digits = word[1:]
        if word[0] == "t" and digits.isascii() and digits.isdigit() and len(digits) < 10:
            token_id = int(digits)
            if token_id < self.vocab_size and str(token_id) == digits:
                return token_id
        return zlib.crc32(word.encode("utf-8", errors="replace")) % self.vocab_size


Codec = Tokenizer | PlainTokenizer
StreamDecoder = Detokenizer | PlainTokenizer
"""Turns one stream of tokens into text pieces whose concatenation is the decoded text."""


class StopStringFilter:
    """Returns text until a stop string is complete; drops what follows, and the stop string too
    unless `keep` is set: then no text has to wait for what follows it."""

    def __init__(self, stop_strings: tuple[str, ...], *, keep: bool = False) -> None:
        self._stop_strings = stop_strings
        self._keep = keep
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """The text that can be sent now; sets `matched` when a stop string is complete."""
        if not self._stop_strings:
            return text
        window, sent = self._held + text, len(self._held) if self._keep else 0
        start, end = len(window), len(window) + 1
        for stop in self._stop_strings:
            at = window.find(stop)
            if at >= 0 and (at + len(stop), at) < (end, start):
                start, end, self.matched = at, at + len(stop), stop
        if self.matched is not None:
            self._held = ""
            return window[sent : end if self._keep else start]
        keep = max(overlap(window, stop) for stop in self._stop_strings)
        self._held = window[len(window) - keep :]
        return window[sent:] if self._keep else window[: len(window) - keep]

    def flush(self) -> str:
        """The text held back, after the last piece."""
        held, self._held = self._held, ""
        return "" if self._keep else held


def overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
