"""A recommendation as a report shows it, from what `recommend --json` writes.

Known keys get their place; figures are every key whose value is {predicted, low, high}; what is
left over is shown as it is under provenance, so that a newer file loses nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from lmi_bench.report.formats import MISSING, count, key_title, number, plain, usd
from lmi_bench.report.values import (
    Cell,
    Column,
    Facts,
    Headline,
    RecommendationView,
    RejectedGroup,
    Row,
    Table,
)

_IDENTITY = ("instance", "instances", "tensor_parallel", "replicas")
_PRICES = (
    ("price_usd_per_hour", "Price, USD/h"),
    ("usd_per_1m_output_tokens", "USD per 1M output tokens"),
    ("usd_per_1m_total_tokens", "USD per 1M tokens in and out"),
    ("blended_3to1_as_published", "USD per 1M tokens, blended 3:1 as published"),
    ("usd_per_month", "USD/month at this load"),
)
_PLACED = {"recommended", "nearest", "candidates", "rejected", "warnings", "accuracy", "title"}
_SHOWN_CANDIDATES = 25

Candidate = Mapping[str, Any]


def build_recommendation_view(content: Mapping[str, Any], *, anchor: str) -> RecommendationView:
    """The view of one recommendation file."""
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
        headline=_headline(chosen, met=met),
        headlines=_figure_headlines(chosen),
        candidates=_candidates_table(candidates, chosen) if candidates else None,
        rejected=_rejected_groups(content.get("rejected") or ()),
        accuracy=_accuracy_table(content.get("accuracy")),
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
    return ", ".join(parts)


def _headline(chosen: Candidate, *, met: bool) -> Headline:
    if not chosen:
        return Headline("Recommendation", "none", "", "no candidate fits", "bad")
    price = chosen.get("price_usd_per_hour")
    detail = ", ".join(part for part in (_layout(chosen), usd(price, per="/h")) if part)
    if price is None:
        detail = ", ".join(part for part in (_layout(chosen), "no price known") if part)
    if chosen.get("usd_per_1m_output_tokens") is not None:
        detail += f", {usd(chosen['usd_per_1m_output_tokens'])} per 1M output tokens"
    if met:
        return Headline("Recommended", name_candidate(chosen), "", detail, "good")
    return Headline(
        "Nearest, no candidate meets the SLOs", name_candidate(chosen), "", detail, "bad"
    )


def _figure_headlines(chosen: Candidate) -> tuple[Headline, ...]:
    headlines = []
    for key, value in _figures(chosen):
        title, _, unit = key_title(key).partition(", ")
        low, high = value.get("low"), value.get("high")
        interval = ""
        if low is not None and high is not None:
            interval = f"interval {number(low)} to {number(high)}"
        headlines.append(Headline(title, number(value.get("predicted")), unit, interval))
    return tuple(headlines)


def _figures(candidate: Candidate) -> list[tuple[str, Mapping[str, Any]]]:
    """Predicted figures, those of a nested mapping such as `predicted` included."""
    found = []
    for key, value in candidate.items():
        if not isinstance(value, Mapping):
            continue
        if "predicted" in value:
            found.append((str(key), value))
        else:
            found += [
                (str(inner), each)
                for inner, each in value.items()
                if isinstance(each, Mapping) and "predicted" in each
            ]
    return found


def _candidates_table(candidates: Sequence[Candidate], chosen: Candidate) -> Table:
    shown = candidates[:_SHOWN_CANDIDATES]
    figure_keys = list(dict.fromkeys(key for each in shown for key, _ in _figures(each)))
    prices = [(key, title) for key, title in _PRICES if any(key in each for each in shown)]
    columns = (
        Column("Instance", numeric=False),
        Column("Machines"),
        Column("TP"),
        Column("Copies a machine"),
        *(Column(title) for _, title in prices),
        *(Column(key_title(key)) for key in figure_keys),
    )
    rows = []
    for candidate in shown:
        figures = dict(_figures(candidate))
        rows.append(
            Row(
                (
                    Cell(str(candidate.get("instance") or "?")),
                    Cell(count(candidate.get("instances"))),
                    Cell(count(candidate.get("tensor_parallel"))),
                    Cell(count(candidate.get("replicas"))),
                    *(_price_cell(candidate, key) for key, _ in prices),
                    *(_figure_cell(figures.get(key)) for key in figure_keys),
                ),
                strong=_same(candidate, chosen),
            )
        )
    note = "Best first; hover a figure for its interval. Highlighted: the one at the top of the "
    note += "page. A missing price is not known and is never guessed."
    if len(candidates) > len(shown):
        note += f" {len(candidates) - len(shown)} more are in the recommendation's file."
    return Table("Candidates", columns, tuple(rows), note)


def _same(candidate: Candidate, chosen: Candidate) -> bool:
    return bool(chosen) and all(candidate.get(key) == chosen.get(key) for key in _IDENTITY)


def _price_cell(candidate: Candidate, key: str) -> Cell:
    value = candidate.get(key)
    if isinstance(value, Mapping):  # a price that carries its conditions or its reason
        inner = value.get("value", value.get("usd_per_1m_tokens"))
        reason = str(value.get("reason") or "not applicable")
        return Cell("n/a", reason, "na") if inner is None else Cell(usd(inner), plain(value))
    if value is None:
        known = candidate.get(f"{key}_reason") or candidate.get(f"{key}_null_because")
        return Cell(MISSING, str(known or "not known"), "na")
    return Cell(usd(value))


def _figure_cell(value: Mapping[str, Any] | None) -> Cell:
    if value is None:
        return Cell(MISSING, "not predicted", "na")
    predicted = value.get("predicted")
    if predicted is None:
        return Cell("n/a", str(value.get("reason") or "not predicted here"), "na")
    low, high = value.get("low"), value.get("high")
    hint = "" if low is None or high is None else f"{number(low)} to {number(high)}"
    return Cell(number(predicted), hint)


def _rejected_groups(rejected: Sequence[Any]) -> tuple[RejectedGroup, ...]:
    """Rejected candidates by kind of reason: the same sentence but for its names and numbers."""
    groups: dict[str, list[Candidate]] = {}
    for candidate in rejected:
        if isinstance(candidate, Mapping):
            groups.setdefault(_kind_of(candidate), []).append(candidate)
    columns = (
        Column("Instance", numeric=False),
        Column("Machines"),
        Column("TP"),
        Column("Price, USD/h"),
        Column("Reason", numeric=False),
    )
    views = []
    for kind, members in sorted(groups.items(), key=lambda item: -len(item[1])):
        rows = tuple(
            Row(
                (
                    Cell(str(each.get("instance") or "?")),
                    Cell(count(each.get("instances"))),
                    Cell(count(each.get("tensor_parallel"))),
                    _price_cell(each, "price_usd_per_hour"),
                    Cell(str(each.get("reason") or "no reason given")),
                )
            )
            for each in members
        )
        views.append(RejectedGroup(kind, Table("", columns, rows)))
    return tuple(views)


def _kind_of(candidate: Candidate) -> str:
    if candidate.get("kind"):
        return key_title(str(candidate["kind"]))
    reason = str(candidate.get("reason") or "no reason given")
    instance = candidate.get("instance")
    if instance:
        reason = reason.replace(str(instance), "the instance")
    return re.sub(r"\$?\d[\d,.]*\d|\d", "…", reason)


def _accuracy_table(accuracy: object) -> Table | None:
    """Predicted against measured, where the recommendation was calibrated on a run.

    Read from `accuracy.levels`: rows with a load, and a mapping {measured, predicted} a metric.
    """
    rows_of = accuracy.get("levels") if isinstance(accuracy, Mapping) else None
    if not isinstance(rows_of, list | tuple):
        return None
    lines = [each for each in rows_of if isinstance(each, Mapping)]
    metrics = list(
        dict.fromkeys(
            key
            for each in lines
            for key, value in each.items()
            if isinstance(value, Mapping) and "measured" in value
        )
    )
    columns = [Column("Level")]
    for key in metrics:
        columns += [
            Column(name, key_title(str(key))) for name in ("measured", "predicted", "error")
        ]
    rows = []
    for line in lines:
        load = line.get("concurrency", line.get("rate_per_s"))
        cells = [Cell(plain(load))]
        for key in metrics:
            pair = line.get(key) or {}
            measured, predicted = pair.get("measured"), pair.get("predicted")
            cells += [Cell(number(measured)), Cell(number(predicted)), _error(measured, predicted)]
        rows.append(Row(tuple(cells)))
    if not rows or not metrics:
        return None
    return Table("Predicted against measured", tuple(columns), tuple(rows))


def _error(measured: float | None, predicted: float | None) -> Cell:
    if not measured or predicted is None:
        return Cell(MISSING, "", "na")
    error = predicted / measured - 1
    return Cell(f"{error:+.0%}", "", "warn" if abs(error) > 0.25 else "")


def _provenance(content: Mapping[str, Any], chosen: Candidate) -> tuple[Facts, ...]:
    """Where each number comes from: whatever the file says beside its candidates."""
    facts = [Facts("How it was found", tuple(_flatten(content, _PLACED)))]
    figures = {key for key, _ in _figures(chosen)}
    placed = {*_IDENTITY, *(key for key, _ in _PRICES), *figures, "predicted"}
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
    if content.get("rate_per_s") is not None:
        parts.append(f"{number(content['rate_per_s'])} req/s over the fleet")
    slos = content.get("slo") or content.get("slos")
    if isinstance(slos, list | tuple) and slos:
        parts.append(", ".join(plain(slo) for slo in slos))
    if content.get("objective"):
        parts.append(f"ranked by {content['objective']}")
    return " · ".join(parts)
