"""The tables of a recommendation: figures, SLOs, candidates, rejected ones, accuracy."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from lmi_bench.report.formats import MISSING, count, key_title, number, plain, usd
from lmi_bench.report.table import Cell, Column, Row, Table
from lmi_bench.report.values import RejectedGroup

IDENTITY = ("instance", "instances", "tensor_parallel", "replicas", "engine")
# key, group of columns, title
PRICES = (
    ("price_usd_per_hour", "Fleet", "USD/h"),
    ("usd_per_month", "Fleet", "USD/month"),
    ("usd_per_1m_output_tokens", "USD per 1M tokens", "output"),
    ("usd_per_1m_total_tokens", "USD per 1M tokens", "in and out"),
    ("usd_per_1m_output_tokens_at_saturation", "The same, saturated", "output"),
    ("usd_per_1m_total_tokens_at_saturation", "The same, saturated", "in and out"),
    ("blended_3to1_as_published", "Blended 3:1", "as published"),
)
# The figures to read first, where the file has any of them; all of them are listed below.
FIRST_FIGURES = (
    "capacity_rate_per_s",
    "capacity_tokens_per_s",
    "throughput_tokens_per_s",
    "ttft_p90_ms",
    "itl_p50_ms",
    "latency_per_token_p90_ms",
)
_WORDS = (("engine", "Engine"), ("limited_by", "Limited by"), ("basis", "Basis"))

Candidate = Mapping[str, Any]


def figures_table(chosen: Candidate) -> Table | None:
    rows = [
        Row(
            (
                Cell(key_title(key)),
                Cell(number(value.get("predicted"))),
                Cell(number(value.get("low"))),
                Cell(number(value.get("high"))),
            )
        )
        for key, value in figures_of(chosen)
    ]
    rows += [
        Row((Cell(key_title(str(key))), Cell("n/a", str(why), "na"), Cell(MISSING), Cell(MISSING)))
        for key, why in (chosen.get("withheld") or {}).items()
    ]
    columns = (
        Column("Figure", numeric=False),
        Column("Predicted"),
        Column("Low"),
        Column("High"),
    )
    return Table("", columns, tuple(rows)) if rows else None


def figures_of(candidate: Candidate) -> list[tuple[str, Mapping[str, Any]]]:
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


def candidates_table(
    candidates: Sequence[Candidate], chosen: Candidate, caption: str
) -> Table | None:
    if not candidates:
        return None
    known = dict.fromkeys(
        str(key)
        for each in candidates
        for key in (*(key for key, _ in figures_of(each)), *(each.get("withheld") or {}))
    )
    figure_keys = [key for key in FIRST_FIGURES if key in known] or list(known)
    words = [(key, title) for key, title in _WORDS if any(each.get(key) for each in candidates)]
    prices = [price for price in PRICES if any(price[0] in each for each in candidates)]
    columns = (
        Column("Instance", numeric=False),
        Column("Machines"),
        Column("TP"),
        Column("Copies a machine"),
        *(Column(title, group) for _, group, title in prices),
        *(Column(key_title(key)) for key in figure_keys),
        *(Column(title, numeric=False) for _, title in words),
    )
    rows = []
    for candidate in candidates:
        figures = dict(figures_of(candidate))
        rows.append(
            Row(
                (
                    Cell(str(candidate.get("instance") or "?")),
                    Cell(count(candidate.get("instances"))),
                    Cell(count(candidate.get("tensor_parallel"))),
                    Cell(count(candidate.get("replicas"))),
                    *(_price_cell(candidate, key) for key, _, _ in prices),
                    *(
                        _figure_cell(figures.get(key), candidate.get("withheld"), key)
                        for key in figure_keys
                    ),
                    *(Cell(plain(candidate.get(key))) for key, _ in words),
                ),
                strong=_same(candidate, chosen),
            )
        )
    note = (
        "Best first; hover a figure for its interval. Highlighted: the one named above. A missing "
        "price is not known and is never guessed."
    )
    return Table(caption, columns, tuple(rows), note if caption else "")


def _same(candidate: Candidate, chosen: Candidate) -> bool:
    return bool(chosen) and all(candidate.get(key) == chosen.get(key) for key in IDENTITY)


def _price_cell(candidate: Candidate, key: str) -> Cell:
    value = candidate.get(key)
    if isinstance(value, Mapping):  # a price that carries its conditions or its reason
        inner = value.get("value", value.get("usd_per_1m_tokens"))
        reason = str(value.get("reason") or "not applicable")
        return Cell("n/a", reason, "na") if inner is None else Cell(usd(inner), plain(value))
    if value is None:
        known = candidate.get("blended_reason" if key.startswith("blended") else f"{key}_reason")
        return Cell(MISSING, str(known or "not known"), "na")
    return Cell(usd(value))


def _figure_cell(value: Mapping[str, Any] | None, withheld: object, key: str) -> Cell:
    if value is None:
        known = withheld.get(key) if isinstance(withheld, Mapping) else None
        return Cell("n/a", str(known), "na") if known else Cell(MISSING, "not predicted", "na")
    predicted = value.get("predicted")
    if predicted is None:
        return Cell("n/a", str(value.get("reason") or "not predicted here"), "na")
    low, high = value.get("low"), value.get("high")
    hint = "" if low is None or high is None else f"{number(low)} to {number(high)}"
    return Cell(number(predicted), hint)


def slo_outlook_table(outlooks: object) -> Table | None:
    """How sure each SLO is at the planned load, and what is left to its limit."""
    if not isinstance(outlooks, list | tuple) or not outlooks:
        return None
    tones = {"sure": "good", "likely": "warn", "missed": "bad"}
    rows = []
    for each in outlooks:
        if isinstance(each, Mapping):
            confidence = str(each.get("confidence") or "unknown")
            rows.append(
                Row(
                    (
                        Cell(str(each.get("slo") or "?")),
                        Cell(number(each.get("predicted_ms"))),
                        Cell(number(each.get("limit_ms"))),
                        Cell(number(each.get("slack_ms"))),
                        Cell(confidence, "", tones.get(confidence, "")),
                    )
                )
            )
    columns = (
        Column("SLO", numeric=False),
        Column("Predicted, ms"),
        Column("Limit, ms"),
        Column("Slack, ms"),
        Column("Confidence", numeric=False),
    )
    note = "sure: holds at the upper end of the interval; likely: holds as predicted."
    return Table("Service-level objectives at the planned load", columns, tuple(rows), note)


def rejected_groups(rejected: Sequence[Any]) -> tuple[RejectedGroup, ...]:
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
        views.append(RejectedGroup(_shared_text(members, kind), Table("", columns, rows)))
    return tuple(views)


def _shared_text(members: Sequence[Candidate], kind: str) -> str:
    """The members' reason, with an ellipsis for the numbers in which they differ alone."""
    reasons = sorted({_reason_of(each) for each in members})
    columns = list(zip(*(reason.split() for reason in reasons), strict=False))
    if any(len(reason.split()) != len(columns) for reason in reasons):
        return kind
    words = []
    for column in columns:
        found = {word if len(set(column)) == 1 else _unnumbered(word) for word in column}
        if len(found) > 1:
            return kind
        words.append(found.pop())
    return " ".join(words)


def _unnumbered(text: str) -> str:
    return re.sub(r"\$?\d[\d,.]*\d|\d", "…", text)


def _kind_of(candidate: Candidate) -> str:
    if candidate.get("kind"):
        return key_title(str(candidate["kind"]))
    return _unnumbered(_reason_of(candidate))


def _reason_of(candidate: Candidate) -> str:
    """The reason without the instance's own name, which has numbers in it."""
    reason = str(candidate.get("reason") or "no reason given")
    instance = candidate.get("instance")
    return reason.replace(str(instance), "the instance") if instance else reason


def accuracy_table(accuracy: object) -> Table | None:
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
