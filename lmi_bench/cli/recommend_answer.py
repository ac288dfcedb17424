"""The fleet that is recommended, or comes nearest, as a buyer reads it."""

from __future__ import annotations

from collections.abc import Iterator

from lmi_bench.analysis.fleet.answer import Candidate, Recommendation
from lmi_bench.analysis.fleet.request import RecommendRequest
from lmi_bench.cli.recommend_extras import (
    attainment_lines,
    measure_next_lines,
    money_lines,
    worst_minutes,
)
from lmi_bench.cli.recommend_table import interval, short


def answer_lines(answer: Recommendation, request: RecommendRequest) -> Iterator[str]:
    """What to rent, why, what it carries and costs, and what to measure before buying."""
    best = answer.recommended
    if best is not None:
        yield f"recommended: {described(best)}"
        yield from _figures(best, request)
        yield f"  why: {best.reason}"
        yield from (f"  {text}" for text in money_lines(best))
        yield from (f"  {text}" for text in attainment_lines(best))
    elif answer.nearest is not None:
        verb = "carries" if answer.missed == "the load" else "keeps"
        yield f"no candidate {verb} {answer.missed}; the nearest: {described(answer.nearest)}"
        yield f"  {answer.nearest.reason}"
        yield from _figures(answer.nearest, request)
    yield from measure_next_lines(answer)
    if best is None and answer.nearest is None:
        yield "the model fits into none of these machines: see the reasons above"


def described(candidate: Candidate) -> str:
    """Machines, degree, copies, setting."""
    copies = "copy" if candidate.copies == 1 else "copies"
    text = (
        f"{candidate.instances} x {candidate.instance}, TP {candidate.tensor_parallel}, "
        f"{candidate.copies} {copies} a machine"
    )
    setting = candidate.setting.describe()
    return f"{text}, {setting}" if setting else text


def _figures(candidate: Candidate, request: RecommendRequest) -> Iterator[str]:
    yield f"  cost: {_cost(candidate)}"
    carried = candidate.figures.get("capacity_rate_per_s")
    if carried is not None:
        asked = "" if request.rate_per_s is None else f"; {request.rate_per_s:g} asked for"
        within = " within the SLOs" if candidate.slos else ""
        tokens = candidate.figures.get("throughput_tokens_per_s")
        told = "" if tokens is None else f"; {interval(tokens)} output tok/s at this load"
        yield f"  carries {interval(carried)} req/s{within}{asked}{told}"
    for outlook in candidate.slos:
        key = "{}_ms".format(outlook.slo.split("<")[0])
        figure = candidate.figures.get(key)
        shown = "withheld" if figure is None else f"{interval(figure)} ms"
        slack = ""
        if outlook.predicted_ms is not None:
            left = outlook.limit_ms - outlook.predicted_ms
            slack = f", {short(abs(left))} ms {'to spare' if left >= 0 else 'too slow'}"
        worst = worst_minutes(candidate, outlook.slo)
        yield f"  {outlook.slo}: {shown}{slack}, {outlook.confidence}{worst}"


def _cost(candidate: Candidate) -> str:
    if candidate.price_usd_per_hour is None:
        return "price unknown"
    text = f"USD {candidate.price_usd_per_hour:,.2f} per hour"
    if candidate.usd_per_month is not None:
        text += f", {candidate.usd_per_month:,.0f} a month"
    per_token = candidate.usd_per_1m_output_tokens
    if per_token is not None:
        text += f", {per_token:,.2f} for 1M output tokens at this load"
    return text
