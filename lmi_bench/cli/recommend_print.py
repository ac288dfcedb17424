"""What recommend prints: the candidates, the recommended fleet and what to measure next."""

import math
import shlex
from collections.abc import Iterator, Sequence
from typing import Literal

from lmi_bench.analysis.fleet.answer import Candidate, Measurement, Recommendation
from lmi_bench.analysis.level.layouts import Rejection
from lmi_bench.analysis.model.engine_setting import EngineSetting
from lmi_bench.catalog.instances import endpoint_quota
from lmi_bench.cli.console import fit_columns, note, print_table, say, stdout, warn
from lmi_bench.jobs.recommend import Advice
from lmi_bench.report.formats import number
from lmi_bench.report.recommendation_view import answer_tiles, by_reason, planning_facts, pools_facts
from lmi_bench.report.table import bracketed, console_rows
from lmi_bench.report.tables import fleets

_SHOWN_REASONS = 6
_SHOWN_UNPRICED = 5
_SHOWN_MEASUREMENTS = 2
_WORTH_ASKING = 0.2  # chance that a measurement makes the fleet cheaper
_MEASUREMENT_REQUESTS = 2000  # p90 within some per cent, although neighbouring requests correlate


def print_advice(advice: Advice, *, explain: bool = False) -> None:
    """The answer, the best layouts, and with `explain` the reasons for all of it."""
    answer, basis = advice.answer, advice.basis
    say(*answer_lines(answer))
    if advice.pools is not None:
        apart = pools_facts(advice.to_json())
        say(f"{apart.title}:", *(f"  {text}" for _, text in apart.items))
    say("")
    workload = basis.workload
    say(
        f"{workload.shape.name}, {workload.dtype}, {workload.input_tokens} in / "
        f"{workload.output_tokens} out, {answer.question.load}, for {advice.request.objective}"
    )
    say(basis.profile.provenance)
    if advice.other is not None:
        say(_other_line(*advice.other, answer))
    print_candidates(answer.candidates, every_layout=explain)
    if advice.variation is not None:
        found = advice.variation
        rows = console_rows(fleets.load_fields(found), found.intervals, bracketed)
        print_table("Cheapest layout by load", rows, left=("layout",))
    note(*basis.notes)
    if explain:
        _print_reasons(advice)
    elif answer.candidates:
        out = f"{len(answer.rejected)} layouts are out; " if answer.rejected else ""
        say(f"{out}reasons, prices, warnings and what else to measure: --explain")
    else:
        say(*rejection_lines(answer.rejected))


def _other_line(profile: str, other: Candidate | None, answer: Recommendation) -> str:
    """What another profile would change."""
    start = f"with --profile {profile}"
    best = answer.recommended
    if other is None or best is None:
        return f"{start}: no fleet of the best machines carries the load"
    fleet = fleets.fleet_name(other)
    same = "the same fleet" if fleets.fleet_name(best) == fleet else fleet
    price = other.price_usd_per_hour
    cost = "" if price is None else f", USD {fleets.money(other, price)} per hour"
    carried = other.figures.get("capacity_rate_per_s")
    carries = "" if carried is None else f", carries {fleets.shown(carried)} req/s"
    return f"{start}: {same}{cost}{carries}"


def _print_reasons(advice: Advice) -> None:
    answer, best = advice.answer, advice.answer.recommended
    if answer.accuracy is not None:
        rows = console_rows(fleets.accuracy_fields(answer.accuracy), answer.accuracy)
        print_table("Predicted against measured", rows)
    say(*rejection_lines(answer.rejected), *unpriced_lines(answer))
    content = advice.to_json()
    for facts in planning_facts(content):
        if facts != pools_facts(content):  # said above
            say(f"{facts.title}:", *(f"  {text}" for _, text in facts.items))
    if best is not None:
        say(f"why: {best.reason}", *_money_lines(best))
    say(*_measurement_lines(answer))
    for text in answer.warnings:
        if text not in (*answer.caveats, *advice.basis.notes):
            warn(text)


def rejection_lines(rejected: Sequence[Rejection], most: int = _SHOWN_REASONS) -> Iterator[str]:
    """The rejected layouts by kind of reason, each with an example."""
    if not rejected:
        return
    kinds = by_reason(rejected)
    yield "1 layout is out:" if len(rejected) == 1 else f"{len(rejected)} layouts are out:"
    for members in kinds[:most]:
        each, times = members[0], len(members)
        place = each.instance_type
        if each.tensor_parallel is not None:
            place += f" TP {each.tensor_parallel}"
        if each.setting:
            place += f", {each.setting}"
        yield f"  {times:>3}  {'such as ' if times > 1 else ''}{place}: {each.reason}"
    if len(kinds) > most:
        yield f"  more kinds of reason: {len(kinds) - most}, in the --json file"


def answer_lines(answer: Recommendation) -> Iterator[str]:
    """What is not known, fleet, price, capacity, SLOs, the biggest doubt and the next command."""
    yield from answer.caveats
    best = answer.recommended
    if best is not None:
        yield f"recommended: {fleets.fleet_name(best, with_copies=True)}"
        yield from (f"  {tile.line}" for tile in answer_tiles(best, answer))
        yield from _sturdier_lines(answer)
        if best.instance.startswith("ml."):
            yield f"  quota: {endpoint_quota(best.instance, best.instances)}"
    elif answer.nearest is not None:
        verb = "carries" if answer.missed == "the load" else "keeps"
        nearest = fleets.fleet_name(answer.nearest, with_copies=True)
        yield f"no candidate {verb} {answer.missed}; the nearest: {nearest}"
        yield f"  {answer.nearest.reason}"
        yield from (f"  {tile.line}" for tile in answer_tiles(answer.nearest, answer))
    else:
        yield "no machine can serve it: see the reasons below"
        return
    if doubt := _doubt(answer):
        yield f"  doubt: {doubt}"
    yield from _next_lines(answer)


def _sturdier_lines(answer: Recommendation) -> Iterator[str]:
    """The next fleet that is not fragile, if the recommended one is."""
    best, *others = answer.candidates
    if best.attainment is not None and best.attainment.fragile_slos:
        for each in others:
            if each.attainment is not None and not each.attainment.fragile_slos:
                cost, *_ = answer_tiles(each, answer)
                yield f"  not fragile: {fleets.fleet_name(each, with_copies=True)}, {cost.line}"
                return


def _doubt(answer: Recommendation) -> str:
    """What could make the answer wrong, the likeliest first; empty without a doubt."""
    best = answer.recommended or answer.nearest
    assert best is not None
    for outlook in best.slos:
        figure = best.figures.get(fleets.figure_key(outlook.slo))
        if outlook.confidence == "likely" and figure is not None:
            return f"{outlook.slo} holds as predicted, but the interval reaches {number(figure.high)} ms"
    if best.warnings:
        return best.warnings[0]
    return "" if answer.question.calibrated else "no level of your own was measured yet"


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
    best: dict[str, tuple[float, Candidate]] = {}  # of each machine the layout worth most
    for candidate in answer.candidates:
        price = candidate.cost.wins_below_usd_per_machine_hour or 0.0
        if price > best.get(candidate.instance, (0.0,))[0]:
            best[candidate.instance] = (price, candidate)
    for price, candidate in list(best.values())[:_SHOWN_UNPRICED]:
        yield (f"no price known: {fleets.fleet_name(candidate)} would win below USD {price:,.2f} a machine and hour")
    if len(best) > _SHOWN_UNPRICED:
        yield f"and {len(best) - _SHOWN_UNPRICED} more unpriced machines, in the --json file"


def _next_lines(answer: Recommendation) -> Iterator[str]:
    """The next command: a calibration first, then the replay of the load."""
    best = answer.recommended or answer.nearest
    assert best is not None
    if not answer.question.calibrated:
        slots = max(1, best.memory.slots_per_copy)
        loads = ",".join(map(str, sorted({1, max(1, round(slots**0.5)), slots})))
        place = best.instance + (f":{best.tensor_parallel}" if best.tensor_parallel > 1 else "")
        yield (
            f"  next: measure one copy on one {best.instance} at TP {best.tensor_parallel}"
            f"{_set_to(best.setting)}, then repeat this command with RUN --measured-on "
            f"{shlex.quote(place)}"
        )
        yield f"    lmi-bench sweep URL {_lengths(answer)} --concurrency {loads} --out RUN"
    elif answer.recommended is not None:
        deciding = [each for each in answer.measure_next if each.saves_usd_per_hour]
        if deciding and deciding[0].chance >= _WORTH_ASKING:
            what, command = _measurement(answer, deciding[0])
            yield from (f"  next: {what}", f"    {command}")
        yield "  next: replay the load on the fleet before buying"
        yield "    lmi-bench verify REC.json --target URL"


def _lengths(answer: Recommendation) -> str:
    question = answer.question
    return f"--input-tokens {question.input_tokens} --output-tokens {question.output_tokens}"


def _measurement_lines(answer: Recommendation) -> Iterator[str]:
    """Measurements that would make the answer more certain, each with its command."""
    for each in answer.measure_next[:_SHOWN_MEASUREMENTS]:
        what, command = _measurement(answer, each)
        yield from (f"next: {what}", f"    {command}")
    if answer.recommended is not None:
        yield "before buying, replay the load on the fleet"
        yield "    lmi-bench verify REC.json --target URL"


def _measurement(answer: Recommendation, each: Measurement) -> tuple[str, str]:
    """What the measurement decides or confirms, and its command."""
    instance, degree = each.layout.instance.instance_type, each.layout.tensor_parallel
    fleet = f"{each.machines} x {instance}, TP {degree}"
    purpose = f"confirms {fleet}"
    if each.saves_usd_per_hour:
        purpose = f"decides {fleet}, USD {each.saves_usd_per_hour:,.2f} per hour less"
    elif answer.recommended is None:
        purpose = f"decides {fleet}"
    return (
        f"measure one copy on one {instance} at TP {degree}{_set_to(each.layout.setting)}: it "
        f"{purpose} (keeps the SLOs with a chance of {each.chance:.0%})",
        f"lmi-bench sweep URL {_lengths(answer)} --rate {_rounded_up(each.rate_per_s)} "
        f"--requests-per-level {_MEASUREMENT_REQUESTS} --out RUN",
    )


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


_GIVE_WAY = (
    "price of",
    "tok/s",
    "basis",
    "limited by",
    "USD/1M out",
    "ms/token p90",
    "ITL p50 ms",
    "capacity req/s",
    "TTFT p90 ms",
)
"""Columns to leave out in a narrow terminal, the least important first; an SLO's column stays.

The last two go only after the latencies' intervals have."""
_LAST_TO_GO = 2
_SHOWN_CANDIDATES, _SHOWN_KINDS = 12, 8


def distinct_layouts(
    candidates: Sequence[Candidate], *, by: Literal["instance", "accelerator"] = "instance"
) -> list[Candidate]:
    """The best setting of each machine (or accelerator) and degree, in the candidates' order."""
    found: dict[tuple[str, int], Candidate] = {}
    for each in candidates:
        found.setdefault((getattr(each, by), each.tensor_parallel), each)
    return list(found.values())


def candidate_rows(candidates: Sequence[Candidate], width: int) -> tuple[list[dict[str, str]], list[str]]:
    """Rows for a terminal of this width, and what is left out.

    Before the capacity goes, the latencies' intervals do. The SLOs' columns always stay.
    """
    fields = fleets.candidate_fields(candidates)
    rows = console_rows(fields, candidates, bracketed)
    held = {fleets.slo_heading(outlook.slo) for each in candidates for outlook in each.slos}
    give_way = [name for name in _GIVE_WAY if name not in held]
    fitting, left_out = fit_columns(rows, give_way, width)
    if left_out and _GIVE_WAY.index(left_out[-1]) >= len(_GIVE_WAY) - _LAST_TO_GO:
        bare = console_rows(fields, candidates)
        for without, row in zip(bare, rows, strict=True):
            without[fleets.CAPACITY] = row[fleets.CAPACITY]
        fitting, left_out = fit_columns(bare, give_way, width)
        left_out.append("intervals of latencies")
    return fitting, left_out


def print_candidates(candidates: Sequence[Candidate], *, every_layout: bool = True) -> None:
    """The best layouts, with as many columns as fit the terminal.

    every_layout  False: the best one of each accelerator and degree
    """
    layouts = distinct_layouts(candidates)
    shown = layouts if every_layout else distinct_layouts(candidates, by="accelerator")
    shown = shown[: _SHOWN_CANDIDATES if every_layout else _SHOWN_KINDS]
    rows, left_out = candidate_rows(shown, stdout().width)
    print_table(
        "Candidates, the best first: predicted [80 % interval]",
        rows,
        left=("engine", "limited by", "basis", "price of"),
        whole=("fleet",),
    )
    if any(" ?" in value for row in rows for value in row.values()):
        say("?: within the SLO as predicted, not at the interval's upper end")
    if any("withheld" in row.values() for row in rows):
        say("withheld: too near to saturation to predict a latency")
    if any(row["USD/h"].startswith("~") for row in rows):
        say("~: an estimated price, see --explain")
    if left_out:
        say(f"no room for the columns {', '.join(left_out)}: widen the terminal, or use --json")
    if len(layouts) > len(shown):
        say(f"{len(layouts) - len(shown)} more layouts in the --json file")
    if len(layouts) < len(candidates):
        say("each layout has its best engine setting here; the others are in the --json file")
