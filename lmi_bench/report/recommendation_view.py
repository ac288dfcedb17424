"""A recommendation as a report shows it, from what `recommend --json` writes.

Known keys get their place; figures are every key whose value is {predicted, low, high}; what is
left over is shown as it is under provenance, so that a newer file loses nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lmi_bench.report.formats import key_title, number, plain, usd
from lmi_bench.report.planning_facts import planning_facts
from lmi_bench.report.tables.recommendation import (
    FIRST_FIGURES,
    IDENTITY,
    PRICES,
    Candidate,
    accuracy_table,
    candidates_table,
    figures_of,
    figures_table,
    rejected_groups,
    slo_outlook_table,
)
from lmi_bench.report.values import Facts, Headline, RecommendationView

_PLACED = {
    "recommended",
    "nearest",
    "missed",
    "candidates",
    "rejected",
    "warnings",
    "accuracy",
    "title",
}
_PLACED |= {"sensitivity", "vary", "frontier", "profile_document", "kinds"}
_PLACED_OF_CANDIDATE = {"withheld", "slos", "warnings", "reason", "blended_reason", "predicted"}
_PLACED_OF_CANDIDATE |= {"setting"}
_SHOWN_CANDIDATES = 12


def build_recommendation_view(content: Mapping[str, Any], *, anchor: str) -> RecommendationView:
    """The view of one recommendation file."""
    question = content.get("question")
    if isinstance(question, Mapping):
        content = {**content, **question}
        content.pop("question")
    recommended = content.get("recommended")
    chosen = recommended or content.get("nearest") or {}
    met = recommended is not None
    candidates = [each for each in content.get("candidates") or () if isinstance(each, Mapping)]
    model = str(content.get("model") or "")
    return RecommendationView(
        anchor=anchor,
        title=str(content.get("title") or (f"Recommendation for {model}" if model else ""))
        or "Recommendation",
        subtitle=_subtitle(content),
        met=met,
        why=str(chosen.get("reason") or ""),
        headline=_headline(content, chosen, met=met),
        headlines=_figure_headlines(chosen),
        figures=figures_table(chosen),
        candidates=candidates_table(candidates[:_SHOWN_CANDIDATES], chosen, "Candidates"),
        more_candidates=candidates_table(candidates[_SHOWN_CANDIDATES:], chosen, ""),
        slos=slo_outlook_table(chosen.get("slos")),
        rejected=rejected_groups(content.get("rejected") or ()),
        accuracy=accuracy_table(content.get("accuracy")),
        provenance=_provenance(content, chosen),
        warnings=tuple(str(warning) for warning in content.get("warnings") or ()),
    )


def name_candidate(candidate: Candidate) -> str:
    """`2 x ml.g5.12xlarge`, or the instance alone where one machine is enough."""
    instance = str(candidate.get("instance") or "?")
    machines = candidate.get("instances") or 1
    return instance if machines == 1 else f"{machines:,} × {instance}"


def _layout(candidate: Candidate) -> str:
    parts = []
    if candidate.get("tensor_parallel") is not None:
        parts.append(f"TP {candidate['tensor_parallel']}")
    replicas = candidate.get("replicas")
    if replicas is not None:
        parts.append(f"{replicas} {'copy' if replicas == 1 else 'copies'} a machine")
    if candidate.get("engine"):
        parts.append(str(candidate["engine"]))
    return ", ".join(parts)


def _headline(content: Mapping[str, Any], chosen: Candidate, *, met: bool) -> Headline:
    if not chosen:
        return Headline("Recommendation", "none", "", "no candidate fits", "bad")
    price = chosen.get("price_usd_per_hour")
    detail = ", ".join(part for part in (_layout(chosen), usd(price, per="/h")) if part)
    if price is None:
        detail = ", ".join(part for part in (_layout(chosen), "no price known") if part)
    if chosen.get("usd_per_1m_output_tokens") is not None:
        detail += f", {usd(chosen['usd_per_1m_output_tokens'])} per 1M output tokens"
    detail += _how_sure(chosen)
    if met:
        return Headline("Recommended", name_candidate(chosen), "", detail, "good")
    missed = str(content.get("missed") or "the SLOs")
    verb = "carries" if missed == "the load" else "meets"
    return Headline(
        f"Nearest, no candidate {verb} {missed}", name_candidate(chosen), "", detail, "bad"
    )


def _how_sure(chosen: Candidate) -> str:
    """The load that it carries with its interval, and how sure each SLO is."""
    text = ""
    capacity = chosen.get("capacity_rate_per_s")
    if isinstance(capacity, Mapping) and capacity.get("predicted") is not None:
        text = f"; carries {number(capacity['predicted'])} req/s"
        if capacity.get("low") is not None and capacity.get("high") is not None:
            text += f" (interval {number(capacity['low'])} to {number(capacity['high'])})"
    slos = [slo for slo in chosen.get("slos") or () if slo.get("confidence")]
    told = ", ".join(f"{slo['slo']} {slo['confidence']}" for slo in slos)
    return f"{text}; {told}" if told else text


def _figure_headlines(chosen: Candidate) -> tuple[Headline, ...]:
    """The first figures of the chosen candidate, or all where it has none of those."""
    figures = figures_of(chosen)
    first = [(key, value) for key, value in figures if key in FIRST_FIGURES] or figures
    headlines = []
    for key, value in first:
        title, _, unit = key_title(key).partition(", ")
        low, high = value.get("low"), value.get("high")
        interval = ""
        if low is not None and high is not None and low != high:
            interval = f"interval {number(low)} to {number(high)}"
        headlines.append(Headline(title, number(value.get("predicted")), unit, interval))
    return tuple(headlines)


def _provenance(content: Mapping[str, Any], chosen: Candidate) -> tuple[Facts, ...]:
    """Where each number comes from: whatever the file says beside its candidates."""
    facts = [*planning_facts(content), Facts("How it was found", tuple(_flatten(content, _PLACED)))]
    figures = {key for key, _ in figures_of(chosen)}
    placed = {*IDENTITY, *(key for key, _, _ in PRICES), *figures, *_PLACED_OF_CANDIDATE}
    facts.append(Facts("The candidate named above", tuple(_flatten(chosen, placed))))
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


def _subtitle(content: Mapping[str, Any]) -> str:
    parts = []
    workload = content.get("workload")
    if isinstance(workload, Mapping):
        content = {**workload, **content}
    if content.get("input_tokens") is not None and content.get("output_tokens") is not None:
        parts.append(
            f"{plain(content['input_tokens'])} tokens in, {plain(content['output_tokens'])} out"
        )
    if content.get("load"):
        parts.append(str(content["load"]))
    elif content.get("rate_per_s") is not None:
        parts.append(f"{number(content['rate_per_s'])} req/s over the fleet")
    slos = content.get("slo") or content.get("slos")
    if isinstance(slos, list | tuple) and slos:
        parts.append(", ".join(plain(slo) for slo in slos))
    if content.get("objective"):
        parts.append(f"ranked by {content['objective']}")
    return " · ".join(parts)
