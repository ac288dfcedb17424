"""One text from a prompt to its end, over as many requests as it takes; or answers ranked."""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from lmi_bench.analysis.results.confidence import confidence
from lmi_bench.cli.console import note, terminal, warn
from lmi_bench.core.errors import EXIT_DONE, EXIT_FAILED, CapacityError, InputError
from lmi_bench.core.scenario import EngineSection
from lmi_bench.engine.replicas import ServingEngine
from lmi_bench.engine.scheduling.sampling import Ranked, SamplingParams
from lmi_bench.engine.server.answer import Prompt
from lmi_bench.engine.server.stop_strings import StopStringFilter
from lmi_bench.engine.tokenizer import Tokenizer
from lmi_bench.jobs.choices import calibrate, rank, read_questions
from lmi_bench.targets.applies import idle_in_engine
from lmi_bench.targets.bundled import open_torch_engine
from lmi_bench.targets.launching import follow_launcher
from lmi_bench.targets.parts import EngineParts
from lmi_bench.targets.quantizing import quantize_notes


@dataclass(frozen=True, slots=True)
class Wish:
    """What is to be generated. `prompt` is the text, or - for stdin.

    expected_ends  finish reasons that count as a success; empty: all
    """

    prompt: str
    sampling: SamplingParams
    stop_strings: tuple[str, ...] = ()
    until_done: bool = False
    confidence: bool = False
    show_logprobs: bool = False
    expected_ends: tuple[str, ...] = ()


@dataclass(slots=True)
class Totals:
    """What came of it, over all requests. `seconds` is their time in the engine.

    ranked  each token with the likeliest ones in its place, where they were asked for
    """

    requests: int = 0
    tokens: int = 0
    seconds: float = 0.0
    first_token_s: float | None = None
    logprobs: list[float] = field(default_factory=list)
    ranked: list[tuple[int, Ranked]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_string: str | None = None


def run(
    model: str,
    settings: EngineSection,
    wish: Wish,
    *,
    choices: Sequence[str] = (),
    questions: Path | None = None,
) -> int:
    """Generate, or rank `choices`, or hold answers against the truth; returns the exit code.

    Raises InputError before a model is loaded.
    """
    if follow_launcher(settings):
        return EXIT_DONE
    if questions is not None:
        labelled = read_questions(questions)
        with terminal() as listener:
            parts = open_torch_engine(model, settings, listener)
        assert parts.tokenizer is not None  # a torch engine has read its folder's
        asyncio.run(calibrate(parts, parts.tokenizer, labelled))
        return EXIT_DONE
    text = sys.stdin.read() if wish.prompt == "-" else wish.prompt
    if not text:
        raise InputError("the prompt is empty: give --prompt TEXT, or text on stdin")
    with terminal() as listener:
        parts = open_torch_engine(model, settings, listener)
    for line in (*quantize_notes(parts.quantized), *idle_in_engine("bundled", settings)):
        note(line)
    assert parts.tokenizer is not None  # a torch engine has read its folder's
    if choices:
        asyncio.run(rank(parts, parts.tokenizer, text, choices))
        return EXIT_DONE
    totals = asyncio.run(_generate(parts, parts.tokenizer, text, wish))
    speed = totals.tokens / totals.seconds if totals.seconds else 0.0
    first_ms = (totals.first_token_s or 0.0) * 1e3
    noun = "request" if totals.requests == 1 else "requests"
    emulated = parts.quantized is not None and parts.quantized.emulated
    timing = f" and {totals.seconds:.2f} s: {speed:.1f} tok/s, first token after {first_ms:.0f} ms"
    note(
        f"{totals.tokens} tokens in {totals.requests} {noun}{'' if emulated else timing}, ended "
        f"by {totals.finish_reason}; {parts.back_end_note}"
    )
    if wish.show_logprobs:
        for line in logprob_lines(totals, parts.tokenizer):
            note(line)
    if wish.confidence and totals.logprobs:
        joint = math.fsum(totals.logprobs)
        note(
            f"confidence {confidence(totals.logprobs):.3g} = exp(mean log-probability) of "
            f"{len(totals.logprobs)} tokens; joint log-probability {joint:.2f}. Models are "
            "overconfident: compare, do not trust (--questions shows by how much)"
        )
    end = explain_end(totals, wish.sampling.max_new_tokens, parts.config.max_model_len)
    if wish.expected_ends and totals.finish_reason not in wish.expected_ends:
        warn(f"{end}; --expect-end {' or '.join(wish.expected_ends)} is not what happened")
        return EXIT_FAILED
    note(end)
    return EXIT_DONE


def logprob_lines(totals: Totals, tokenizer: Tokenizer) -> list[str]:
    """A line a token: its text and log-probability, then the likeliest ones in its place."""
    lines = []
    for (token_id, ranked), logprob in zip(totals.ranked, totals.logprobs, strict=True):
        others = ", ".join(f"{tokenizer.decode([i])!r} {value:.3f}" for i, value in ranked)
        line = f"{tokenizer.decode([token_id])!r} {logprob:.3f}"
        lines.append(f"{line}; likeliest {others}" if others else line)
    return lines


def explain_end(totals: Totals, max_new_tokens: int, max_model_len: int) -> str:
    """Why the text ends where it does, and what to do if that is not its end."""
    match totals.finish_reason:
        case "length" if totals.tokens < max_new_tokens * totals.requests:
            return f"cut off: prompt and text fill the model's context of {max_model_len:,} tokens"
        case "length":
            return (
                f"cut off: --max-new-tokens {max_new_tokens} were used up and the model had not "
                "ended; raise it, or ask on with --until-done"
            )
        case "stop_sequence" if totals.stop_string is None:
            return "ended by a stop token"
        case "stop_sequence":
            return f"ended by the stop text {totals.stop_string!r}, not by the model"
        case "context_full":
            return "cut off: the model's context is full"
        case reason:
            return f"ended by the model ({reason})"


async def _generate(parts: EngineParts, tokenizer: Tokenizer, text: str, wish: Wish) -> Totals:
    """Print the text as it comes."""
    totals = Totals()
    token_ids = tokenizer.encode(text)
    chain = _Chain(tokenizer, token_ids, wish.stop_strings)
    sampling = replace(wish.sampling, eos_token_ids=tokenizer.eos_token_ids)
    async with parts.engine() as engine:
        while True:
            room = parts.config.max_model_len - len(token_ids)
            if room < 1:
                if not totals.requests:
                    raise CapacityError(
                        f"the prompt has {len(token_ids):,} tokens and the model's context "
                        f"{parts.config.max_model_len:,}: no token is left to generate"
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
            if not wish.until_done or totals.finish_reason != "length":
                break
    chain.finish()
    stats = engine.stats()
    if stats.draft_acceptance_frac is not None:
        note(
            f"speculation: {stats.draft_acceptance_frac:.1%} of {stats.drafted_tokens} drafted "
            f"tokens held, {stats.tokens_per_decode:.2f} tokens a step"
        )
    return totals


async def _one_request(
    engine: ServingEngine, prompt: Prompt, chain: _Chain, totals: Totals
) -> list[int]:
    """Stream one request to stdout; returns its token ids."""
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
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int], stop_strings: tuple[str, ...]
    ) -> None:
        self._decoder = tokenizer.detokenizer(prompt_ids)
        self._stops = StopStringFilter(stop_strings)

    @property
    def stop_string(self) -> str | None:
        """The stop text that ended it, if one did."""
        return self._stops.matched

    def push(self, token_id: int) -> None:
        """Write what a token completes."""
        self._write(self._stops.push(self._decoder.push((token_id,))))

    def finish(self) -> None:
        """Write what was held back, and end the line."""
        if self.stop_string is None:
            self._write(self._stops.push(self._decoder.finish()))
        if self.stop_string is None:
            self._write(self._stops.flush())
        self._write("\n")

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()
