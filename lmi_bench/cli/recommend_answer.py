"""The fleet that is recommended, or comes nearest, as a buyer reads it, and what to do next."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from lmi_bench.analysis.fleet.answer import Candidate, Recommendation
from lmi_bench.analysis.fleet.money import price_line
from lmi_bench.analysis.fleet.request import RecommendRequest
from lmi_bench.analysis.fleet.vary import Variation
from lmi_bench.analysis.model.engine_setting import EngineSetting
from lmi_bench.cli.recommend_table import interval
from lmi_bench.report.formats import number

if TYPE_CHECKING:
    from lmi_bench.jobs.recommend import Advice

_SHOWN_UNPRICED = 5
_SHOWN_PROBES = 2
_OWN_GAPS = "; an ITL limit is held against each request's own gaps"
_PROBE_REQUESTS = 2000  # a p90 within some per cent, though neighbours move together


def answer_lines(answer: Recommendation, request: RecommendRequest) -> Iterator[str]:
    """What to rent, why, what it carries and costs, and what to measure before buying."""
    best = answer.recommended
    if best is not None:
        yield f"recommended: {_fleet(best, with_copies=True)}"
        yield from _figures(best, request)
        yield f"  why: {best.reason}"
        yield from (f"  {text}" for text in _money_lines(best))
        yield from (f"  {text}" for text in _attainment_lines(best))
    elif answer.nearest is not None:
        verb = "carries" if answer.missed == "the load" else "keeps"
        nearest = _fleet(answer.nearest, with_copies=True)
        yield f"no candidate {verb} {answer.missed}; the nearest: {nearest}"
        yield f"  {answer.nearest.reason}"
        yield from _figures(answer.nearest, request)
    yield from _measure_next_lines(answer)
    if best is None and answer.nearest is None:
        yield "the model fits into none of these machines: see the reasons above"


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
            slack = f", {number(abs(left))} ms {'to spare' if left >= 0 else 'too slow'}"
        worst = _worst_minutes(candidate, outlook.slo)
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


def _money_lines(chosen: Candidate) -> Iterator[str]:
    """The chosen fleet's price, how it is bought, and what availability adds."""
    cost = chosen.cost
    yield f"price: {price_line(cost)}; bought {cost['purchase']}"
    if cost["discount"] and not cost["purchase"].startswith("spot"):
        yield (
            f"  commitment: pays where a machine is needed for more than "
            f"{cost['break_even_utilisation']:.0%} of the hours (break-even utilisation)"
        )
    if cost["availability"] != "none":
        extra = cost["availability_usd_per_hour"]
        added = "price unknown" if extra is None else f"USD {extra:,.2f} per hour"
        yield (
            f"availability {cost['availability']}: {cost['machines_for_the_load']} machine(s) "
            f"carry the load, {cost['spare_machines']} more add {added}"
        )
    yield f"failure unit: {cost['failure_unit']}"


def unpriced_lines(answer: Recommendation) -> Iterator[str]:
    """Candidates without a price, with the price at which each would win."""
    wins = [
        (price, candidate)
        for candidate in answer.candidates
        if (price := candidate.cost.get("wins_below_usd_per_machine_hour")) is not None
    ]
    best: dict[str, tuple[float, Candidate]] = {}  # of each machine the layout worth most
    for price, candidate in wins:
        if price > best.get(candidate.instance, (0.0, candidate))[0]:
            best[candidate.instance] = (price, candidate)
    for price, candidate in list(best.values())[:_SHOWN_UNPRICED]:
        yield (
            f"no price known: {_fleet(candidate)} would win below USD {price:,.2f} a machine "
            "and hour"
        )
    if len(best) > _SHOWN_UNPRICED:
        yield f"and {len(best) - _SHOWN_UNPRICED} more unpriced machines, in the --json file"


def _fleet(candidate: Candidate, *, with_copies: bool = False) -> str:
    """Machines, degree, copies, setting: `2 x ml.p4d.24xlarge, TP 4, 2 copies a machine, int4`."""
    text = f"{candidate.instances} x {candidate.instance}, TP {candidate.tensor_parallel}"
    if with_copies:
        noun = "copy" if candidate.copies == 1 else "copies"
        text += f", {candidate.copies} {noun} a machine"
    setting = candidate.setting.describe()
    return f"{text}, {setting}" if setting else text


def _measure_next_lines(answer: Recommendation) -> Iterator[str]:
    """What to measure so that the answer rests on less of a forecast, with the commands."""
    best = answer.recommended or answer.nearest
    if best is None:
        return
    question = answer.question
    lengths = f"--input-tokens {question.input_tokens} --output-tokens {question.output_tokens}"
    if not question.calibrated:
        slots = max(1, int(best.memory["slots_per_copy"]))
        loads = sorted({1, max(1, round(slots**0.5)), slots})
        yield (
            f"measure first, one copy on one {best.instance} at TP {best.tensor_parallel}"
            f"{_set_to(best.setting)}: "
            f"lmi-bench sweep URL {lengths} --concurrency {','.join(map(str, loads))} --out RUN; "
            f"then lmi-bench recommend RUN --measured-on {_place(best)}"
        )
    for probe in answer.measure_next[:_SHOWN_PROBES]:
        instance, degree = probe.layout.instance.instance_type, probe.layout.tensor_parallel
        fleet = f"{probe.machines} x {instance}, TP {degree}"
        setting = _set_to(probe.layout.setting)
        purpose = f"confirms {fleet}"
        if probe.saves_usd_per_hour:
            purpose = f"decides {fleet}, USD {probe.saves_usd_per_hour:,.2f} per hour less"
        elif answer.recommended is None:
            purpose = f"decides {fleet}"
        yield (
            f"measure next, {purpose} (keeps the SLOs with a chance of {probe.chance:.0%}): one "
            f"copy on one {instance} at TP {degree}{setting}: lmi-bench sweep URL {lengths} --rate "
            f"{_rounded_up(probe.rate_per_s)} --requests-per-level {_PROBE_REQUESTS} --out RUN; "
            "add RUN to the runs and recommend again"
        )
    if answer.recommended is not None:
        yield "before buying, replay the load on the fleet: lmi-bench verify REC.json --target URL"


def _set_to(setting: EngineSetting) -> str:
    """How the engine is to be set for a measurement; empty as it is."""
    text = setting.describe()
    return f" with {text}" if text else ""


def _rounded_up(rate_per_s: float) -> str:
    """A rate to four digits, never below it: a level decides on its own rate and lower ones.

    >>> _rounded_up(20 / 7), _rounded_up(3.0)
    ('2.858', '3')
    """
    step = 10.0 ** (math.floor(math.log10(rate_per_s)) - 3)
    return f"{math.ceil(rate_per_s / step - 1e-9) * step:.4g}"


def _place(candidate: Candidate) -> str:
    """The candidate's machine as `--measured-on` takes it."""
    degree = candidate.tensor_parallel
    return candidate.instance if degree == 1 else f"{candidate.instance}:{degree}"


def _attainment_lines(chosen: Candidate) -> Iterator[str]:
    """Joint attainment of the planned load."""
    found = chosen.attainment
    if not found:
        return
    if found["reason"]:
        yield f"joint attainment: not simulated, {found['reason']}"
        return
    yield (
        f"joint attainment: {found['joint_attainment']:.2%} of {found['requests']:,} simulated "
        f"requests in {found['minutes']:.0f} minutes meet every SLO ({found['routing']} routing)"
        f"{_OWN_GAPS if any(each.slo.startswith('itl') for each in chosen.slos) else ''}"
    )


def _worst_minutes(chosen: Candidate, slo: str) -> str:
    """The SLO's statistic over the five minutes in which it is worst; empty where not simulated."""
    found = chosen.attainment
    if not found or found["reason"] or slo not in found["worst_5_minutes_ms"]:
        return ""
    worst_ms = found["worst_5_minutes_ms"][slo]
    shown = "too few requests to tell" if worst_ms is None else f"{worst_ms:,.0f} ms"
    return f"; worst five minutes: {shown}"


def beside_lines(advice: Advice) -> Iterator[str]:
    """The frontier and the sensitivity."""
    if len(advice.frontier) > 1:
        named = (_fleet(each) for each in advice.frontier)
        yield f"cheapest to fastest (ms/token p90), none beaten in both: {'; '.join(named)}"
    for item in advice.sensitivity:
        yield f"would change the answer? {item['text']}"


def load_rows(variation: Variation) -> list[dict[str, Any]]:
    """The winner of each stretch of loads, as rows of a table."""
    crossovers = [*variation.crossovers, None]
    rows = []
    for each, crossover in zip(variation.intervals, crossovers, strict=True):
        machines = f"{each.fewest_machines}"
        if each.most_machines != each.fewest_machines:
            machines += f" to {each.most_machines}"
        rows.append(
            {
                "above req/s": f"{each.from_per_s:.4g}",
                "up to": f"{each.to_per_s:.4g}",
                "machines": machines,
                "layout": f"{each.instance}, TP {each.tensor_parallel} x {each.copies}",
                "USD/h": f"{each.least_usd_per_hour:,.2f} to {each.most_usd_per_hour:,.2f}",
                "crossover if as predicted": (
                    ""
                    if crossover is None
                    else f"{crossover.value:.4g} [{crossover.low:.4g} to {crossover.high:.4g}]"
                ),
            }
        )
    return rows
