"""The content of a report's section about a recommendation, from a file of `recommend --json`.

Known keys have a place of their own; every other key is listed under provenance.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from lmi_bench.analysis.fleet.answer import Candidate, Recommendation
from lmi_bench.report.formats import key_title, number, plain, usd
from lmi_bench.report.tables.recommendation import (
    FIRST_FIGURES,
    PRICES,
    accuracy_table,
    candidates_table,
    figures_table,
    interval,
    rejected_groups,
    slo_outlook_table,
)
from lmi_bench.report.values import Facts, Headline, RecommendationView

_PLACED = {
    "recommended", "nearest", "missed", "candidates", "rejected", "warnings", "accuracy",
    "sensitivity", "vary", "frontier", "profile_document", "kinds",
}  # fmt: skip
_PLACED_OF_CANDIDATE = {
    "instance", "instances", "tensor_parallel", "replicas", "engine", "slos", "warnings", "reason",
    "blended_3to1_as_published_reason", "setting", *(key for key, _, _ in PRICES),
}  # fmt: skip
_SHOWN_CANDIDATES = 12


def build_recommendation_view(content: Mapping[str, Any], *, anchor: str) -> RecommendationView:
    """The view of one recommendation file; raises InputError for another kind of file."""
    answer = Recommendation.from_json(content)
    chosen = answer.recommended or answer.nearest
    return RecommendationView(
        anchor=anchor,
        title=f"Recommendation for {answer.question.model}",
        subtitle=_subtitle(answer),
        met=answer.recommended is not None,
        why="" if chosen is None else chosen.reason,
        headline=_headline(answer, chosen),
        headlines=() if chosen is None else _figure_headlines(chosen),
        figures=None if chosen is None else figures_table(chosen),
        candidates=candidates_table(answer.candidates[:_SHOWN_CANDIDATES], chosen, "Candidates"),
        more_candidates=candidates_table(answer.candidates[_SHOWN_CANDIDATES:], chosen, ""),
        slos=None if chosen is None else slo_outlook_table(chosen.slos),
        rejected=rejected_groups(answer.rejected),
        accuracy=accuracy_table(answer.accuracy),
        provenance=_provenance(content, chosen),
        warnings=answer.warnings,
    )


def _headline(answer: Recommendation, chosen: Candidate | None) -> Headline:
    if chosen is None:
        return Headline("Recommendation", "none", "", "no candidate fits", "bad")
    copies = f"{chosen.copies} {'copy' if chosen.copies == 1 else 'copies'} a machine"
    price = chosen.price_usd_per_hour
    parts = [
        f"TP {chosen.tensor_parallel}",
        copies,
        chosen.setting.describe(),
        "no price known" if price is None else usd(price, per="/h"),
    ]
    if chosen.usd_per_1m_output_tokens is not None:
        parts.append(f"{usd(chosen.usd_per_1m_output_tokens)} per 1M output tokens")
    detail = ", ".join(part for part in parts if part) + _how_sure(chosen)
    machines = chosen.instances
    fleet = chosen.instance if machines == 1 else f"{machines:,} × {chosen.instance}"
    if answer.recommended is not None:
        return Headline("Recommended", fleet, "", detail, "good")
    missed = answer.missed or "the SLOs"
    verb = "carries" if missed == "the load" else "meets"
    return Headline(f"Nearest, no candidate {verb} {missed}", fleet, "", detail, "bad")


def _how_sure(chosen: Candidate) -> str:
    """The candidate's capacity with its interval, and the confidence of each SLO."""
    text = ""
    capacity = chosen.figures.get("capacity_rate_per_s")
    if capacity is not None:
        text = f"; carries {number(capacity.value)} req/s"
        text += f" (interval {number(capacity.low)} to {number(capacity.high)})"
    confidences = ", ".join(f"{each.slo} {each.confidence}" for each in chosen.slos)
    return f"{text}; {confidences}" if confidences else text


def _figure_headlines(chosen: Candidate) -> tuple[Headline, ...]:
    """The most important figures of the chosen candidate, or all if it has none of them."""
    known = {key: figure for key, figure in chosen.figures.items() if figure is not None}
    headlines = []
    for key in [key for key in known if key in FIRST_FIGURES] or known:
        title, _, unit = key_title(key).partition(", ")
        ends = interval(known[key])
        detail = f"interval {ends}" if ends else ""
        headlines.append(Headline(title, number(known[key].value), unit, detail))
    return tuple(headlines)


def _provenance(content: Mapping[str, Any], chosen: Candidate | None) -> tuple[Facts, ...]:
    """The origin of each number: everything in the file except its candidates."""
    facts = [*planning_facts(content), Facts("How it was found", tuple(_flatten(content, _PLACED)))]
    if chosen is not None:
        placed = {*_PLACED_OF_CANDIDATE, *chosen.figures}
        facts.append(Facts("The candidate named above", tuple(_flatten(chosen.to_json(), placed))))
    return tuple(each for each in facts if each.items)


def _flatten(content: Mapping[str, Any], left_out: set[str]) -> list[tuple[str, str]]:
    items = []
    for key, value in content.items():
        if key in left_out or value in (None, [], {}, ""):
            continue
        if isinstance(value, Mapping):
            items += [
                (f"{key_title(key)}: {key_title(str(inner))}", plain(each))
                for inner, each in value.items()
            ]
        else:
            items.append((key_title(key), plain(value)))
    return items


def _subtitle(answer: Recommendation) -> str:
    question = answer.question
    parts = [f"{question.input_tokens:,} tokens in, {question.output_tokens:,} out", question.load]
    parts += [", ".join(question.slos), f"ranked by {question.objective}"]
    return " · ".join(part for part in parts if part)


def planning_facts(content: Mapping[str, Any]) -> list[Facts]:
    """Sensitivity, frontier and cheapest layouts by load, as far as the file has them."""
    facts = [
        Facts("What would change the answer", tuple(_sensitivity(content))),
        Facts("Cheapest to fastest, none beaten in both", tuple(_frontier(content))),
        Facts("Cheapest layout by load", tuple(_winners(content))),
    ]
    return [each for each in facts if each.items]


def _mappings(content: Any, key: str) -> Iterator[Mapping[str, Any]]:
    values = content.get(key) if isinstance(content, Mapping) else None
    if isinstance(values, list | tuple):
        yield from (each for each in values if isinstance(each, Mapping))


def _sensitivity(content: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for each in _mappings(content, "sensitivity"):
        yield str(each.get("what") or "?"), str(each.get("text") or "")


def _frontier(content: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    found = list(_mappings(content, "frontier"))
    if len(found) > 1:
        for index, each in enumerate(found):
            name = f"{each.get('instances')} × {each.get('instance')}"
            yield str(index + 1), f"{name}, TP {each.get('tensor_parallel')}"


def _winners(content: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for each in _mappings(content.get("vary"), "intervals"):
        span = f"{number(each.get('from_per_s'))} to {number(each.get('to_per_s'))} req/s"
        fewest, most = each.get("fewest_machines"), each.get("most_machines")
        machines = str(fewest) if fewest == most else f"{fewest} to {most}"
        yield (
            span,
            f"{machines} × {each.get('instance')}, TP {each.get('tensor_parallel')}, "
            f"{usd(each.get('least_usd_per_hour'), per='/h')} to "
            f"{usd(each.get('most_usd_per_hour'), per='/h')}",
        )
