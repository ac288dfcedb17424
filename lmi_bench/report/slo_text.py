"""The highest load under an SLO in words."""

from __future__ import annotations

from lmi_bench.analysis.slo_boundary import SloAnswer
from lmi_bench.report.formats import load_name, number

_SHAPES = {"smooth": "passed gradually", "cliff": "a cliff"}


def describe_answer(answer: SloAnswer) -> str:
    """What a search found, in two or three lines of plain text."""
    slos = ", ".join(answer.slo)
    spent = f"{number(answer.endpoint_seconds)} endpoint seconds"
    if answer.value is None:
        return (
            f"no load meets {slos}: {load_name(answer.load, answer.first_breach)} already misses "
            f"{answer.binding} ({spent})"
        )
    best = f"highest load that meets {slos}: {load_name(answer.load, answer.value)}"
    if answer.first_breach is None:
        return f"{best}, the highest that was tried: nothing broke ({spent})"
    breach = load_name(answer.load, answer.first_breach)
    return (
        f"{best}\n"
        f"  boundary between {number(answer.low)} and {number(answer.high)} (95 %), "
        f"{_SHAPES[answer.boundary or 'smooth']}; first breach at {breach}: {answer.binding}\n"
        f"  {spent}"
    )
