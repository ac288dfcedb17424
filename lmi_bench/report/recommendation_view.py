"""The content of a report's section about a recommendation, from a file of `recommend --json`.

Known keys have a place of their own; every other key is listed under provenance.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from lmi_bench.analysis.fleet.answer import Candidate, Recommendation, SloOutlook, Variation
from lmi_bench.analysis.fleet.money import usd_text
from lmi_bench.analysis.fleet.pools import PoolsFleet
from lmi_bench.analysis.level.layouts import Rejection
from lmi_bench.catalog.fresh_prices import FRESH_SOURCE
from lmi_bench.report.explore import CANDIDATES, candidates_data, fleet_roofline
from lmi_bench.report.formats import MISSING, count, key_title, number, plain
from lmi_bench.report.table import Cell, Field, Table, table_of
from lmi_bench.report.tables import fleets
from lmi_bench.report.values import Facts, Headline, RecommendationView

_PLACED = """
    recommended nearest missed candidates rejected warnings accuracy sensitivity disaggregated vary frontier
    profile_document kinds
"""
_PLACED_OF_CANDIDATE = """
    instance instances tensor_parallel replicas engine slos warnings reason blended_3to1_as_published_reason setting
    estimated price_range_usd_per_hour
"""
_SHOWN_CANDIDATES = 12
_SAME_PRICE = 0.005
_SHORT_ANSWER = 4  # tokens of a class or a score: its price is that of the prompt
_NUMBER = re.compile(r"[A-Za-z]*\$?\d(?:[\d,]*\d)?(?:\.\d+)?")  # and names such as `A100`


def build_recommendation_view(content: Mapping[str, Any], *, anchor: str) -> RecommendationView:
    """The view of one recommendation file; raises InputError for another kind of file."""
    answer = Recommendation.from_json(content)
    chosen, listed = answer.recommended or answer.nearest, answer.candidates[:CANDIDATES]
    return RecommendationView(
        anchor=anchor,
        title=f"Recommendation for {answer.question.model}",
        subtitle=_subtitle(answer),
        why="" if chosen is None else chosen.reason,
        headline=_headline(answer, chosen),
        answer=() if chosen is None else tuple(answer_tiles(chosen, answer)),
        figures=None if chosen is None else _figures_table(chosen),
        candidates=fleets.candidates_table(listed[:_SHOWN_CANDIDATES], chosen, "Candidates"),
        more_candidates=fleets.candidates_table(listed[_SHOWN_CANDIDATES:], chosen, ""),
        unlisted=max(0, len(answer.candidates) - CANDIDATES),
        rejected=_rejected_groups(answer.rejected),
        more=tuple(_more_tables(answer, content.get("vary"))),
        provenance=_provenance(content, chosen),
        warnings=answer.warnings,
        explored=candidates_data(answer.candidates, chosen),
        rate_per_s=answer.question.rate_per_s,
        roof=fleet_roofline(answer, chosen),
    )


def _headline(answer: Recommendation, chosen: Candidate | None) -> Headline:
    if chosen is None:
        return Headline("Recommendation", "none", "", "no candidate fits", "bad")
    copies = f"{chosen.copies} {'copy' if chosen.copies == 1 else 'copies'} a machine"
    parts = [f"TP {chosen.tensor_parallel}", copies, chosen.setting.describe()]
    detail = ", ".join(part for part in parts if part)
    machines = chosen.instances
    fleet = chosen.instance if machines == 1 else f"{machines:,} × {chosen.instance}"
    if answer.recommended is not None:
        return Headline(f"Recommended for {answer.question.model}", fleet, "", detail, "good")
    missed = answer.missed or "the SLOs"
    verb = "carries" if missed == "the load" else "meets"
    return Headline(f"Nearest, no candidate {verb} {missed}", fleet, "", detail, "bad")


def answer_tiles(chosen: Candidate, answer: Recommendation) -> Iterator[Headline]:
    """What to read after the fleet: cost, capacity, each SLO, and the requests that meet them."""
    question, found = answer.question, chosen.attainment
    yield _cost_tile(chosen, answer)
    if (carried := chosen.figures.get("capacity_rate_per_s")) is not None:
        tokens = chosen.figures.get("throughput_tokens_per_s")
        parts = (
            "within the SLOs" if chosen.slos else "",
            "" if question.rate_per_s is None else f"{question.rate_per_s:g} asked for",
            f"{fleets.shown(tokens)} output tok/s {_where(chosen, answer)}" if tokens else "",
        )
        yield Headline("Capacity", fleets.shown(carried), "req/s", "; ".join(filter(None, parts)))
    if question.objective == "latency":
        figure = chosen.figures.get("latency_per_token_p90_ms")
        yield Headline("Latency", fleets.shown(figure), "ms/token p90", f"for {question.load}")
    if (prices := chosen.usd_per_1m_input_tokens) is not None:
        hit = None if found is None else found.prefix_hit_share
        share, told = f"{prices.cached_share:.0%}", "as planned"
        if hit is not None:
            share, told = f"{hit.value:.1%}", f"{hit.low:.1%} to {hit.high:.1%}"
        told += f"; 1M input tokens cost USD {prices.cached:,.3f} cached, {prices.computed:,.3f} computed"
        yield Headline("Prefix cache", share, "of the prompt tokens found", told)
    yield from (_slo_tile(chosen, outlook) for outlook in chosen.slos)
    if found is not None and found.joint_attainment is not None and not found.reason:
        told = f"every SLO met; {found.requests:,} simulated, {found.routing} routing"
        yield Headline("Attainment", f"{found.joint_attainment:.1%}", "of requests", told)
    elif chosen.slos:
        reason = "" if found is None else found.reason or ""
        yield Headline("Attainment", "not simulated", "", reason)


def _slo_tile(chosen: Candidate, outlook: SloOutlook) -> Headline:
    """The figure under an SLO, how sure it is, and the requests that keep it."""
    slo, found = outlook.slo, chosen.attainment
    figure = chosen.figures.get(fleets.figure_key(slo))
    confidence, parts = outlook.confidence, []
    if found is not None:
        if slo in found.fragile_slos:
            confidence = "fragile"
        if (share := found.attainment.get(slo)) is not None:
            parts.append(f"{share:.1%} of requests keep it")
        if not found.reason and slo in found.worst_5_minutes_ms:
            worst_ms = found.worst_5_minutes_ms[slo]
            told = "too few requests to tell" if worst_ms is None else f"{worst_ms:,.0f} ms"
            parts.append(f"worst five minutes: {told}")
    tone = {"missed": "bad", "likely": "warn", "fragile": "warn"}.get(confidence, "good")
    unit = "" if figure is None else "ms"
    return Headline(slo, fleets.shown(figure), unit, "; ".join((confidence, *parts)), tone)


def _cost_tile(candidate: Candidate, answer: Recommendation) -> Headline:
    per_hour, question = candidate.price_usd_per_hour, answer.question
    if per_hour is None:
        return Headline("Cost", "price unknown", "", "")
    value, parts = f"USD {fleets.money(candidate, per_hour)}", []
    unit, between = "per hour", candidate.price_range_usd_per_hour
    if between is not None:
        unit += f" (estimated: {between[0]:,.2f} to {between[1]:,.2f})"
    elif FRESH_SOURCE in (candidate.price_provenance or ""):
        unit += f" (price of {candidate.cost.price_date}, {candidate.cost.price_region})"
    mark = "~" if between else ""
    if candidate.usd_per_month is not None:
        parts.append(f"{mark}{candidate.usd_per_month:,.0f} a month")
    per_token, where = candidate.usd_per_1m_output_tokens, _where(candidate, answer)
    if per_token is not None and question.output_tokens <= _SHORT_ANSWER:
        per_request = per_token * question.output_tokens / 1e6
        per_input = 1e6 * per_request / question.input_tokens
        parts.append(f"{mark}{1e3 * per_request:,.4f} for 1,000 requests")
        parts.append(f"{mark}{per_input:,.4f} for 1M input tokens {where}")
    elif per_token is not None:
        published = candidate.blended_3to1_as_published
        blended = f"; {fleets.money(candidate, published)} blended {question.blended_ratio:g}:1"
        parts.append(
            f"{fleets.money(candidate, per_token)} for 1M output tokens {where}"
            + ("" if published is None else blended)
        )
    return Headline("Cost", value, unit, ", ".join(parts))


def _where(candidate: Candidate, answer: Recommendation) -> str:
    """The load of the figures: the stated one, or the rate to which the fleet is loaded."""
    served, question = candidate.figures.get("throughput_tokens_per_s"), answer.question
    if question.states_load or served is None:
        return "at this load" if question.states_load else "at its capacity"
    return f"at {number(served.value / question.output_tokens)} req/s"


def _provenance(content: Mapping[str, Any], chosen: Candidate | None) -> tuple[Facts, ...]:
    """The origin of each number: everything in the file except its candidates."""
    facts = [*planning_facts(content), Facts("How it was found", tuple(_flatten(content, _PLACED.split())))]
    if chosen is not None:
        placed = {*_PLACED_OF_CANDIDATE.split(), *fleets.PRICE_KEYS, *chosen.figures}
        facts.append(Facts("The candidate named above", tuple(_flatten(chosen.to_json(), placed))))
    return tuple(each for each in facts if each.items)


def _flatten(content: Mapping[str, Any], left_out: Collection[str]) -> list[tuple[str, str]]:
    items = []
    for key, value in content.items():
        if key in left_out or value in (None, [], {}, ""):
            continue
        if isinstance(value, Mapping):
            items += [(f"{key_title(key)}: {key_title(str(inner))}", plain(each)) for inner, each in value.items()]
        else:
            items.append((key_title(key), plain(value)))
    return items


def _subtitle(answer: Recommendation) -> str:
    question = answer.question
    parts = [f"{question.input_tokens:,} tokens in, {question.output_tokens:,} out", question.load]
    parts += [", ".join(question.slos), f"ranked by {question.objective}"]
    return " · ".join(part for part in (*answer.caveats, *parts) if part)


def planning_facts(content: Mapping[str, Any]) -> list[Facts]:
    """Sensitivity and frontier, as far as the file has them."""
    changes = (
        (str(each.get("what") or "?"), str(each.get("text") or "")) for each in _mappings(content, "sensitivity")
    )
    frontier = [
        (
            str(index),
            f"{each.get('instances')} × {each.get('instance')}, TP {each.get('tensor_parallel')}"
            + (f", {each['setting']}" if each.get("setting") else ""),
        )
        for index, each in enumerate(_mappings(content, "frontier"), start=1)
    ]
    facts = [
        pools_facts(content),
        Facts("What would change the answer", tuple(changes)),
        Facts("Cheapest to fastest, none beaten in both", tuple(frontier if frontier[1:] else ())),
    ]
    return [each for each in facts if each.items]


def pools_facts(content: Mapping[str, Any]) -> Facts:
    """The cheapest fleet with separate pools, as far as the file has one, or why there is none."""
    apart, best = content.get("disaggregated"), content.get("recommended")
    title = "Prefill and decode in separate pools"
    if not isinstance(apart, Mapping) or "reason" in apart:
        reason = str(apart["reason"]) if isinstance(apart, Mapping) else ""
        return Facts(title, (("fleet", reason),) if reason else ())
    pools = PoolsFleet.from_json(apart)
    usd, other = pools.price_usd_per_hour, (best or {}).get("price_usd_per_hour")
    cost = f"USD {usd_text(usd, estimated=pools.estimated)} per hour"
    if other:
        more = usd / other - 1
        share = f"{abs(more):.0%} {'more' if more > 0 else 'less'} than"
        cost += f", {'as much as' if abs(more) < _SAME_PRICE else share} recommended"
    slos = (
        (each.slo, f"{each.slo}: {fleets.shown(figure)} ms, {each.confidence}")
        for each, figure in zip(pools.slos, pools.slo_figures, strict=True)
    )
    capacity = f"{fleets.shown(pools.capacity_rate_per_s)} req/s with every slot busy"
    return Facts(title, (("fleet", pools.text), ("cost", cost), ("capacity", capacity), *slos))


def _mappings(content: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    values = content.get(key)
    return [each for each in values if isinstance(each, Mapping)] if isinstance(values, list | tuple) else []


def _figures_table(chosen: Candidate) -> Table | None:
    """Every predicted figure with its interval, or the reason why it is withheld."""

    def end(name: str) -> Field[str]:
        def text(key: str) -> Cell:
            figure = chosen.figures[key]
            if figure is not None:
                return Cell(number(getattr(figure, name)))
            if name == "value":
                return Cell("n/a", chosen.withheld[key], "na")
            return Cell(MISSING)

        return Field({"value": "Predicted"}.get(name, name.capitalize()), text)

    fields = (Field("Figure", key_title, numeric=False), end("value"), end("low"), end("high"))
    keys = sorted(chosen.figures, key=lambda key: chosen.figures[key] is None)
    return table_of("Predicted for it", fields, keys) if keys else None


def by_reason(rejected: Sequence[Rejection]) -> list[list[Rejection]]:
    """Layouts by kind of reason, the most frequent first: the same sentence apart from names and
    numbers."""
    groups: dict[str, list[Rejection]] = {}
    for each in rejected:
        groups.setdefault(_NUMBER.sub("…", _reason_of(each)), []).append(each)
    return sorted(groups.values(), key=len, reverse=True)


def _rejected_groups(rejected: Sequence[Rejection]) -> tuple[Table, ...]:
    fields: tuple[Field[Rejection], ...] = (
        Field("Instance", lambda each: each.instance_type, numeric=False),
        Field("TP", lambda each: count(each.tensor_parallel)),
        Field("Reason", lambda each: each.reason, numeric=False),
    )
    groups = by_reason(rejected)
    return tuple(table_of(_shared_text(members), fields, members) for members in groups)


def _shared_text(members: Sequence[Rejection]) -> str:
    """The members' reason; a number in which they differ as its range, a name as all names."""
    reasons = [_reason_of(each) for each in members]
    columns = zip(*(_NUMBER.findall(reason) for reason in reasons), strict=True)
    spans = iter([_span(set(column)) for column in columns])
    return _NUMBER.sub(lambda _: next(spans), reasons[0])


def _span(numbers: set[str]) -> str:
    if any(text[0].isalpha() for text in numbers):
        return " or ".join(sorted(numbers))
    ordered = sorted(numbers, key=lambda text: float(text.lstrip("$").replace(",", "")))
    return ordered[0] if len(ordered) == 1 else f"{ordered[0]} to {ordered[-1]}"


def _reason_of(rejection: Rejection) -> str:
    """The reason without the instance's name, which contains numbers."""
    return rejection.reason.replace(rejection.instance_type, "the instance")


def _more_tables(answer: Recommendation, vary: object) -> Iterator[Table]:
    """The cheapest layout of each range of loads, as `recommend --vary` found it, and predictions
    of the levels that the profile was fitted to."""
    if vary is not None:
        found = Variation.from_json(vary, "vary")
        yield table_of("Cheapest layout by load", fleets.load_fields(found), found.intervals)
    levels = answer.accuracy or ()
    if any(level.figures for level in levels):
        yield table_of("Predicted against measured", fleets.accuracy_fields(levels), levels)
