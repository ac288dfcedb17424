"""The tables of a recommendation: candidates, cheapest layouts by load, accuracy of the profile."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from lmi_bench.analysis.fit.from_run import LevelAccuracy
from lmi_bench.analysis.fit.uncertainty import Estimate
from lmi_bench.analysis.fleet.answer import Candidate, LoadInterval, Variation
from lmi_bench.catalog.tables import Row, read_rows
from lmi_bench.core.slo import parse_slo
from lmi_bench.report.formats import MISSING, interval, key_title, number, plain, usd
from lmi_bench.report.table import NOTES, Cell, Field, Table, bracketed, table_of

_COLUMNS: Final = read_rows("candidate_columns.csv", "report")
"""Columns of a candidate: figures, which the page titles by their key, and prices."""
_FIGURES: Final = {row["key"]: row["console"] for row in _COLUMNS if row["of"] == "figures"}
_PRICES: Final = [row for row in _COLUMNS if row["of"] == "prices"]
PRICE_KEYS: Final = tuple(row["key"] for row in _PRICES)
CAPACITY: Final = _FIGURES["capacity_rate_per_s"]
_MARKS = {"likely": " ?", "measured": " measured", "missed": " missed"}
_TONES = {"likely": "warn", "missed": "bad"}


def money(candidate: Candidate, value_usd: float | None) -> str:
    """USD for people, with `~` if the price is an estimate."""
    mark = "~" if candidate.price_range_usd_per_hour is not None else ""
    return "?" if value_usd is None else mark + usd(value_usd).removeprefix("$")


def shown(figure: Estimate | None) -> str:
    """A prediction with its 80 % interval: `47 [41-55]`; alone if it is certain."""
    return bracketed(_estimate_cell(figure))


def fleet_name(candidate: Candidate, *, with_copies: bool = False) -> str:
    """Machines, degree, copies, setting: `2 x ml.p4d.24xlarge, TP 4, 2 copies a machine, int4`."""
    text = f"{candidate.instances} x {candidate.instance}, TP {candidate.tensor_parallel}"
    if with_copies:
        noun = "copy" if candidate.copies == 1 else "copies"
        text += f", {candidate.copies} {noun} a machine"
    setting = candidate.setting.describe()
    return f"{text}, {setting}" if setting else text


def _estimate_cell(figure: Estimate | None, why_not: str = "") -> Cell:
    if figure is None:
        return Cell("withheld", why_not, "na")
    return Cell(number(figure.value), interval=interval(figure.low, figure.high))


def _figure_field(key: str, console: str) -> Field[Candidate]:
    """A figure; one under an SLO with its confidence."""

    def cell(candidate: Candidate) -> Cell:
        if key not in candidate.figures:
            return Cell(MISSING, "not predicted", "na")
        found = _estimate_cell(candidate.figures[key], candidate.withheld.get(key, ""))
        for outlook in candidate.slos:
            if figure_key(outlook.slo) == key:
                mark = _MARKS.get(outlook.confidence, "")
                tone = _TONES.get(outlook.confidence, found.tone)
                return Cell(found.text + mark, found.hint, tone, found.interval)
        return found

    return Field(key_title(key), cell, console=console)


def figure_key(slo: str) -> str:
    """The figure that an SLO limits."""
    found = parse_slo(slo)
    return f"{found.metric}_{found.statistic}_ms"


def slo_heading(slo: str) -> str:
    """The console's heading of the figure under an SLO."""
    found = parse_slo(slo)
    if found.metric == "latency_per_token":
        return f"ms/token {found.statistic}"
    return f"{found.metric.upper() if len(found.metric) < 5 else found.metric} {found.statistic} ms"


def _price_field(row: Row) -> Field[Candidate]:
    key = row["key"]

    def cell(candidate: Candidate) -> Cell:
        value, between = getattr(candidate, key), candidate.price_range_usd_per_hour
        if value is None:
            reason = candidate.blended_reason if key.startswith("blended") else None
            return Cell("?", reason or "not known", "na")
        ends = between and f"estimated: {usd(between[0])} to {usd(between[1])} an hour"
        return Cell(money(candidate, value), ends or "")

    return Field(row["title"], cell, row["group"], console=row["console"])


def _price_of(candidate: Candidate) -> str:
    """The source of a row's price: component, region, date."""
    cost = candidate.cost
    if cost.machine_price_usd_per_hour is None:
        return "no price known"
    date = str(cost.price_date).split(" (")[0]
    component = str(cost.price_component).replace("component not stated", "")
    return f"{cost.price_region} {date} {component}".strip()


def candidate_fields(candidates: Sequence[Candidate]) -> tuple[Field[Candidate], ...]:
    """Fleet, price, figures, those under SLOs last, and what limits it; columns with a value."""
    limited = {figure_key(each.slo): slo_heading(each.slo) for one in candidates for each in one.slos}
    figures = {key: title for key, title in _FIGURES.items() if key not in limited} | limited
    more = [
        row
        for row in _PRICES
        if not row["console"] and any(getattr(each, row["key"]) is not None for each in candidates)
    ]

    def words(title: str, text: Callable[[Candidate], str]) -> Field[Candidate]:
        return Field(title, text, numeric=False, console=title.lower())

    engine = words("Engine", lambda each: each.setting.describe())
    return (
        words("Fleet", lambda each: f"{each.instances} x {each.instance}"),
        Field("TP x copies", lambda each: f"{each.tensor_parallel} x {each.copies}", console="TP x copies"),
        *([engine] if any(each.setting.describe() for each in candidates) else []),
        *(_price_field(row) for row in _PRICES if row["console"]),
        *(_figure_field(key, title) for key, title in figures.items()),
        *map(_price_field, more),
        words("Limited by", lambda each: each.limited_by),
        words("Basis", lambda each: each.basis),
        words("Price of", _price_of),
    )


def candidates_table(candidates: Sequence[Candidate], chosen: Candidate | None, caption: str) -> Table | None:
    """The page's table; None without candidates."""
    if not candidates:
        return None
    return table_of(
        caption,
        candidate_fields(candidates),
        candidates,
        NOTES["candidates"] if caption else "",
        strong=lambda each: each == chosen,
    )


def load_fields(variation: Variation) -> tuple[Field[LoadInterval], ...]:
    """The cheapest layout of each range of loads, and the load from which the next one is."""

    def span(first: float, last: float, text: Callable[[float], str]) -> str:
        return text(first) if first == last else f"{text(first)} to {text(last)}"

    def crossover(each: LoadInterval) -> Cell:
        place = variation.intervals.index(each)
        known = place < len(variation.crossovers)
        return _estimate_cell(variation.crossovers[place]) if known else Cell("")

    return (
        Field("Above, req/s", lambda each: number(each.from_per_s, 4), console="above req/s"),
        Field("Up to", lambda each: number(each.to_per_s, 4), console="up to"),
        Field("Machines", lambda each: span(each.fewest_machines, each.most_machines, plain), console="machines"),
        Field(
            "Layout",
            lambda each: f"{each.instance}, TP {each.tensor_parallel} x {each.copies}",
            numeric=False,
            console="layout",
        ),
        Field(
            "USD/h",
            lambda each: span(each.least_usd_per_hour, each.most_usd_per_hour, "{:,.2f}".format),
            console="USD/h",
        ),
        Field("Crossover if as predicted", crossover, console="crossover if as predicted"),
    )


def accuracy_fields(levels: Sequence[LevelAccuracy]) -> tuple[Field[LevelAccuracy], ...]:
    """Predicted against measured on the levels that the profile was fitted to."""

    def pair(level: LevelAccuracy, key: str) -> Cell:
        found = level.figures.get(key)
        if found is None:
            return Cell(MISSING)
        return Cell(f"{number(found.predicted, 4)} / {number(found.measured, 4)}")

    def error(level: LevelAccuracy, key: str) -> Cell:
        found = level.figures.get(key)
        if found is None or not found.measured:
            return Cell(MISSING, "", "na")
        share = found.predicted / found.measured - 1
        return Cell(f"{share:+.0%}", "", "warn" if abs(share) > 0.25 else "")

    fields: list[Field[LevelAccuracy]] = [Field("Level", lambda level: plain(level.concurrency), console="concurrency")]
    for key in dict.fromkeys(key for level in levels for key in level.figures):
        title = key_title(key)
        fields += [
            Field("predicted / measured", partial(pair, key=key), title, console=title),
            Field("error", partial(error, key=key), title),
        ]
    return tuple(fields)
