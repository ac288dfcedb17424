"""One text from a prompt to its end, over as many requests as it takes."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import TypeVar

from lmi_bench.core.errors import CapacityError, InputError
from lmi_bench.core.listener import SILENT, Listener
from lmi_bench.core.scenario import parse_scenario
from lmi_bench.engine.replicas import ServingEngine
from lmi_bench.engine.scheduling.sampling import Ranked, SamplingParams
from lmi_bench.engine.scheduling.stats import SchedulerStats
from lmi_bench.engine.server.answer import Prompt
from lmi_bench.engine.server.codec import StopStringFilter
from lmi_bench.engine.tokenizer import Tokenizer
from lmi_bench.jobs.settings.engine import stated_settings
from lmi_bench.jobs.settings.generate import GenerateSettings
from lmi_bench.targets.applies import refuse_idle
from lmi_bench.targets.bundled import open_torch_engine
from lmi_bench.targets.parts import EngineParts
from lmi_bench.targets.process import follow_launcher
from lmi_bench.targets.quantizing import quantize_notes

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token's text and log-probability, and those of the likeliest ones in its place."""

    text: str
    logprob: float
    likeliest: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class Generated:
    """A text and how it came about, over all requests.

    seconds         in the engine; None where quantized arithmetic is emulated: it says nothing
    first_token_s   from the first request to its first token
    scores          of each token, where log-probabilities were asked for
    finish_reason   `length`, `eos_token`, `stop_sequence` or `context_full`
    stop_string     that ended the text; None: it ended by a token, or otherwise
    context_tokens  the longest request of this model and cache
    """

    text: str
    requests: int
    tokens: int
    seconds: float | None
    first_token_s: float
    scores: tuple[ScoredToken, ...]
    finish_reason: str | None
    stop_string: str | None
    context_tokens: int
    back_end_note: str
    stats: SchedulerStats


@dataclass(slots=True)
class _Totals:
    requests: int = 0
    tokens: int = 0
    seconds: float = 0.0
    first_token_s: float | None = None
    logprobs: list[float] = field(default_factory=list)
    ranked: list[tuple[int, Ranked]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_string: str | None = None


def generate(
    settings: GenerateSettings,
    listener: Listener = SILENT,
    *,
    on_text: Callable[[str], None] | None = None,
) -> Generated | None:
    """Generate a text. Raises InputError before a model is loaded.

    on_text  called with each piece of the text as it comes

    None in a process that a launcher has started as a further rank.
    """
    sampling = SamplingParams(
        **asdict(settings.sampling),
        logprobs=settings.confidence or settings.logprobs is not None,
        top_logprobs=settings.logprobs or 0,
    )
    opened = open_engine(settings, listener, lambda: prompt_text(settings.prompt))
    if opened is None:
        return None
    parts, tokenizer, text = opened
    totals = _Totals()
    chain = _Chain(tokenizer, tokenizer.encode(text), settings.stop, on_text)
    sampling = replace(sampling, eos_token_ids=tokenizer.eos_token_ids)
    stats = asyncio.run(_generate(parts, chain, sampling, totals, go_on=settings.until_done))
    emulated = parts.quantized is not None and parts.quantized.emulated
    return Generated(
        text="".join(chain.written),
        requests=totals.requests,
        tokens=totals.tokens,
        seconds=None if emulated else totals.seconds,
        first_token_s=totals.first_token_s or 0.0,
        scores=_scored(totals, tokenizer),
        finish_reason=totals.finish_reason,
        stop_string=totals.stop_string,
        context_tokens=parts.config.max_model_len,
        back_end_note=parts.back_end_note,
        stats=stats,
    )


def open_engine(
    settings: GenerateSettings, listener: Listener, read: Callable[[], T]
) -> tuple[EngineParts, Tokenizer, T] | None:
    """The engine, its tokenizer and what `read` gives, which is read before the model is loaded.

    None where this process was one of a launcher's further ranks, and has ended as such.
    """
    stated = stated_settings(settings.model_options)
    engine = parse_scenario({"engine": stated}, source="generate").engine
    refuse_idle("bundled", [f"engine.{name}" for name in stated], engine)
    if follow_launcher(engine):
        return None
    question = read()
    parts = open_torch_engine(settings.model, engine, listener)
    for line in quantize_notes(parts.quantized):
        listener.note(line)
    assert parts.tokenizer is not None  # a torch engine has read its folder's
    return parts, parts.tokenizer, question


def prompt_text(prompt: str) -> str:
    """The prompt, or standard input for `-`; raises InputError where it is empty."""
    text = sys.stdin.read() if prompt == "-" else prompt
    if not text:
        raise InputError("the prompt is empty: give --prompt TEXT, or text on stdin")
    return text


def _scored(totals: _Totals, tokenizer: Tokenizer) -> tuple[ScoredToken, ...]:
    return tuple(
        ScoredToken(
            tokenizer.decode([token_id]),
            logprob,
            tuple((tokenizer.decode([other]), value) for other, value in ranked),
        )
        for (token_id, ranked), logprob in zip(totals.ranked, totals.logprobs, strict=True)
    )


async def _generate(
    parts: EngineParts,
    chain: _Chain,
    sampling: SamplingParams,
    totals: _Totals,
    *,
    go_on: bool,
) -> SchedulerStats:
    """One request, or, to go on, as many as it takes until the text ends."""
    token_ids = chain.prompt_ids
    context_tokens = parts.config.max_model_len
    async with parts.engine() as engine:
        while True:
            room = context_tokens - len(token_ids)
            if room < 1:
                if not totals.requests:
                    raise CapacityError(
                        f"the prompt has {len(token_ids):,} tokens and the model's context "
                        f"{context_tokens:,}: no token is left to generate"
                    )
                totals.finish_reason = "context_full"
                break
            most = min(sampling.max_new_tokens, room)
            asked = replace(
                sampling,
                max_new_tokens=most,
                min_tokens=min(most, max(0, sampling.min_tokens - totals.tokens)),
            )
            prompt = Prompt(token_ids, asked)
            token_ids = token_ids + await _one_request(engine, prompt, chain, totals)
            if not go_on or totals.finish_reason != "length":
                break
    chain.finish()
    return engine.stats().done


async def _one_request(
    engine: ServingEngine, prompt: Prompt, chain: _Chain, totals: _Totals
) -> list[int]:
    """Run one request; returns its token ids."""
    generation = engine.submit(prompt.token_ids, prompt.sampling)
    token_ids: list[int] = []
    try:
        async for event in generation:
            for number, token_id in enumerate(event.token_ids):
                token_ids.append(token_id)
                if event.logprobs is not None:
                    totals.logprobs.append(event.logprobs[number])
                    ranked = event.top_logprobs[number] if event.top_logprobs else ()
                    totals.ranked.append((token_id, ranked))
                chain.push(token_id)
                if chain.stop_string is not None:
                    break
            if chain.stop_string is not None:
                break
    finally:
        generation.stop("cancelled")  # nothing where it has ended
    totals.requests += 1
    totals.tokens += len(token_ids)
    totals.stop_string = chain.stop_string
    stopped = chain.stop_string is not None
    totals.finish_reason = "stop_sequence" if stopped else generation.finish_reason
    if generation.finished_s is not None:
        totals.seconds += generation.finished_s - generation.submitted_s
    if totals.first_token_s is None and generation.first_token_s is not None:
        totals.first_token_s = generation.first_token_s - generation.submitted_s
    return token_ids


class _Chain:
    """The text of all requests as one: a character or a stop text may lie across their borders."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: list[int],
        stop_strings: tuple[str, ...],
        on_text: Callable[[str], None] | None,
    ) -> None:
        self.prompt_ids = prompt_ids
        self.written: list[str] = []
        self._decoder = tokenizer.detokenizer(prompt_ids)
        self._stops = StopStringFilter(stop_strings)
        self._on_text = on_text

    @property
    def stop_string(self) -> str | None:
        """The stop text that ended it, if one did."""
        return self._stops.matched

    def push(self, token_id: int) -> None:
        """Hand on what a token completes."""
        self._write(self._stops.push(self._decoder.push((token_id,))))

    def finish(self) -> None:
        """Hand on what was held back."""
        if self.stop_string is None:
            self._write(self._stops.push(self._decoder.finish()))
        if self.stop_string is None:
            self._write(self._stops.flush())

    def _write(self, text: str) -> None:
        self.written.append(text)
        if self._on_text is not None:
            self._on_text(text)
