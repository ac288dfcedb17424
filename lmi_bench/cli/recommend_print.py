"""What recommend prints: the candidates, the recommended fleet and what to measure next."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lmi_bench.analysis.fit.uncertainty import Estimate
from lmi_bench.analysis.fleet.answer import Candidate, Recommendation
from lmi_bench.analysis.fleet.money import price_line
from lmi_bench.analysis.fleet.portfolio import Portfolio, SharedFleet
from lmi_bench.analysis.fleet.request import RecommendRequest
from lmi_bench.analysis.fleet.vary import Variation
from lmi_bench.analysis.level.layouts import Rejection
from lmi_bench.analysis.model.engine_setting import EngineSetting
from lmi_bench.cli.console import fit_columns, print_table, say, stdout, warn
from lmi_bench.core.slo import parse_slo
from lmi_bench.jobs.recommend import Advice
from lmi_bench.report.formats import number

_GIVE_WAY = (
    "price of", "tok/s", "basis", "limited by", "USD/1M out", "ms/token p90", "ITL p50 ms",
    "capacity req/s", "TTFT p90 ms",
)  # fmt: skip
"""Columns to leave out in a narrow terminal, the least important first; an SLO's column stays."""
_SHOWN_CANDIDATES = 12
_SHOWN_REASONS = 6
_NUMBER = re.compile(r"\d[\d,.]*")
_SHOWN_UNPRICED = 5
_SHOWN_PROBES = 2
_OWN_GAPS = "; an ITL limit applies to the gaps of each request"
_PROBE_REQUESTS = 2000  # p90 within some per cent, although neighbouring requests correlate


def print_advice(advice: Advice) -> None:
    """The candidates, why the others are out, and the answer."""
    answer, request, basis = advice.answer, advice.request, advice.basis
    workload = basis.workload
    say(
        f"{workload.shape.name}, {workload.dtype}, {workload.input_tokens} in / "
        f"{workload.output_tokens} out, {request.describe_load()}, for {request.objective}"
    )
    say(basis.profile.provenance)
    print_candidates(answer.candidates)
    if basis.accuracy is not None:
        print_table("Predicted against measured", accuracy_rows(basis.accuracy))
    for text in (*rejection_lines(answer.rejected), *unpriced_lines(answer), *beside_lines(advice)):
        say(text)
    if advice.variation is not None:
        print_table("Cheapest layout by load", load_rows(advice.variation), left=("layout",))
    for text in (*basis.notes, *answer.warnings):
        warn(text)
    for text in answer_lines(answer, request):
        say(text)


def print_portfolio(answer: Portfolio) -> None:
    """The shared machines, those of an endpoint each, and what sharing saves."""
    rows = [
        *_fleet_rows(answer.groups, "shared"),
        *_fleet_rows(answer.separate, "an endpoint each"),
    ]
    print_table("Models on machines", rows, left=("models", "plan"), whole=("fleet",))
    for group in answer.groups:
        for place, machine in enumerate(group.placed, start=1):
            copies = ", ".join(f"{name} (TP {degree})" for name, degree in machine)
            say(f"{group.instance} no. {place}: {copies}")
    saved = answer.separate_usd_per_hour - answer.usd_per_hour
    say(
        f"shared: USD {answer.usd_per_hour:,.2f} per hour; an endpoint each: USD "
        f"{answer.separate_usd_per_hour:,.2f}; sharing saves USD {saved:,.2f} per hour"
    )
    say(
        "a device serves one model; models on one machine fail together, and the plan does not "
        "include how they slow each other down: measure both at once before buying"
    )


def _fleet_rows(fleets: tuple[SharedFleet, ...], plan: str) -> list[dict[str, str]]:
    return [
        {
            "plan": plan,
            "fleet": f"{fleet.machines} x {fleet.instance}",
            "models": ", ".join(
                f"{name}: {need.copies} at TP {need.tensor_parallel}"
                for name, need in zip(fleet.names, fleet.needs, strict=True)
            ),
            "USD/h": f"{fleet.usd_per_hour:,.2f}",
        }
        for fleet in fleets
    ]


def distinct_layouts(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The best setting of each machine and degree, in the candidates' order."""
    found: dict[tuple[str, int], Candidate] = {}
    for each in candidates:
        found.setdefault((each.instance, each.tensor_parallel), each)
    return list(found.values())


def candidate_rows(
    candidates: Sequence[Candidate], width: int
) -> tuple[list[dict[str, str]], list[str]]:
    """Rows for a terminal of this width, and the columns that are left out.

    Every predicted figure has its interval. The SLOs' columns are never left out.
    """
    rows = [_row(each) for each in candidates]
    if not any(row["engine"] for row in rows):
        for row in rows:
            del row["engine"]
    held = {_title(outlook.slo) for each in candidates for outlook in each.slos}
    return fit_columns(rows, [name for name in _GIVE_WAY if name not in held], width)


def print_candidates(candidates: Sequence[Candidate]) -> None:
    """The best dozen layouts, with as many columns as fit the terminal."""
    layouts = distinct_layouts(candidates)
    rows, left_out = candidate_rows(layouts[:_SHOWN_CANDIDATES], stdout().width)
    print_table(
        "Candidates, the best first: predicted [80 % interval]",
        rows,
        left=("engine", "limited by", "basis", "price of"),
        whole=("fleet",),
    )
    if any(value.endswith(" ?") for row in rows for value in row.values()):
        say("?: within the SLO as predicted, not at the interval's upper end")
    if any("withheld" in row.values() for row in rows):
        say("withheld: too near to saturation to predict a latency")
    if left_out:
        say(f"no room for {', '.join(left_out)}: a wider terminal, or --json")
    if len(layouts) > _SHOWN_CANDIDATES:
        say(f"{len(layouts) - _SHOWN_CANDIDATES} more layouts in the --json file")
    if len(layouts) < len(candidates):
        say("each layout has its best engine setting here; the others are in the --json file")


def _row(candidate: Candidate) -> dict[str, str]:
    row = {
        "fleet": f"{candidate.instances} x {candidate.instance}",
        "TP x copies": f"{candidate.tensor_parallel} x {candidate.copies}",
        "engine": candidate.setting.describe(),
        "USD/h": _money(candidate.price_usd_per_hour),
        "USD/1M out": _money(candidate.usd_per_1m_output_tokens),
        "capacity req/s": interval(candidate.figures.get("capacity_rate_per_s")),
        "tok/s": _plain(candidate.figures.get("throughput_tokens_per_s")),
        "TTFT p90 ms": interval(candidate.figures.get("ttft_p90_ms")),
        "ITL p50 ms": interval(candidate.figures.get("itl_p50_ms")),
        "ms/token p90": interval(candidate.figures.get("latency_per_token_p90_ms")),
    }
    for outlook in candidate.slos:
        slo = parse_slo(outlook.slo)
        figure = candidate.figures.get(f"{slo.metric}_{slo.statistic}_ms")
        shown = interval(figure) if figure is not None else ""
        mark = {"likely": " ?", "measured": " measured", "missed": " missed"}
        title = _title(outlook.slo)
        row.pop(title, None)
        row[title] = shown + mark.get(outlook.confidence, "")
    return row | {
        "limited by": candidate.limited_by,
        "basis": candidate.basis,
        "price of": _price_of(candidate),
    }


def _title(slo: str) -> str:
    """The column of an SLO: `ITL p90 ms`, `ms/token p90`."""
    found = parse_slo(slo)
    if found.metric == "latency_per_token":
        return f"ms/token {found.statistic}"
    return f"{found.metric.upper() if len(found.metric) < 5 else found.metric} {found.statistic} ms"


def _money(value: float | None) -> str:
    return "?" if value is None else f"{value:,.2f}"


def _plain(figure: Estimate | None) -> str:
    return "" if figure is None else f"{figure.value:,.0f}"


def interval(figure: Estimate | None) -> str:
    """A prediction with its 80 % interval: `47 [41-55]`; alone if it is certain."""
    if figure is None:
        return "withheld"
    low, high = number(figure.low), number(figure.high)
    if low == high:
        return low
    return f"{number(figure.value)} [{low}-{high}]"


def _price_of(candidate: Candidate) -> str:
    """The source of a row's price: component, region, date."""
    cost = candidate.cost
    if cost.get("machine_price_usd_per_hour") is None:
        return "no price known"
    date = str(cost["price_date"]).split(" (")[0]
    component = str(cost["price_component"]).replace("component not stated", "")
    return f"{cost['price_region']} {date} {component}".strip()


def rejection_lines(rejected: Sequence[Rejection], shown: int = _SHOWN_REASONS) -> Iterator[str]:
    """The rejected layouts by kind of reason, each with an example."""
    if not rejected:
        return
    kinds: Counter[str] = Counter()
    examples: dict[str, Rejection] = {}
    for each in rejected:
        kind = _NUMBER.sub("#", each.reason)
        kinds[kind] += 1
        examples.setdefault(kind, each)
    yield "1 layout is out:" if len(rejected) == 1 else f"{len(rejected)} layouts are out:"
    for kind, times in kinds.most_common(shown):
        each = examples[kind]
        place = each.instance_type
        if each.tensor_parallel is not None:
            place += f" TP {each.tensor_parallel}"
        if setting := each.setting.describe():
            place += f", {setting}"
        yield f"  {times:>3}  {'such as ' if times > 1 else ''}{place}: {each.reason}"
    if len(kinds) > shown:
        yield f"  more kinds of reason: {len(kinds) - shown}, in the --json file"


def accuracy_rows(accuracy: Mapping[str, Any]) -> list[dict[str, str]]:
    """A fitted profile's predictions of the levels that it was fitted to."""
    rows = []
    for level in accuracy["levels"]:
        row = {"concurrency": str(level["concurrency"])}
        for key, pair in level.items():
            if isinstance(pair, Mapping):
                row[key] = f"{pair['predicted']:.4g} / {pair['measured']:.4g}"
        rows.append(row)
    return rows


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
        yield "the model fits none of these machines: see the reasons above"


def _figures(candidate: Candidate, request: RecommendRequest) -> Iterator[str]:
    yield f"  cost: {_cost(candidate)}"
    carried = candidate.figures.get("capacity_rate_per_s")
    if carried is not None:
        asked = "" if request.rate_per_s is None else f"; {request.rate_per_s:g} asked for"
        within = " within the SLOs" if candidate.slos else ""
        tokens = candidate.figures.get("throughput_tokens_per_s")
        speed = "" if tokens is None else f"; {interval(tokens)} output tok/s at this load"
        yield f"  carries {interval(carried)} req/s{within}{asked}{speed}"
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
    """Candidates without a price, each with the price below which it would win."""
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
    """The commands for measurements that would make the answer more certain."""
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
    """The engine settings for a measurement; empty for the defaults."""
    text = setting.describe()
    return f" with {text}" if text else ""


def _rounded_up(rate_per_s: float) -> str:
    """A rate rounded up to four digits: a level is evidence for its own rate and lower ones.

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
    """The SLO's statistic in its worst five minutes; empty if not simulated."""
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
    """The cheapest layout of each range of loads, as rows of a table."""
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
