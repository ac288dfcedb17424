"""What recommend prints: the candidates, the recommended fleet and what to measure next."""

import math
import shlex
from collections.abc import Iterator, Sequence
from typing import Any

from lmi_bench.analysis.fit.from_run import LevelAccuracy
from lmi_bench.analysis.fleet.answer import Candidate, Recommendation
from lmi_bench.analysis.fleet.vary import Variation
from lmi_bench.analysis.level.layouts import Rejection
from lmi_bench.analysis.model.engine_setting import EngineSetting
from lmi_bench.catalog.fresh_prices import FRESH_SOURCE
from lmi_bench.catalog.instances import endpoint_quota
from lmi_bench.cli.candidates_print import interval, money, print_candidates
from lmi_bench.cli.console import note, print_table, say, warn
from lmi_bench.jobs.recommend import Advice, OtherProfile
from lmi_bench.report.formats import number
from lmi_bench.report.recommendation_view import by_reason

_SHOWN_REASONS = 6
_SHOWN_UNPRICED = 5
_SHOWN_MEASUREMENTS = 2
_SHORT_ANSWER = 4  # tokens of a class or a score: its price is that of the prompt
_MEASUREMENT_REQUESTS = 2000  # p90 within some per cent, although neighbouring requests correlate


def print_advice(advice: Advice, *, explain: bool = False) -> None:
    """The answer, the best layouts, and with `explain` the reasons for all of it."""
    answer, basis = advice.answer, advice.basis
    for text in (*answer_lines(answer), ""):
        say(text)
    workload = basis.workload
    say(
        f"{workload.shape.name}, {workload.dtype}, {workload.input_tokens} in / "
        f"{workload.output_tokens} out, {answer.question.load}, for {advice.request.objective}"
    )
    say(basis.profile.provenance)
    if advice.other is not None:
        say(_other_line(advice.other, answer))
    print_candidates(answer.candidates, every_layout=explain)
    if advice.variation is not None:
        print_table("Cheapest layout by load", load_rows(advice.variation), left=("layout",))
    for text in basis.notes:
        note(text)
    if explain:
        _print_reasons(advice)
    elif answer.candidates:
        out = f"{len(answer.rejected)} layouts are out; " if answer.rejected else ""
        say(f"{out}reasons, prices, warnings and what else to measure: --explain")
    else:
        for text in rejection_lines(answer.rejected):
            say(text)


def _other_line(other: OtherProfile, answer: Recommendation) -> str:
    """What another profile would change."""
    start = f"with --profile {other.name}"
    best = answer.recommended
    if other.best is None or best is None:
        return f"{start}: no fleet of the best machines carries the load"
    same = "the same fleet" if _fleet(best) == _fleet(other.best) else _fleet(other.best)
    price = other.best.price_usd_per_hour
    cost = "" if price is None else f", USD {money(other.best, price)} per hour"
    carried = other.best.figures.get("capacity_rate_per_s")
    carries = "" if carried is None else f", carries {interval(carried)} req/s"
    return f"{start}: {same}{cost}{carries}"


def _print_reasons(advice: Advice) -> None:
    answer, best = advice.answer, advice.answer.recommended
    if answer.accuracy is not None:
        print_table("Predicted against measured", accuracy_rows(answer.accuracy))
    for text in (*rejection_lines(answer.rejected), *unpriced_lines(answer), *beside_lines(advice)):
        say(text)
    if best is not None:
        for text in (f"why: {best.reason}", *_money_lines(best)):
            say(text)
    for text in _measurement_lines(answer):
        say(text)
    for text in answer.warnings:
        if text not in answer.caveats:
            warn(text)


def rejection_lines(rejected: Sequence[Rejection], shown: int = _SHOWN_REASONS) -> Iterator[str]:
    """The rejected layouts by kind of reason, each with an example."""
    if not rejected:
        return
    kinds = by_reason(rejected)
    yield "1 layout is out:" if len(rejected) == 1 else f"{len(rejected)} layouts are out:"
    for members in kinds[:shown]:
        each, times = members[0], len(members)
        place = each.instance_type
        if each.tensor_parallel is not None:
            place += f" TP {each.tensor_parallel}"
        if setting := each.setting.describe():
            place += f", {setting}"
        yield f"  {times:>3}  {'such as ' if times > 1 else ''}{place}: {each.reason}"
    if len(kinds) > shown:
        yield f"  more kinds of reason: {len(kinds) - shown}, in the --json file"


def accuracy_rows(levels: Sequence[LevelAccuracy]) -> list[dict[str, str]]:
    """A fitted profile's predictions of the levels that it was fitted to."""
    rows = []
    for level in levels:
        figures = level.figures.items()
        shown = {key: f"{pair.predicted:.4g} / {pair.measured:.4g}" for key, pair in figures}
        rows.append({"concurrency": str(level.concurrency), **shown})
    return rows


def answer_lines(answer: Recommendation) -> Iterator[str]:
    """What is not known, fleet, price, capacity, SLOs, the biggest doubt and the next command."""
    yield from answer.caveats
    best = answer.recommended
    if best is not None:
        yield f"recommended: {_fleet(best, with_copies=True)}"
        yield from _figures(best, answer)
        yield from _sturdier_lines(answer)
        if best.instance.startswith("ml."):
            yield f"  quota: {endpoint_quota(best.instance, best.instances)}"
    elif answer.nearest is not None:
        verb = "carries" if answer.missed == "the load" else "keeps"
        nearest = _fleet(answer.nearest, with_copies=True)
        yield f"no candidate {verb} {answer.missed}; the nearest: {nearest}"
        yield f"  {answer.nearest.reason}"
        yield from _figures(answer.nearest, answer)
    else:
        yield "no machine can serve it: see the reasons below"
        return
    if doubt := _doubt(answer):
        yield f"  doubt: {doubt}"
    yield from _next_lines(answer)


def _figures(candidate: Candidate, answer: Recommendation) -> Iterator[str]:
    yield f"  cost: {_cost(candidate, answer)}"
    carried = candidate.figures.get("capacity_rate_per_s")
    if carried is not None:
        rate = answer.question.rate_per_s
        asked = "" if rate is None else f"; {rate:g} asked for"
        within = " within the SLOs" if candidate.slos else ""
        tokens = candidate.figures.get("throughput_tokens_per_s")
        speed = (
            ""
            if tokens is None
            else f"; {interval(tokens)} output tok/s {_where(candidate, answer)}"
        )
        yield f"  carries {interval(carried)} req/s{within}{asked}{speed}"
    if answer.question.objective == "latency":
        per_token = interval(candidate.figures.get("latency_per_token_p90_ms"))
        yield f"  latency: {per_token} ms/token p90 for {answer.question.load}"
    found = candidate.attainment
    if (prices := candidate.usd_per_1m_input_tokens) is not None:
        hit = None if found is None else found.prefix_hit_share
        told = f"{prices.cached_share:.0%} of the prompt tokens found, as planned"
        if hit is not None:
            told = f"{hit.value:.1%} ({hit.low:.1%} to {hit.high:.1%}) of the prompt tokens found"
        yield (
            f"  prefix cache: {told}; 1M input tokens cost USD {prices.cached:,.3f} cached, "
            f"{prices.computed:,.3f} computed"
        )
    for outlook in candidate.slos:
        key = "{}_ms".format(outlook.slo.split("<")[0])
        figure = candidate.figures.get(key)
        shown = "withheld" if figure is None else f"{interval(figure)} ms"
        share = None if found is None else found.attainment.get(outlook.slo)
        kept = "" if share is None else f"; {share:.1%} of requests keep it"
        fragile = found is not None and outlook.slo in found.fragile_slos
        sure = "fragile" if fragile else outlook.confidence
        yield f"  {outlook.slo}: {shown}, {sure}{kept}{_worst_minutes(candidate, outlook.slo)}"
    if found is not None and found.reason:
        yield f"  attainment: not simulated, {found.reason}"
    elif found is not None and len(candidate.slos) > 1:
        yield (
            f"  attainment: {found.joint_attainment:.1%} of {found.requests:,} simulated "
            f"requests meet every SLO ({found.routing} routing)"
        )


def _sturdier_lines(answer: Recommendation) -> Iterator[str]:
    """The next fleet that is not fragile, if the recommended one is."""
    best, *others = answer.candidates
    if best.attainment is not None and best.attainment.fragile_slos:
        for each in others:
            if each.attainment is not None and not each.attainment.fragile_slos:
                yield f"  not fragile: {_fleet(each, with_copies=True)}, {_cost(each, answer)}"
                return


def _doubt(answer: Recommendation) -> str:
    """What could make the answer wrong, the likeliest first; empty without a doubt."""
    best = answer.recommended or answer.nearest
    assert best is not None
    for outlook in best.slos:
        figure = best.figures.get("{}_ms".format(outlook.slo.split("<")[0]))
        if outlook.confidence == "likely" and figure is not None:
            return (
                f"{outlook.slo} holds as predicted, but the interval reaches "
                f"{number(figure.high)} ms"
            )
    if best.warnings:
        return best.warnings[0]
    return "" if answer.question.calibrated else "no level of your own was measured yet"


def _cost(candidate: Candidate, answer: Recommendation) -> str:
    if candidate.price_usd_per_hour is None:
        return "price unknown"
    text = f"USD {money(candidate, candidate.price_usd_per_hour)} per hour"
    between = candidate.price_range_usd_per_hour
    if between is not None:
        text += f" (estimated: {between[0]:,.2f} to {between[1]:,.2f})"
    elif FRESH_SOURCE in (candidate.price_provenance or ""):
        text += f" (price of {candidate.cost.price_date}, {candidate.cost.price_region})"
    if candidate.usd_per_month is not None:
        text += f", {'~' if between else ''}{candidate.usd_per_month:,.0f} a month"
    per_token, question = candidate.usd_per_1m_output_tokens, answer.question
    if per_token is None:
        return text
    if question.output_tokens <= _SHORT_ANSWER:
        per_request = per_token * question.output_tokens / 1e6
        per_input = 1e6 * per_request / question.input_tokens
        mark = "~" if between else ""
        text += f", {mark}{1e3 * per_request:,.4f} for 1,000 requests"
        return f"{text}, {mark}{per_input:,.4f} for 1M input tokens {_where(candidate, answer)}"
    text += f", {money(candidate, per_token)} for 1M output tokens {_where(candidate, answer)}"
    published = candidate.blended_3to1_as_published
    if published is not None:
        text += f"; {money(candidate, published)} blended {question.blended_ratio:g}:1"
    return text


def _where(candidate: Candidate, answer: Recommendation) -> str:
    """The load of the figures: the stated one, or the rate to which the fleet is loaded."""
    served, question = candidate.figures.get("throughput_tokens_per_s"), answer.question
    if question.states_load or served is None:
        return "at this load" if question.states_load else "at its capacity"
    return f"at {number(served.value / question.output_tokens)} req/s"


def _money_lines(chosen: Candidate) -> Iterator[str]:
    """The chosen fleet's price, how it is bought, and what availability adds."""
    cost = chosen.cost
    yield f"price: {cost.describe_price()}; bought {cost.purchase}"
    if cost.purchase.startswith("savings-plan") and chosen.instance.startswith("ml."):
        yield "  a SageMaker savings plan commits USD an hour over all machine types"
    if chosen.blended_reason is not None:
        yield f"blended price: {chosen.blended_reason}"
    if cost.discount and not cost.purchase.startswith("spot"):
        yield (
            f"  commitment: pays where a machine is needed for more than "
            f"{cost.break_even_utilisation:.0%} of the hours (break-even utilisation)"
        )
    if cost.availability != "none":
        extra = cost.availability_usd_per_hour
        added = "price unknown" if extra is None else f"USD {extra:,.2f} per hour"
        yield (
            f"availability {cost.availability}: {cost.machines_for_the_load} machine(s) "
            f"carry the load, {cost.spare_machines} more add {added}"
        )
    yield f"failure unit: {cost.failure_unit}"


def unpriced_lines(answer: Recommendation) -> Iterator[str]:
    """Candidates without a price, each with the price below which it would win."""
    wins = [
        (price, candidate)
        for candidate in answer.candidates
        if (price := candidate.cost.wins_below_usd_per_machine_hour) is not None
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


def _next_lines(answer: Recommendation) -> Iterator[str]:
    """The next command: a calibration first, then the replay of the load."""
    best = answer.recommended or answer.nearest
    assert best is not None
    if not answer.question.calibrated:
        slots = max(1, best.memory.slots_per_copy)
        loads = ",".join(map(str, sorted({1, max(1, round(slots**0.5)), slots})))
        yield (
            f"  next: measure one copy on one {best.instance} at TP {best.tensor_parallel}"
            f"{_set_to(best.setting)}, then recommend again"
        )
        yield f"    lmi-bench sweep URL {_lengths(answer)} --concurrency {loads} --out RUN"
        place = best.instance + (f":{best.tensor_parallel}" if best.tensor_parallel > 1 else "")
        yield f"    lmi-bench recommend RUN --measured-on {shlex.quote(place)}"
    elif answer.recommended is not None:
        yield "  next: replay the load on the fleet before buying"
        yield "    lmi-bench verify REC.json --target URL"


def _lengths(answer: Recommendation) -> str:
    question = answer.question
    return f"--input-tokens {question.input_tokens} --output-tokens {question.output_tokens}"


def _measurement_lines(answer: Recommendation) -> Iterator[str]:
    """Measurements that would make the answer more certain, each with its command."""
    for each in answer.measure_next[:_SHOWN_MEASUREMENTS]:
        instance, degree = each.layout.instance.instance_type, each.layout.tensor_parallel
        fleet = f"{each.machines} x {instance}, TP {degree}"
        purpose = f"confirms {fleet}"
        if each.saves_usd_per_hour:
            purpose = f"decides {fleet}, USD {each.saves_usd_per_hour:,.2f} per hour less"
        elif answer.recommended is None:
            purpose = f"decides {fleet}"
        yield (
            f"measure next, {purpose} (keeps the SLOs with a chance of {each.chance:.0%}): one "
            f"copy on one {instance} at TP {degree}{_set_to(each.layout.setting)}"
        )
        yield (
            f"    lmi-bench sweep URL {_lengths(answer)} --rate {_rounded_up(each.rate_per_s)} "
            f"--requests-per-level {_MEASUREMENT_REQUESTS} --out RUN"
        )
    if answer.recommended is not None:
        yield "before buying, replay the load on the fleet"
        yield "    lmi-bench verify REC.json --target URL"


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


def _worst_minutes(chosen: Candidate, slo: str) -> str:
    """The SLO's statistic in its worst five minutes; empty if not simulated."""
    found = chosen.attainment
    if found is None or found.reason or slo not in found.worst_5_minutes_ms:
        return ""
    worst_ms = found.worst_5_minutes_ms[slo]
    shown = "too few requests to tell" if worst_ms is None else f"{worst_ms:,.0f} ms"
    return f"; worst five minutes: {shown}"


def beside_lines(advice: Advice) -> Iterator[str]:
    """The frontier and the sensitivity."""
    if len(advice.frontier) > 1:
        named = (_fleet(each) for each in advice.frontier)
        yield f"cheapest to fastest (ms/token p90), none beaten in both: {'; '.join(named)}"
    for item in advice.sensitivity:
        yield f"would change the answer? {item.text}"


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
                "crossover if as predicted": "" if crossover is None else interval(crossover),
            }
        )
    return rows
