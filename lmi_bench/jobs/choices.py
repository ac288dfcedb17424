"""Given answers scored instead of generated: ranked by likelihood, and held against the truth."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lmi_bench.analysis.results.confidence import calibration_table, confidence, shares
from lmi_bench.cli.console import print_table, progress, say
from lmi_bench.core.errors import CapacityError, InputError, file_reason
from lmi_bench.engine.tokenizer import Tokenizer
from lmi_bench.targets.parts import EngineParts, close_all


@dataclass(frozen=True, slots=True)
class LabelledPrompt:
    """A prompt with its possible answers, one of which is right: `answer` is its place."""

    prompt: str
    choices: tuple[str, ...]
    answer: int


async def rank(parts: EngineParts, tokenizer: Tokenizer, text: str, choices: Sequence[str]) -> None:
    """Print the choices, the likeliest first."""
    try:
        scores = await _scores(parts, tokenizer, text, choices)
    finally:
        await close_all(parts.executors)
    rows = sorted(
        zip(choices, scores, shares([math.fsum(score) for score in scores]), strict=True),
        key=lambda row: math.fsum(row[1]),
        reverse=True,
    )
    print_table(
        "Choices by joint log-probability",
        [
            {
                "choice": choice.strip(),
                "tokens": len(logprobs),
                "joint log-probability": f"{math.fsum(logprobs):.3f}",
                "confidence": f"{confidence(logprobs):.3g}",
                "share of the choices": f"{share:.1%}",
            }
            for choice, logprobs, share in rows
        ],
        left=("choice",),
    )


async def calibrate(
    parts: EngineParts, tokenizer: Tokenizer, questions: Sequence[LabelledPrompt]
) -> None:
    """Print how often the likeliest answer is right, by the share that the model gives it."""
    results: list[tuple[float, bool]] = []
    try:
        with progress() as report:
            for number, question in enumerate(questions, start=1):
                scores = await _scores(parts, tokenizer, question.prompt, question.choices)
                given = shares([math.fsum(score) for score in scores])
                best = given.index(max(given))
                results.append((given[best], best == question.answer))
                report("questions", number, len(questions))
    finally:
        await close_all(parts.executors)
    table = calibration_table(results)
    print_table(
        "The likeliest answer: how sure the model is, and how often it is right",
        [
            {
                "share given": f"{row.low_frac:.0%} to {row.high_frac:.0%}",
                "questions": row.count,
                "mean share": f"{row.mean_confidence:.1%}",
                "right": f"{row.right_frac:.1%}",
                "too sure by": f"{row.mean_confidence - row.right_frac:+.1%}",
            }
            for row in table.rows
        ],
        left=("share given",),
    )
    say(
        f"{table.right} of {table.count} right ({table.right_frac:.1%}), mean share "
        f"{table.mean_confidence:.1%}; expected calibration error {table.expected_error:.1%}"
    )


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
    score = parts.score
    assert score is not None  # a torch engine scores
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
