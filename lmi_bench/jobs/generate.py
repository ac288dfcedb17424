"""Generates text from a prompt, or scores given answers by their likelihood."""

import asyncio
import math
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from lmi_bench.analysis.results.confidence import CalibrationTable, calibration_table, confidence, shares
from lmi_bench.core.durable import json_values, read_text
from lmi_bench.core.errors import CapacityError, InputError, file_reason
from lmi_bench.core.listener import SILENT, Listener
from lmi_bench.core.scenario import parse_scenario
from lmi_bench.engine.replicas import ServingEngine
from lmi_bench.engine.scheduling.sampling import Ranked, SamplingParams
from lmi_bench.engine.scheduling.stats import SchedulerStats
from lmi_bench.engine.server.answer import Prompt
from lmi_bench.engine.server.codec import StopStringFilter
from lmi_bench.engine.tokenizer import Tokenizer
from lmi_bench.jobs.settings.bundled import GenerateSettings
from lmi_bench.jobs.settings.engine import stated_settings
from lmi_bench.targets.applies import refuse_idle
from lmi_bench.targets.bundled import open_torch_engine
from lmi_bench.targets.parts import EngineParts, close_all
from lmi_bench.targets.prompts import weights_notes
from lmi_bench.targets.quantizing import quantize_notes

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token's text and log-probability, and those of the likeliest tokens in its place."""

    text: str
    logprob: float
    likeliest: tuple[tuple[str, float], ...]


def generate(
    settings: GenerateSettings, listener: Listener = SILENT, *, on_text: Callable[[str], None] | None = None
) -> "Generated":
    """Generate a text. Raises InputError before a model is loaded."""
    sampling = replace(
        settings.sampling,
        logprobs=settings.confidence or settings.logprobs is not None,
        top_logprobs=settings.logprobs or 0,
    )
    text = prompt_text(settings.prompt)
    parts, tokenizer = open_engine(settings, listener)
    done = Generated(parts, tokenizer, tokenizer.encode(text), settings.stop, on_text)
    sampling = replace(sampling, eos_token_ids=tokenizer.eos_token_ids)
    asyncio.run(_generate(parts, done, sampling, until_done=settings.until_done))
    return done


def open_engine(settings: GenerateSettings, listener: Listener) -> tuple[EngineParts, Tokenizer]:
    """The engine with its model loaded, and its tokenizer."""
    stated = stated_settings(settings.model_options)
    engine = parse_scenario({"engine": stated}, source="generate").engine
    refuse_idle("bundled", [f"engine.{name}" for name in stated], engine)
    parts = open_torch_engine(settings.model, engine, listener)
    for line in (*weights_notes(settings.model), *quantize_notes(parts.quantized)):
        listener.note(line)
    assert parts.tokenizer is not None  # a torch engine has read its folder's
    return parts, parts.tokenizer


def run_closing(parts: EngineParts, work: Awaitable[T]) -> T:
    """The result of work on an engine that is closed afterwards."""

    async def run() -> T:
        try:
            return await work
        finally:
            await close_all(parts.executors)

    return asyncio.run(run())


def prompt_text(prompt: str) -> str:
    """The prompt, or standard input for `-`; raises InputError for an empty one."""
    try:
        text = sys.stdin.read() if prompt == "-" else prompt
    except UnicodeDecodeError as exc:
        raise InputError(f"standard input: {file_reason(exc)}") from exc
    if not text:
        raise InputError("the prompt is empty: give --prompt TEXT, or text on stdin")
    return text


async def _generate(parts: EngineParts, chain: "Generated", sampling: SamplingParams, *, until_done: bool) -> None:
    """Send one request, or further ones until the text ends."""
    token_ids, context_tokens = chain.prompt_ids, chain.context_tokens
    async with parts.engine() as engine:
        while True:
            room = context_tokens - len(token_ids)
            if room < 1:
                if not chain.requests:
                    raise CapacityError(
                        f"the prompt has {len(token_ids):,} tokens and the model's context "
                        f"{context_tokens:,}: no token is left to generate"
                    )
                chain.finish_reason = "context_full"
                break
            most = min(sampling.max_new_tokens, room)
            fewest = min(most, max(0, sampling.min_tokens - chain.tokens))
            limited = replace(sampling, max_new_tokens=most, min_tokens=fewest)
            token_ids = token_ids + await _one_request(engine, Prompt(token_ids, limited), chain)
            if not until_done or chain.finish_reason != "length":
                break
    chain.finish()
    chain.stats = engine.stats().done


async def _one_request(engine: ServingEngine, prompt: Prompt, chain: "Generated") -> list[int]:
    generation = engine.submit(prompt.token_ids, prompt.sampling)
    token_ids: list[int] = []
    try:
        async for event in generation:
            for number, token_id in enumerate(event.token_ids):
                token_ids.append(token_id)
                if event.logprobs is not None:
                    ranked = event.top_logprobs[number] if event.top_logprobs else ()
                    chain.score(token_id, event.logprobs[number], ranked)
                chain.push(token_id)
                if chain.stop_string is not None:
                    break
            if chain.stop_string is not None:
                break
    finally:
        generation.stop("cancelled")  # without effect if it has ended
    chain.requests += 1
    chain.tokens += len(token_ids)
    stopped = chain.stop_string is not None
    chain.finish_reason = "stop_sequence" if stopped else generation.finish_reason
    if generation.finished_s is not None:
        chain.busy_s += generation.finished_s - generation.submitted_s
    if not chain.first_token_s and generation.first_token_s is not None:
        chain.first_token_s = generation.first_token_s - generation.submitted_s
    return token_ids


class Generated:
    """The text of all requests as one, and their timing.

    A character or a stop text may span two requests.

    first_token_s   from the first request to its first token
    busy_s          in the engine
    scores          of each token, if log-probabilities are wanted
    finish_reason   `length`, `eos_token`, `stop_sequence` or `context_full`
    context_tokens  maximum length of a request with this model and cache
    """

    stats: SchedulerStats

    def __init__(
        self,
        parts: EngineParts,
        tokenizer: Tokenizer,
        prompt_ids: list[int],
        stop_strings: tuple[str, ...],
        on_text: Callable[[str], None] | None,
    ) -> None:
        self.prompt_ids = prompt_ids
        self.scores: list[ScoredToken] = []
        self.requests = self.tokens = 0
        self.busy_s = self.first_token_s = 0.0
        self.finish_reason: str | None = None
        self.context_tokens, self.back_end_note = parts.config.max_model_len, parts.back_end_note
        self._emulated = parts.quantized is not None and parts.quantized.emulated
        self._written: list[str] = []
        self._tokenizer = tokenizer
        self._decoder = tokenizer.detokenizer(prompt_ids)
        self._stops = StopStringFilter(stop_strings)
        self._on_text = on_text

    @property
    def text(self) -> str:
        """What was passed on."""
        return "".join(self._written)

    @property
    def seconds(self) -> float | None:
        """In the engine; None with emulated arithmetic: its speed means nothing."""
        return None if self._emulated else self.busy_s

    @property
    def stop_string(self) -> str | None:
        """The stop text that ended it; None: a token or something else did."""
        return self._stops.matched

    def score(self, token_id: int, logprob: float, ranked: Ranked) -> None:
        """Keep a token's log-probability."""
        decode = self._tokenizer.decode
        likeliest = tuple((decode([other]), value) for other, value in ranked)
        self.scores.append(ScoredToken(decode([token_id]), logprob, likeliest))

    def push(self, token_id: int) -> None:
        """Pass on the text that a token completes."""
        self._write(self._stops.push(self._decoder.push((token_id,))))

    def finish(self) -> None:
        """Pass on the text that was held back."""
        if self.stop_string is None:
            self._write(self._stops.push(self._decoder.finish()))
        if self.stop_string is None:
            self._write(self._stops.flush())

    def _write(self, text: str) -> None:
        self._written.append(text)
        if self._on_text is not None:
            self._on_text(text)


@dataclass(frozen=True, slots=True)
class LabelledPrompt:
    """A prompt with its possible answers; `answer` is the index of the right one."""

    prompt: str
    choices: tuple[str, ...]
    answer: int


@dataclass(frozen=True, slots=True)
class RankedChoice:
    """An answer's log-probability after the prompt.

    confidence  exp(mean log-probability) of its tokens
    share       its probability, 0 to 1, if it has to be one of the choices
    """

    choice: str
    tokens: int
    joint_logprob: float
    confidence: float
    share: float


def rank_choices(settings: GenerateSettings, listener: Listener = SILENT) -> list[RankedChoice]:
    """The choices by joint log-probability, the likeliest first."""
    text = prompt_text(settings.prompt)
    parts, tokenizer = open_engine(settings, listener)
    scores = run_closing(parts, _scores(parts, tokenizer, text, settings.choices))
    joints = [math.fsum(each) for each in scores]
    ranked = [
        RankedChoice(choice, len(each), joint, confidence(each), share)
        for choice, each, joint, share in zip(settings.choices, scores, joints, shares(joints), strict=True)
    ]
    return sorted(ranked, key=lambda each: each.joint_logprob, reverse=True)


def answer_questions(settings: GenerateSettings, listener: Listener = SILENT) -> CalibrationTable:
    """How often the likeliest answer is right, by its share of probability."""
    path = settings.questions
    assert path is not None
    questions = read_questions(path)
    parts, tokenizer = open_engine(settings, listener)

    async def answer() -> list[tuple[float, bool]]:
        results: list[tuple[float, bool]] = []
        for number, question in enumerate(questions, start=1):
            scores = await _scores(parts, tokenizer, question.prompt, question.choices)
            given = shares([math.fsum(score) for score in scores])
            best = given.index(max(given))
            results.append((given[best], best == question.answer))
            listener.progress("questions", number, len(questions))
        return results

    return calibration_table(run_closing(parts, answer()))


def read_questions(path: Path) -> list[LabelledPrompt]:
    """JSON lines with `prompt`, `choices` (two or more texts) and `answer` (one of them).

    Raises InputError that names the entry.
    """
    rows = json_values(read_text(path), path)
    questions = [_question(row, f"{path} entry {n}") for n, row in enumerate(rows, start=1)]
    if not questions:
        raise InputError(f"{path} has no question: write one JSON object a line")
    return questions


def _question(content: Any, where: str) -> LabelledPrompt:
    wanted = '{"prompt": "...", "choices": ["...", "..."], "answer": "..."}'
    try:
        prompt, choices, answer = content["prompt"], content["choices"], content["answer"]
    except (KeyError, TypeError) as exc:
        raise InputError(f"{where}: expected {wanted}") from exc
    texts = isinstance(choices, list) and all(isinstance(each, str) for each in choices)
    if not isinstance(prompt, str) or not prompt or not texts:
        raise InputError(f"{where}: expected {wanted}")
    if len(choices) < 2 or answer not in choices:
        raise InputError(f"{where}: the answer {answer!r} is not one of two or more choices")
    return LabelledPrompt(prompt, tuple(choices), choices.index(answer))


async def _scores(parts: EngineParts, tokenizer: Tokenizer, text: str, choices: Sequence[str]) -> list[list[float]]:
    """Log-probabilities of the tokens of each choice after the text."""
    prompt_ids = tokenizer.encode(text)
    scores = []
    for choice in choices:
        continuation = continuation_ids(tokenizer, text, prompt_ids, choice)
        longest = parts.config.max_model_len
        if len(prompt_ids) + len(continuation) > longest:
            raise CapacityError(
                f"prompt and choice have {len(prompt_ids) + len(continuation):,} tokens but the "
                f"model's context has {longest:,}: shorten them"
            )
        scores.append(await parts.loaded.score(prompt_ids, continuation))
    return scores


def continuation_ids(tokenizer: Tokenizer, text: str, prompt_ids: Sequence[int], choice: str) -> list[int]:
    """The tokens of a choice after the prompt; raises InputError for a choice without a token.

    The choice is tokenized alone only if the prompt's tokens would change beside it.
    """
    whole = tokenizer.encode(text + choice)
    if len(whole) > len(prompt_ids) and whole[: len(prompt_ids)] == list(prompt_ids):
        return whole[len(prompt_ids) :]
    alone = tokenizer.encode(choice, add_special_tokens=False)
    if not alone:
        raise InputError(f"choice {choice!r} has no token: give a text")
    return alone
