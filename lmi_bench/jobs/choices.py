"""Given answers scored instead of generated: ranked by likelihood, or compared with the truth."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lmi_bench.analysis.results.confidence import (
    CalibrationTable,
    calibration_table,
    confidence,
    shares,
)
from lmi_bench.core.errors import CapacityError, InputError, file_reason
from lmi_bench.core.listener import SILENT, Listener
from lmi_bench.engine.tokenizer import Tokenizer
from lmi_bench.jobs.generate import open_engine, prompt_text
from lmi_bench.jobs.settings.generate import GenerateSettings
from lmi_bench.targets.parts import EngineParts, close_all


@dataclass(frozen=True, slots=True)
class LabelledPrompt:
    """A prompt with its possible answers, one of which is right: `answer` is its place."""

    prompt: str
    choices: tuple[str, ...]
    answer: int


@dataclass(frozen=True, slots=True)
class RankedChoice:
    """An answer's log-probability behind the prompt.

    confidence  exp(mean log-probability) of its tokens
    share       its probability, 0 to 1, if it has to be one of the choices
    """

    choice: str
    tokens: int
    joint_logprob: float
    confidence: float
    share: float


def rank_choices(
    settings: GenerateSettings, listener: Listener = SILENT
) -> list[RankedChoice] | None:
    """The choices by joint log-probability, the likeliest first.

    None in a process that a launcher has started as a further rank.
    """
    opened = open_engine(settings, listener, lambda: prompt_text(settings.prompt))
    if opened is None:
        return None
    parts, tokenizer, text = opened

    async def score() -> list[list[float]]:
        try:
            return await _scores(parts, tokenizer, text, settings.choices)
        finally:
            await close_all(parts.executors)

    scores = asyncio.run(score())
    joints = [math.fsum(each) for each in scores]
    ranked = [
        RankedChoice(choice, len(each), joint, confidence(each), share)
        for choice, each, joint, share in zip(
            settings.choices, scores, joints, shares(joints), strict=True
        )
    ]
    return sorted(ranked, key=lambda each: each.joint_logprob, reverse=True)


def answer_questions(
    settings: GenerateSettings, listener: Listener = SILENT
) -> CalibrationTable | None:
    """How often the likeliest answer is right, by the share that the model gives it.

    None in a process that a launcher has started as a further rank.
    """
    path = settings.questions
    assert path is not None
    opened = open_engine(settings, listener, lambda: read_questions(path))
    if opened is None:
        return None
    parts, tokenizer, questions = opened

    async def answer() -> list[tuple[float, bool]]:
        results: list[tuple[float, bool]] = []
        try:
            for number, question in enumerate(questions, start=1):
                scores = await _scores(parts, tokenizer, question.prompt, question.choices)
                given = shares([math.fsum(score) for score in scores])
                best = given.index(max(given))
                results.append((given[best], best == question.answer))
                listener.progress("questions", number, len(questions))
        finally:
            await close_all(parts.executors)
        return results

    return calibration_table(asyncio.run(answer()))


def read_questions(path: Path) -> list[LabelledPrompt]:
    """JSON lines with `prompt`, `choices` (two or more texts) and `answer` (one of them).

    Raises InputError that names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as exc:
        raise InputError(f"cannot read {path}: {file_reason(exc)}") from exc
    questions = [
        _question(line, f"{path} line {number}")
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not questions:
        raise InputError(f"{path} holds no question: one JSON object a line")
    return questions


def _question(line: str, where: str) -> LabelledPrompt:
    wanted = '{"prompt": "...", "choices": ["...", "..."], "answer": "..."}'
    try:
        content = json.loads(line)
        prompt, choices = content["prompt"], tuple(content["choices"])
        answer = content["answer"]
    except (ValueError, KeyError, TypeError) as exc:
        raise InputError(f"{where}: expected {wanted}") from exc
    if not isinstance(prompt, str) or not prompt or not all(isinstance(c, str) for c in choices):
        raise InputError(f"{where}: expected {wanted}")
    if len(choices) < 2 or answer not in choices:
        raise InputError(f"{where}: the answer {answer!r} is not one of two or more choices")
    return LabelledPrompt(prompt, choices, choices.index(answer))


async def _scores(
    parts: EngineParts, tokenizer: Tokenizer, text: str, choices: Sequence[str]
) -> list[list[float]]:
    """Log-probabilities of the tokens of each choice behind the text."""
    assert parts.loaded is not None  # a torch engine scores
    score = parts.loaded.score
    prompt_ids = tokenizer.encode(text)
    scores = []
    for choice in choices:
        continuation = continuation_ids(tokenizer, text, prompt_ids, choice)
        longest = parts.config.max_model_len
        if len(prompt_ids) + len(continuation) > longest:
            raise CapacityError(
                f"prompt and choice have {len(prompt_ids) + len(continuation):,} tokens, the "
                f"model's context {longest:,}: shorten them"
            )
        scores.append(await score(prompt_ids, continuation))
    return scores


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
