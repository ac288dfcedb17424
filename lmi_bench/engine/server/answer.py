"""One request's answer as text: the tokenizer's interface, decoding, stop strings."""

from __future__ import annotations

import zlib
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from lmi_bench.core.errors import InputError
from lmi_bench.engine.async_engine import Generation, TokenEvent
from lmi_bench.engine.scheduling.sampling import Ranked, SamplingParams


class StreamDecoder(Protocol):
    """Turns one stream of tokens into text pieces whose concatenation is the decoded text."""

    def push(self, token_ids: Iterable[int]) -> str:
        """The text completed by these tokens; empty while a character is incomplete."""
        ...

    def finish(self) -> str:
        """The remaining text at the end of the stream."""
        ...


class Codec(Protocol):
    """Text to token ids and back. All ids are below `vocab_size`; some end a generation."""

    vocab_size: int
    eos_token_ids: tuple[int, ...]

    def encode(self, text: str) -> list[int]:
        """The ids of a prompt, including special tokens if the model needs them."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of a whole sequence."""
        ...

    def special_token(self, token_id: int) -> str | None:
        """The name of a token without text, such as `</s>`; None for all others."""
        ...

    def detokenizer(self, behind: Sequence[int] = ()) -> StreamDecoder:
        """A decoder for one stream of tokens that follows the tokens `behind`."""
        ...


class PlainTokenizer:
    """Token n is the word `tn` after a space; any other word hashes to one of the ids."""

    eos_token_ids: tuple[int, ...] = ()

    def __init__(self, vocab_size: int = 32_000) -> None:
        if vocab_size < 1:
            raise InputError(f"vocab_size must be at least 1, got {vocab_size}")
        self.vocab_size = vocab_size

    def encode(self, text: str) -> list[int]:
        return [self._word_id(word) for word in text.split()]

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join([f" t{token_id}" for token_id in token_ids])

    def special_token(self, token_id: int) -> None:
        """None: every token is a word."""

    def detokenizer(self, behind: Sequence[int] = ()) -> PlainTokenizer:
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


class StopStringFilter:
    """Returns text until a stop string is complete; drops what follows, and the stop string too
    unless `keep` is set."""

    def __init__(self, stop_strings: tuple[str, ...], *, keep: bool = False) -> None:
        self._stop_strings = stop_strings
        self._keep = keep
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """The text that can be sent now; sets `matched` when a stop string is complete."""
        if not self._stop_strings:
            return text
        window = self._held + text
        start, end = len(window), len(window) + 1
        for stop in self._stop_strings:
            at = window.find(stop)
            if at >= 0 and (at + len(stop), at) < (end, start):
                start, end, self.matched = at, at + len(stop), stop
        if self.matched is not None:
            self._held = ""
            return window[: end if self._keep else start]
        keep = max(_overlap(window, stop) for stop in self._stop_strings)
        self._held = window[len(window) - keep :]
        return window[: len(window) - keep]

    def flush(self) -> str:
        """The text held back, after the last piece."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


_OPENAI_FINISH_REASONS = {
    "length": "length",
    "eos_token": "stop",
    "stop_sequence": "stop",
    "cancelled": "abort",
}


@dataclass(frozen=True, slots=True)
class Prompt:
    """The prompt, the sampling settings and the stop strings.

    keep_stop_string  True if the matched stop string is part of the answer
    text              the prompt's text, if the reply repeats it
    """

    token_ids: Sequence[int]
    sampling: SamplingParams
    stop_strings: tuple[str, ...] = ()
    keep_stop_string: bool = False
    text: str = ""


@dataclass(frozen=True, slots=True)
class Piece:
    """One token. `text` is what it adds to the answer: empty while text is held back.

    ranked  the most likely tokens at its position, if requested
    """

    token_id: int
    text: str
    logprob: float | None
    ranked: Ranked = ()


class Answer:
    """The growing answer of one generation.

    pieces         tokens so far, without those after a stop string
    finish_reason  the engine's reason, set with the last piece; None if the engine failed
    """

    def __init__(self, generation: Generation, prompt: Prompt, decoder: StreamDecoder) -> None:
        self.generation = generation
        self.prompt = prompt
        self._decoder = decoder
        self._stop_filter = StopStringFilter(prompt.stop_strings, keep=prompt.keep_stop_string)
        self._ends_by_itself = not prompt.stop_strings
        self._min_tokens = prompt.sampling.min_tokens
        self.pieces: list[Piece] = []
        self.finish_reason: str | None = None

    @property
    def text(self) -> str:
        """All text so far."""
        return "".join([piece.text for piece in self.pieces])

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the answer, if one did."""
        return self._stop_filter.matched

    async def chunks(self) -> AsyncIterator[list[Piece]]:
        """The pieces of each engine event; `finish_reason` is set with the last ones.

        If the request is stopped without a last token, the last chunk is empty. Raises
        EngineError if the engine fails.
        """
        num_events, generation = 0, self.generation
        async for event in generation:
            num_events += 1
            ended = generation.finish_reason is not None and num_events == len(generation.events)
            yield self._take(event, is_last=ended)
            if self.finish_reason is not None:
                return
        self.finish_reason = self.generation.finish_reason
        yield []

    async def complete(self) -> None:
        """Wait for the whole answer; only stop strings need tokens before the end."""
        if self._ends_by_itself:
            await self.generation.wait()
        async for _ in self.chunks():
            pass

    def close(self) -> None:
        """Cancel the generation if it has not ended, which frees its blocks."""
        if self.generation.finish_reason is None:
            self.generation.stop("cancelled")
        if self.finish_reason is None:
            self.finish_reason = self.generation.finish_reason

    def _take(self, event: TokenEvent, *, is_last: bool) -> list[Piece]:
        chunk: list[Piece] = []
        for index, token_id in enumerate(event.token_ids):
            text = self._decoder.push((token_id,))
            if len(self.pieces) + 1 > self._min_tokens:
                text = self._stop_filter.push(text)
            if self.stop_string is None and is_last and index == len(event.token_ids) - 1:
                text += self._stop_filter.push(self._decoder.finish())
                if self.stop_string is None:
                    text += self._stop_filter.flush()
            logprob = None if event.logprobs is None else event.logprobs[index]
            ranked = () if event.top_logprobs is None else event.top_logprobs[index]
            piece = Piece(token_id, text, logprob, ranked)
            chunk.append(piece)
            self.pieces.append(piece)
            if self.stop_string is not None:
                self.finish_reason = "stop_sequence"
                if self.generation.finish_reason is None:
                    self.generation.stop("stop_sequence")
                return chunk
        if is_last:
            self.finish_reason = self.generation.finish_reason
        return chunk


def openai_finish_reason(reason: str | None) -> str:
    """OpenAI's and vLLM's name of a finish reason; "error" if there is none."""
    return _OPENAI_FINISH_REASONS.get(reason or "", "error")
