"""One text from a prompt to its end, over as many requests as it takes; or answers ranked."""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from lmi_bench.cli.compose import EngineParts, close_all, open_torch_engine
from lmi_bench.cli.console import note, print_table
from lmi_bench.cli.quantizing import quantize_notes
from lmi_bench.engine.replicas import ServingEngine
from lmi_bench.engine.scheduling.sampling import SamplingParams
from lmi_bench.engine.server.answer import Answer, Prompt
from lmi_bench.engine.tokenizer import Tokenizer
from lmi_bench.errors import CapacityError, InputError
from lmi_bench.scenario import EngineSection


@dataclass(frozen=True, slots=True)
class Wish:
    """What is to be generated. `prompt` is the text, or - for stdin."""

    prompt: str
    sampling: SamplingParams
    stop_strings: tuple[str, ...] = ()
    until_done: bool = False
    confidence: bool = False


@dataclass(slots=True)
class Totals:
    """What came of it, over all requests. `seconds` is their time in the engine."""

    requests: int = 0
    tokens: int = 0
    seconds: float = 0.0
    first_token_s: float | None = None
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None


def run(model: str, settings: EngineSection, wish: Wish, *, choices: Sequence[str]) -> None:
    """Generate, or rank `choices`; raises InputError before a model is loaded."""
    text = sys.stdin.read() if wish.prompt == "-" else wish.prompt
    if not text:
        raise InputError("the prompt is empty: give --prompt TEXT, or text on stdin")
    parts = open_torch_engine(model, settings)
    for line in quantize_notes(parts.quantized):
        note(line)
    assert parts.tokenizer is not None  # a torch engine has read its folder's
    if choices:
        asyncio.run(_rank(parts, parts.tokenizer, text, choices))
        return
    totals = asyncio.run(_generate(parts, parts.tokenizer, text, wish))
    speed = totals.tokens / totals.seconds if totals.seconds else 0.0
    first_ms = (totals.first_token_s or 0.0) * 1e3
    noun = "request" if totals.requests == 1 else "requests"
    emulated = parts.quantized is not None and parts.quantized.emulated
    timing = f" and {totals.seconds:.2f} s: {speed:.1f} tok/s, first token after {first_ms:.0f} ms"
    note(
        f"{totals.tokens} tokens in {totals.requests} {noun}{'' if emulated else timing}, ended "
        f"by {totals.finish_reason}"
    )
    if wish.confidence and totals.logprobs:
        joint = math.fsum(totals.logprobs)
        note(
            f"confidence {confidence(totals.logprobs):.3f} = exp(mean log-probability) of "
            f"{len(totals.logprobs)} tokens; joint log-probability {joint:.2f}. Models are "
            "overconfident: compare, do not trust"
        )


def confidence(logprobs: Sequence[float]) -> float:
    """exp(mean log-probability): the geometric mean of the tokens' probabilities, 0 to 1."""
    return math.exp(math.fsum(logprobs) / len(logprobs))


async def _generate(parts: EngineParts, tokenizer: Tokenizer, text: str, wish: Wish) -> Totals:
    """Print the text as it comes."""
    totals = Totals()
    token_ids = tokenizer.encode(text)
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
            asked = replace(sampling, max_new_tokens=min(sampling.max_new_tokens, room))
            prompt = Prompt(token_ids, asked, wish.stop_strings)
            token_ids = token_ids + await _one_request(engine, tokenizer, prompt, totals)
            if not wish.until_done or totals.finish_reason != "length":
                break
    sys.stdout.write("\n")
    stats = engine.stats()
    if stats.draft_acceptance_frac is not None:
        note(
            f"speculation: {stats.draft_acceptance_frac:.1%} of {stats.drafted_tokens} drafted "
            f"tokens held, {stats.tokens_per_decode:.2f} tokens a step"
        )
    return totals


async def _one_request(
    engine: ServingEngine, tokenizer: Tokenizer, prompt: Prompt, totals: Totals
) -> list[int]:
    """Stream one request to stdout; returns its token ids."""
    generation = engine.submit(prompt.token_ids, prompt.sampling)
    answer = Answer(generation, prompt, tokenizer.detokenizer())
    try:
        async for pieces in answer.chunks():
            sys.stdout.write("".join(piece.text for piece in pieces))
            sys.stdout.flush()
    finally:
        answer.close()
    totals.requests += 1
    totals.tokens += len(answer.pieces)
    totals.logprobs += [piece.logprob for piece in answer.pieces if piece.logprob is not None]
    totals.finish_reason = answer.finish_reason
    if generation.finished_s is not None:
        totals.seconds += generation.finished_s - generation.submitted_s
    if totals.first_token_s is None and generation.first_token_s is not None:
        totals.first_token_s = generation.first_token_s - generation.submitted_s
    return [piece.token_id for piece in answer.pieces]


async def _rank(
    parts: EngineParts, tokenizer: Tokenizer, text: str, choices: Sequence[str]
) -> None:
    """Print the choices, the likeliest first."""
    score = parts.score
    assert score is not None  # a torch engine scores
    prompt_ids = tokenizer.encode(text)
    rows = []
    try:
        for choice in choices:
            continuation = continuation_ids(tokenizer, text, prompt_ids, choice)
            longest = parts.config.max_model_len
            if len(prompt_ids) + len(continuation) > longest:
                raise CapacityError(
                    f"prompt and choice have {len(prompt_ids) + len(continuation):,} tokens, the "
                    f"model's context {longest:,}: shorten them"
                )
            rows.append((choice, await score(prompt_ids, continuation)))
    finally:
        await close_all(parts.executors)
    rows.sort(key=lambda row: math.fsum(row[1]), reverse=True)
    print_table(
        "Choices by joint log-probability",
        [
            {
                "choice": choice.strip(),
                "tokens": len(logprobs),
                "joint log-probability": f"{math.fsum(logprobs):.3f}",
                "confidence": f"{confidence(logprobs):.3f}",
            }
            for choice, logprobs in rows
        ],
        left=("choice",),
    )


def continuation_ids(
    tokenizer: Tokenizer, text: str, prompt_ids: Sequence[int], choice: str
) -> list[int]:
    """The tokens of a choice behind the prompt.

    As the whole text is tokenized, where the prompt's tokens stay the same in it; else on its own.
    Raises InputError for a choice without a token.
    """
    whole = tokenizer.encode(text + choice)
    if len(whole) > len(prompt_ids) and whole[: len(prompt_ids)] == list(prompt_ids):
        return whole[len(prompt_ids) :]
    alone = tokenizer.encode(choice, add_special_tokens=False)
    if not alone:
        raise InputError(f"choice {choice!r} has no token: give a text")
    return alone
