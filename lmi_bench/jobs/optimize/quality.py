"""What a variant's weights are worth: perplexity of a text, agreement with the baseline."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from lmi_bench.core.errors import EngineError
from lmi_bench.engine.scheduling.sampling import SamplingParams
from lmi_bench.targets.parts import EngineParts, close_all

_WINDOW_TOKENS: Final = 256


@dataclass(frozen=True, slots=True)
class Prompted:
    """A request whose greedy output is compared: its token ids, and how many to generate."""

    token_ids: list[int]
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Quality:
    """scores     natural log-probability of each token of the text behind those before it
    outputs      greedy tokens of each prompted request
    """

    scores: tuple[float, ...]
    outputs: tuple[tuple[int, ...], ...]

    @property
    def perplexity(self) -> float:
        """exp(-mean log-probability)."""
        return math.exp(-math.fsum(self.scores) / len(self.scores))


def measure_quality(
    parts: EngineParts, text_ids: Sequence[int], prompts: Sequence[Prompted]
) -> Quality:
    """Score the text window by window, then generate; ends with the engine closed."""
    try:
        scores = asyncio.run(_score(parts, text_ids))
    except BaseException:
        asyncio.run(close_all(parts.executors))
        raise
    return Quality(tuple(scores), tuple(asyncio.run(_generate(parts, prompts))))


def measure_products(parts: EngineParts, concurrency: Sequence[int]) -> dict[int, float]:
    """Seconds of a decode step's matrix products, by the number of sequences; none where they
    cannot be told. Before `measure_quality`."""
    if parts.loaded is None:
        return {}
    time_products = parts.loaded.time_products

    async def measure() -> dict[int, float]:
        times = {
            rows: await time_products(rows) for rows in sorted({min(concurrency), max(concurrency)})
        }
        return {rows: time_s for rows, time_s in times.items() if time_s is not None}

    return asyncio.run(measure())


async def _score(parts: EngineParts, text_ids: Sequence[int]) -> list[float]:
    assert parts.loaded is not None  # a torch engine scores
    score = parts.loaded.score
    room = parts.config.num_blocks * parts.config.block_size
    length = min(_WINDOW_TOKENS, parts.config.max_model_len, room)
    scores: list[float] = []
    for start in range(0, len(text_ids) - 1, length):
        window = text_ids[start : start + length]
        if len(window) > 1:
            scores += await score(window[:1], window[1:])
    return scores


async def _generate(parts: EngineParts, prompts: Sequence[Prompted]) -> list[tuple[int, ...]]:
    outputs = []
    async with parts.engine() as engine:
        running = [
            engine.submit(
                prompt.token_ids,
                SamplingParams(max_new_tokens=prompt.output_tokens, ignore_eos=True),
            )
            for prompt in prompts
        ]
        for generation in running:
            await generation.wait()
            tokens = tuple(t for event in generation.events for t in event.token_ids)
            if not tokens:
                raise EngineError(f"a request of {len(prompts)} gave no token")
            outputs.append(tokens)
    return outputs


def agreement_frac(outputs: Sequence[Sequence[int]], reference: Sequence[Sequence[int]]) -> float:
    """Mean over requests of the share of tokens before the first that differs, 0 to 1.

    After that token the texts differ, so that later ones say nothing.
    """
    shares = []
    for mine, theirs in zip(outputs, reference, strict=True):
        same = next(
            (n for n, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b),
            min(len(mine), len(theirs)),
        )
        shares.append(same / max(len(mine), len(theirs)))
    return math.fsum(shares) / len(shares)


def score_shift(scores: Sequence[float], reference: Sequence[float]) -> float:
    """Mean |difference| of the log-probabilities of the same tokens: 0 for the same model."""
    pairs = zip(scores, reference, strict=True)
    return math.fsum(abs(a - b) for a, b in pairs) / len(scores)
