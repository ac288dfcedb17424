"""`generate --calibrate`: how often the choice that a model is surest of is the right one."""

from __future__ import annotations

import asyncio
import json
import math
from dataclasses import dataclass
from pathlib import Path

from lmi_bench.analysis.confidence import calibration, shares
from lmi_bench.cli.compose import EngineParts, close_all, open_torch_engine
from lmi_bench.cli.console import print_table, progress, say
from lmi_bench.cli.generate_run import score_choices
from lmi_bench.errors import InputError
from lmi_bench.report.formats import share
from lmi_bench.scenario import EngineSection


@dataclass(frozen=True, slots=True)
class Case:
    """One question with its choices; answer: the place of the right one."""

    prompt: str
    choices: tuple[str, ...]
    answer: int


def read_cases(path: Path) -> list[Case]:
    """JSON lines of `prompt`, `choices`, `answer` (a choice, or its place from 0).

    Raises InputError that names the first line that is none.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as exc:
        raise InputError(f"cannot read {path}: {exc}") from exc
    cases = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            content = json.loads(line)
            choices = tuple(str(choice) for choice in content["choices"])
            answer = content["answer"]
            place = answer if isinstance(answer, int) else choices.index(str(answer))
            cases.append(Case(str(content["prompt"]), choices, place))
            if len(choices) < 2 or not 0 <= place < len(choices):
                raise ValueError("two choices at least, and an answer among them")
        except (ValueError, KeyError, TypeError) as exc:
            raise InputError(
                f"{path}: line {number} is not {{prompt, choices, answer}}: {exc}"
            ) from exc
    if not cases:
        raise InputError(f"{path} holds no case: write one JSON object a line")
    return cases


def run(model: str, settings: EngineSection, path: Path) -> None:
    """Rank the choices of every case and print confidence against accuracy."""
    cases = read_cases(path)
    parts = open_torch_engine(model, settings)
    answers = asyncio.run(_answers(parts, cases))
    bins, error = calibration(answers)
    rows = [
        {
            "confidence": f"{each.low:.1f} to {each.high:.1f}",
            "answers": str(each.count),
            "mean confidence": share(each.confidence),
            "right": share(each.accuracy),
            "overconfident by": share(each.overconfidence),
        }
        for each in bins
    ]
    print_table("Confidence of the likeliest choice against how often it is right", rows)
    right = sum(correct for _, correct in answers)
    say(
        f"{right} of {len(answers)} right; expected calibration error {share(error)}: "
        "probabilities of tokens are overconfident unless they were calibrated"
    )


async def _answers(parts: EngineParts, cases: list[Case]) -> list[tuple[float, bool]]:
    found = []
    try:
        with progress() as report:
            for number, case in enumerate(cases, start=1):
                scored = await score_choices(parts, case.prompt, case.choices)
                among = shares([math.fsum(logprobs) for logprobs in scored])
                best = max(range(len(among)), key=among.__getitem__)
                found.append((among[best], best == case.answer))
                report("cases", number, len(cases))
    finally:
        await close_all(parts.executors)
    return found
