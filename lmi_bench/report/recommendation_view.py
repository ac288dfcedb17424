"""The content of a report's section about a recommendation, from a file of `recommend --json`.

Known keys have a place of their own; every other key is listed under provenance.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lmi_bench.analysis.fit.from_run import LevelAccuracy
from lmi_bench.analysis.fleet.answer import Candidate, Recommendation, SloOutlook
from lmi_bench.analysis.level.layouts import Rejection
from lmi_bench.core.slo import parse_slo
from lmi_bench.report.explore import CANDIDATES, candidates_data, fleet_roofline
from lmi_bench.report.formats import MISSING, count, interval, key_title, number, plain, usd
from lmi_bench.report.table import Cell, Field, Table, field, table_of
from lmi_bench.report.values import Facts, Headline, RecommendationView, RejectedGroup

# field, group of columns, title
_PRICES = (
    ("price_usd_per_hour", "Price, USD", "an hour"),
    ("usd_per_1m_output_tokens", "Price, USD", "1M output tokens"),
)
_MORE_PRICES = (
    ("usd_per_month", "Price, USD", "a month"),
    ("usd_per_1m_total_tokens", "Price, USD", "1M tokens in and out"),
    ("usd_per_1m_output_tokens_at_saturation", "The same, saturated", "output"),
    ("usd_per_1m_total_tokens_at_saturation", "The same, saturated", "in and out"),
    ("blended_3to1_as_published", "Blended 3:1", "as published"),
)
# The most important figures; the table of figures lists all of them.
_FIRST_FIGURES = (
    "capacity_rate_per_s", "throughput_tokens_per_s", "ttft_p90_ms", "itl_p50_ms",
    "latency_per_token_p90_ms",
)  # fmt: skip
_CONFIDENCE_TONES = {"sure": "good", "likely": "warn", "missed": "bad"}
_PLACED = {
    "recommended", "nearest", "missed", "candidates", "rejected", "warnings", "accuracy",
    "sensitivity", "vary", "frontier", "profile_document", "kinds",
}  # fmt: skip
_PLACED_OF_CANDIDATE = {
    "instance", "instances", "tensor_parallel", "replicas", "engine", "slos", "warnings", "reason",
    "blended_3to1_as_published_reason", "setting", "estimated", "price_range_usd_per_hour",
    *(key for key, _, _ in (*_PRICES, *_MORE_PRICES)),
}  # fmt: skip
_SHOWN_CANDIDATES = 12
_NUMBER = re.compile(r"[A-Za-z]*\$?\d(?:[\d,]*\d)?(?:\.\d+)?")  # and names such as `A100`


def build_recommendation_view(content: Mapping[str, Any], *, anchor: str) -> RecommendationView:
    """The view of one recommendation file; raises InputError for another kind of file."""
    answer = Recommendation.from_json(content)
    chosen, shown = answer.recommended or answer.nearest, answer.candidates[:CANDIDATES]
    return RecommendationView(
        anchor=anchor,
        title=f"Recommendation for {answer.question.model}",
        subtitle=_subtitle(answer),
        why="" if chosen is None else chosen.reason,
        headline=_headline(answer, chosen),
        answer=() if chosen is None else _answer(chosen),
        figures=None if chosen is None else _figures_table(chosen),
        candidates=_candidates_table(shown[:_SHOWN_CANDIDATES], chosen, "Candidates"),
        more_candidates=_candidates_table(shown[_SHOWN_CANDIDATES:], chosen, ""),
        unlisted=max(0, len(answer.candidates) - CANDIDATES),
        slos=None if chosen is None else _slo_outlook_table(chosen, answer),
        rejected=_rejected_groups(answer.rejected),
        accuracy=_accuracy_table(answer.accuracy),
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
    capacity = chosen.figures.get("capacity_rate_per_s")
    if capacity is not None:
        detail += f"; carries {number(capacity.value)} req/s"
        detail += f" (interval {number(capacity.low)} to {number(capacity.high)})"
    machines = chosen.instances
    fleet = chosen.instance if machines == 1 else f"{machines:,} × {chosen.instance}"
    if answer.recommended is not None:
        return Headline(f"Recommended for {answer.question.model}", fleet, "", detail, "good")
    missed = answer.missed or "the SLOs"
    verb = "carries" if missed == "the load" else "meets"
    return Headline(f"Nearest, no candidate {verb} {missed}", fleet, "", detail, "bad")


def _answer(chosen: Candidate) -> tuple[Headline, ...]:
    month, per_1m = chosen.usd_per_month, chosen.usd_per_1m_output_tokens
    mark = "~" if _estimate(chosen) else ""
    notes = (
        _estimate(chosen),
        f"{mark}{usd(month)} a month" if month is not None else "",
        f"{mark}{usd(per_1m)} per 1M output tokens" if per_1m is not None else "",
        chosen.price_provenance,
    )
    price = mark + usd(chosen.price_usd_per_hour)
    unit = "an hour" if chosen.price_usd_per_hour else ""
    tiles = [Headline("Price of the fleet", price, unit, "; ".join(filter(None, notes)))]
    found = chosen.attainment
    if found is not None and found.joint_attainment is not None:
        detail = f"of {count(found.requests)} simulated requests meet every SLO"
        tiles.append(Headline("Attainment", number(100 * found.joint_attainment), "%", detail))
    elif chosen.slos:
        reason = (found.reason if found else None) or "the load was not simulated"
        tiles.append(Headline("Attainment", "not known", "", reason))
    if chosen.slos:
        value, tone = ("pass", "good") if chosen.meets_slos else ("fail", "bad")
        each = (f"{o.slo}: {_predicted(chosen, o)}, {o.confidence}" for o in chosen.slos)
        tiles.append(Headline("SLOs", value, "", "; ".join(each), tone))
    return tuple(tiles)


def _estimate(candidate: Candidate) -> str:
    """The range of an estimated price; empty if it is stated."""
    between = candidate.price_range_usd_per_hour
    if between is None:
        return ""
    return f"estimated: {usd(between[0])} to {usd(between[1])} an hour"


def _predicted(chosen: Candidate, outlook: SloOutlook) -> str:
    """`176 ms (106 to 290)`: the figure under an SLO, with its interval where it is known."""
    slo = parse_slo(outlook.slo)
    figure = chosen.figures.get(f"{slo.metric}_{slo.statistic}_ms")
    between = "" if figure is None else interval(figure.low, figure.high)
    return f"{number(outlook.predicted_ms)} ms" + (f" ({between})" if between else "")


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
    return " · ".join(part for part in (*answer.caveats, *parts) if part)


def planning_facts(content: Mapping[str, Any]) -> list[Facts]:
    """Sensitivity, frontier and cheapest layouts by load, as far as the file has them."""
    changes = (
        (str(each.get("what") or "?"), str(each.get("text") or ""))
        for each in _mappings(content, "sensitivity")
    )
    frontier = [
        (
            str(index),
            f"{each.get('instances')} × {each.get('instance')}, TP {each.get('tensor_parallel')}",
        )
        for index, each in enumerate(_mappings(content, "frontier"), start=1)
    ]
    facts = [
        Facts("What would change the answer", tuple(changes)),
        Facts("Cheapest to fastest, none beaten in both", tuple(frontier if frontier[1:] else ())),
        Facts("Cheapest layout by load", tuple(_winners(content))),
    ]
    return [each for each in facts if each.items]


def _mappings(content: Any, key: str) -> Iterator[Mapping[str, Any]]:
    values = content.get(key) if isinstance(content, Mapping) else None
    if isinstance(values, list | tuple):
        yield from (each for each in values if isinstance(each, Mapping))


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

        return field({"value": "Predicted"}.get(name, name.capitalize()), text)

    fields = (field("Figure", key_title, numeric=False), end("value"), end("low"), end("high"))
    shown = sorted(chosen.figures, key=lambda key: chosen.figures[key] is None)
    return table_of("Predicted for it", fields, shown) if shown else None


def _candidates_table(
    candidates: Sequence[Candidate], chosen: Candidate | None, caption: str
) -> Table | None:
    if not candidates:
        return None
    known = dict.fromkeys(name for each in candidates for name in each.figures)

    def prices(rows: Sequence[tuple[str, str, str]]) -> list[Field[Candidate]]:
        """The columns in which a candidate has a value."""
        return [
            _price_field(*row)
            for row in rows
            if any(getattr(each, row[0]) is not None for each in candidates)
        ]

    words: tuple[Field[Candidate], ...] = (
        field("Engine", lambda each: each.setting.describe() or MISSING, numeric=False),
        field("Limited by", lambda each: each.limited_by or MISSING, numeric=False),
        field("Basis", lambda each: each.basis or MISSING, numeric=False),
    )
    fields: tuple[Field[Candidate], ...] = (
        field("Instance", lambda each: each.instance, numeric=False),
        field("Machines", lambda each: count(each.instances)),
        field("TP", lambda each: count(each.tensor_parallel)),
        field("Copies a machine", lambda each: count(each.copies)),
        *prices(_PRICES),
        *(
            field(key_title(key), lambda each, key=key: _figure_cell(each, key))  # type: ignore[misc]
            for key in [key for key in _FIRST_FIGURES if key in known] or known
        ),
        *prices(_MORE_PRICES),
        *(word for word in words if any(word.cell(each).text != MISSING for each in candidates)),
    )
    note = (
        "Best first, with 80 % intervals. Highlighted: the one named above. A missing price is not "
        "known; ~: an estimated price."
    )
    return table_of(
        caption, fields, candidates, note if caption else "", strong=lambda each: each == chosen
    )


def _price_field(name: str, group: str, title: str) -> Field[Candidate]:
    def cell(candidate: Candidate) -> Cell:
        value = getattr(candidate, name)
        if value is not None:
            estimate = _estimate(candidate)
            return Cell(("~" if estimate else "") + usd(value), estimate)
        reason = candidate.blended_reason if name.startswith("blended") else None
        return Cell(MISSING, reason or "not known", "na")

    return field(title, cell, group)


def _figure_cell(candidate: Candidate, key: str) -> Cell:
    figure = candidate.figures.get(key)
    if figure is not None:
        return Cell(number(figure.value), interval=interval(figure.low, figure.high))
    if key in candidate.withheld:
        return Cell("n/a", candidate.withheld[key], "na")
    return Cell(MISSING, "not predicted", "na")


def _slo_outlook_table(chosen: Candidate, answer: Recommendation) -> Table | None:
    """The confidence of each SLO at the planned load, and the slack to its limit."""

    def confidence(each: SloOutlook) -> Cell:
        return Cell(each.confidence, "", _CONFIDENCE_TONES.get(each.confidence, ""))

    fields: tuple[Field[SloOutlook], ...] = (
        field("SLO", lambda each: each.slo, numeric=False),
        field("Predicted", lambda each: _predicted(chosen, each)),
        field("Limit, ms", lambda each: number(each.limit_ms)),
        field("Slack, ms", lambda each: number(each.slack_ms)),
        field("Confidence", confidence, numeric=False),
    )
    note = "sure: holds at the upper end of the interval; likely: holds as predicted."
    load = "the planned load" if answer.question.states_load else answer.question.load
    title = f"Service-level objectives at {load}"
    return table_of(title, fields, chosen.slos, note) if chosen.slos else None


def by_reason(rejected: Sequence[Rejection]) -> list[list[Rejection]]:
    """Layouts by kind of reason, the most frequent first: the same sentence apart from names and
    numbers."""
    groups: dict[str, list[Rejection]] = {}
    for each in rejected:
        groups.setdefault(_NUMBER.sub("…", _reason_of(each)), []).append(each)
    return sorted(groups.values(), key=len, reverse=True)


def _rejected_groups(rejected: Sequence[Rejection]) -> tuple[RejectedGroup, ...]:
    fields: tuple[Field[Rejection], ...] = (
        field("Instance", lambda each: each.instance_type, numeric=False),
        field("TP", lambda each: count(each.tensor_parallel)),
        field("Reason", lambda each: each.reason, numeric=False),
    )
    return tuple(
        RejectedGroup(_shared_text(members), table_of("", fields, members))
        for members in by_reason(rejected)
    )


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


def _accuracy_table(levels: Sequence[LevelAccuracy] | None) -> Table | None:
    """Predicted against measured, where the recommendation was calibrated on a run."""
    metrics = list(dict.fromkeys(key for level in levels or () for key in level.figures))
    if not levels or not metrics:
        return None

    def side(key: str, name: str) -> Field[LevelAccuracy]:
        def cell(level: LevelAccuracy) -> Cell:
            if (pair := level.figures.get(key)) is None:
                return Cell(MISSING)
            return _error(*pair) if name == "error" else Cell(number(getattr(pair, name)))

        return field(name, cell, key_title(key))

    sides = (side(key, name) for key in metrics for name in ("measured", "predicted", "error"))
    fields = (field("Level", lambda level: plain(level.concurrency)), *sides)
    return table_of("Predicted against measured", fields, levels)


def _error(measured: float, predicted: float) -> Cell:
    if not measured:
        return Cell(MISSING, "", "na")
    error = predicted / measured - 1
    return Cell(f"{error:+.0%}", "", "warn" if abs(error) > 0.25 else "")
