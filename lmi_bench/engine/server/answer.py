"""One request's answer as text: decodes the engine's tokens and applies stop strings."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lmi_bench.core.errors import EngineError
from lmi_bench.engine.async_engine import Generation, TokenEvent
from lmi_bench.engine.grammar import is_kept
from lmi_bench.engine.scheduling.sampling import Grammar, Ranked, SamplingParams
from lmi_bench.engine.server.codec import Codec, StopStringFilter, StreamDecoder

_OPENAI_FINISH_REASONS = {"length": "length", "eos_token": "stop", "stop_sequence": "stop", "cancelled": "abort"}


@dataclass(frozen=True, slots=True)
class Prompt:
    """The prompt, the sampling settings and the stop strings.

    keep_stop_string  True if the matched stop string is part of the answer
    text              the prompt's text, if the reply repeats it
    alone             True if the reply has no more than the prompt
    shows_special     True if the answer's text has its special tokens, which mark calls
    """

    token_ids: Sequence[int]
    sampling: SamplingParams
    stop_strings: tuple[str, ...] = ()
    keep_stop_string: bool = False
    text: str = ""
    alone: bool = False
    shows_special: bool = False


class Piece(NamedTuple):
    """One token. `text` is what it adds to the answer: empty while text is held back.

    ranked     the most likely tokens at its position, if requested
    num_chars  of its text, before a stop string held it back; 0: not counted
    """

    token_id: int
    text: str
    logprob: float | None
    ranked: Ranked = ()
    num_chars: int = 0


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
        self._min_tokens = prompt.sampling.min_tokens
        self._num_taken = 0  # events
        self.pieces: list[Piece] = []
        self.finish_reason: str | None = None

    @property
    def text(self) -> str:
        return "".join([piece.text for piece in self.pieces])

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the answer, if one did."""
        return self._stop_filter.matched

    def take(self) -> list[Piece] | None:
        """The pieces of the next engine event, None if it has not come; `finish_reason` is set
        with the last ones.

        If the request is stopped without a last token, the last list is empty. Raises EngineError,
        after the last tokens, if the engine failed or the answer left its grammar.
        """
        if self.finish_reason is not None:
            return None
        generation, taken = self.generation, self._num_taken
        events = generation.events
        if taken < len(events):
            self._num_taken = taken + 1
            is_last = generation.finish_reason is not None and taken + 1 == len(events)
            event = events[taken]
            if is_last or event.logprobs is not None or self.prompt.stop_strings:
                return self._take(event, is_last=is_last)
            push = self._decoder.push  # most tokens of most answers
            pieces = [Piece(token_id, push((token_id,)), None) for token_id in event.token_ids]
            self.pieces += pieces
            return pieces
        if generation.error is not None:
            raise generation.error
        self.finish_reason = generation.finish_reason
        return None if self.finish_reason is None else []

    async def complete(self) -> None:
        """Wait for the whole answer; only stop strings need tokens before the end."""
        if self.prompt.stop_strings:
            async for _ in self.generation:
                self.take()
        await self.generation.wait()
        while self.take() is not None:
            pass

    def close(self) -> None:
        """Cancel the generation if it has not ended, which frees its blocks."""
        if self.generation.finish_reason is None:
            self.generation.stop("cancelled")
        if self.finish_reason is None:
            self.finish_reason = self.generation.finish_reason

    def prompt_pieces(self, codec: Codec) -> list[Piece]:
        """The prompt's tokens, the first without log-probability; none if they have none."""
        if not self.prompt.sampling.prompt_logprobs:
            return []
        tokens, decoder = self.prompt.token_ids, codec.detokenizer()
        scores = [(None, ()), *self.generation.prompt_logprobs]
        texts = [decoder.push((token_id,)) for token_id in tokens]
        parts = zip(tokens, texts, scores, map(len, texts), strict=True)
        return [Piece(token_id, text, *score, length) for token_id, text, score, length in parts]

    def _take(self, event: TokenEvent, *, is_last: bool) -> list[Piece]:
        chunk: list[Piece] = []
        if self.prompt.alone:  # its one token is the last
            self.finish_reason = "length"
            return chunk
        for index, token_id in enumerate(event.token_ids):
            ends = is_last and index == len(event.token_ids) - 1
            is_end = ends and self.generation.finish_reason in ("eos_token", "stop_sequence")
            hidden = is_end and not self.prompt.keep_stop_string  # as in vLLM
            text = "" if hidden else self._decoder.push((token_id,))
            num_chars = len(text)
            if len(self.pieces) + 1 > self._min_tokens:
                text = self._stop_filter.push(text)
            if self.stop_string is None and ends:
                text += self._stop_filter.push(self._decoder.finish())
                if self.stop_string is None:
                    text += self._stop_filter.flush()
            logprob = None if event.logprobs is None else event.logprobs[index]
            ranked = () if event.top_logprobs is None else event.top_logprobs[index]
            piece = Piece(token_id, text, logprob, ranked, num_chars)
            chunk.append(piece)
            self.pieces.append(piece)
            if self.stop_string is not None:
                self.finish_reason = "stop_sequence"
                if self.generation.finish_reason is None:
                    self.generation.stop("stop_sequence")
                return chunk
        if is_last:
            self.finish_reason = self.generation.finish_reason
            if self.prompt.sampling.grammar is not None and self.finish_reason == "eos_token":
                self._check_grammar(self.prompt.sampling.grammar)
        return chunk

    def _check_grammar(self, grammar: Grammar) -> None:
        ends = self.prompt.sampling.eos_token_ids
        if not is_kept(grammar, [piece.token_id for piece in self.pieces if piece.token_id not in ends]):
            self.finish_reason = "error"
            raise EngineError("the answer left its grammar, which is too large to be followed: make it smaller")


def openai_finish_reason(reason: str | None) -> str:
    """OpenAI's and vLLM's name of a finish reason; "error" if there is none."""
    return _OPENAI_FINISH_REASONS.get(reason or "", "error")
