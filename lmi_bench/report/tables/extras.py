"""Tables that only some runs have; each is None if no level has values for it.

The search for a load, repeats, conversations, steady windows, the engine's slots and cache, the
server's own metrics, energy.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from lmi_bench.catalog.tables import Row
from lmi_bench.core.level import Level, Spread, Turns
from lmi_bench.report.formats import MISSING, count, metric_title, number, share, statistic_cell
from lmi_bench.report.table import NOTES, Cell, Field, Table, console_rows, table_of
from lmi_bench.report.tables.levels import (
    FORMATS,
    Lines,
    fields_of,
    key_field,
    load_field,
    named_rows,
    per_level,
    value_at,
)

_MET, _MISSED = Cell("met", "", "good"), Cell("missed", "", "bad")


def search_table(axis: str, lines: Lines) -> Table | None:
    """The loads that a search tried, in order."""
    tried = sorted((line for line in lines if line.search is not None), key=lambda line: line.index)
    if not tried:
        return None
    places = {id(line): place for place, line in enumerate(tried, start=1)}
    fields: list[Field[Level]] = [
        Field("Step", lambda line: str(places[id(line)])),
        load_field(axis),
        Field(
            "Sent of planned requests",
            lambda line: f"{count(line.requests)} of {count(value_at(line, 'search.planned'))}",
        ),
        key_field("wall_s", "Seconds"),
        key_field("search.ratio", "Measured / limit", "", _ratio),
        Field("Nearest to its limit", lambda line: value_at(line, "search.binding") or MISSING, numeric=False),
        Field("SLOs", lambda line: _MET if value_at(line, "search.passed") else _MISSED, numeric=False),
    ]
    note = "A level is cut short as soon as no further answer can save it."
    return table_of("How the highest load was found", fields, tried, note)


def _ratio(value: float) -> str:
    return number(value) if math.isfinite(value) else "infinite"


_Attempts = tuple[Level, str, Spread]


def _spread_fields(axis: str) -> tuple[Field[_Attempts], ...]:
    def unit(each: _Attempts) -> str:
        return "tok/s" if each[1] == "throughput" else "ms"

    def interval(each: _Attempts) -> str:
        low, high = each[2].low, each[2].high
        return MISSING if low is None else f"{number(low)} to {number(high)}"

    load = load_field(axis)
    hint = "standard deviation over mean"
    return (
        Field(load.title, lambda each: load.of(each[0])),
        Field("", lambda each: each[0].name, console="level", on_page=False),
        Field("Metric", lambda each: f"{metric_title(each[1])}, {unit(each)}", numeric=False),
        Field("Attempts", lambda each: count(each[0].attempts), console="attempts"),
        Field("", lambda each: f"{each[1]}, {unit(each)}", console="metric", on_page=False),
        Field("Mean", lambda each: number(each[2].mean), console="mean"),
        Field("95 % interval", interval, console="interval"),
        Field("Variation", lambda each: share(each[2].cv), hint=hint, console="cv"),
    )


def _attempts(lines: Lines) -> list[_Attempts]:
    return [(line, metric, found) for line in lines for metric, found in line.spread.items()]


def spread_table(axis: str, lines: Lines) -> Table | None:
    """Each metric over the attempts of levels that ran several times."""
    found = _attempts(lines)
    return table_of("Repeats", _spread_fields(axis), found, NOTES["repeats"]) if found else None


def spread_rows(levels: Lines) -> list[dict[str, str]]:
    """The same as console rows."""
    return console_rows(_spread_fields("concurrency"), _attempts(levels))


def steady_table(axis: str, lines: Lines) -> Table | None:
    """The steady window of each level beside the whole level."""
    if not any(line.steady.start_s is not None for line in lines):
        return None

    def change(line: Level) -> Cell:
        whole, steady = line.throughput_tokens_per_s, line.steady.throughput_tokens_per_s
        if not whole or steady is None:
            return Cell(MISSING, line.steady.reason or "", "na")
        return Cell(f"{(steady / whole - 1) * 100:+.1f} %")

    fields = [
        key_field("throughput_tokens_per_s", "Whole level, tok/s"),
        *fields_of("steady"),
        Field("Difference", change),
    ]
    said = steadiness_line(lines)
    note = NOTES["steady window"] + (f" Here {said}." if said else "")
    return per_level("Steady window beside the whole level", axis, lines, fields, note)


def steadiness_line(lines: Lines) -> str | None:
    """That no level was long enough to tell whether it was steady; None if one was."""
    if not lines or not all(line.speed_unknown and line.of("itl").n for line in lines):
        return None
    return f"whether the levels were steady is not known: {lines[-1].name} {lines[-1].speed_unknown}"


def session_rows(levels: Lines) -> list[dict[str, str]]:
    """Conversations as console rows, one for each level with conversations."""
    return named_rows(fields_of("sessions"), [line for line in levels if line.sessions])


def turns_table(axis: str, lines: Lines) -> Table | None:
    """TTFT by the turn of a conversation."""
    told = [(line, each) for line in lines for each in value_at(line, "sessions.ttft_by_turns") or ()]
    load = load_field(axis)
    fields: list[Field[tuple[Level, Turns]]] = [
        Field(load.title, lambda pair: load.of(pair[0])),
        Field("Turns", lambda pair: " to ".join(map(str, sorted({pair[1].first_turn, pair[1].last_turn})))),
        Field("mean", lambda pair: statistic_cell(pair[1].ttft_ms, "mean"), "TTFT, ms"),
        Field("p90", lambda pair: statistic_cell(pair[1].ttft_ms, "p90"), "TTFT, ms"),
    ]
    return table_of("TTFT by the turn of a conversation", fields, told) if told else None


def engine_rows(levels: Lines) -> list[dict[str, str]]:
    """The engine's statistics as console rows, without columns that are all missing or 0."""
    seen = [line for line in levels if line.engine]

    def shown(row: Row) -> object:
        return row["console_always"] or any(value_at(x, f"engine.{row['key']}") for x in seen)

    return named_rows(fields_of("engine", shown, {**FORMATS, "number": "{:.2f}".format}), seen)


def server_table(axis: str, lines: Lines) -> Table | None:
    """The server's own metrics beside the client's."""
    sources = next((found for line in lines if (found := value_at(line, "server.sources"))), ())
    note = f"Read from {', '.join(sources)}." if sources else ""
    return _part_table("server", "The server's own view", axis, lines, note)


def _part_table(
    part: str, caption: str, axis: str, lines: Lines, note: str = "", more: Sequence[Field[Level]] = ()
) -> Table | None:
    """The columns of a part that a level has a value for, or that are always shown, and `more`."""

    def shown(row: Row) -> object:
        is_known = any(value_at(line, f"{part}.{row['key']}") is not None for line in lines)
        return row["title"] and (row["page_always"] or is_known)

    fields = fields_of(part, shown) if any(value_at(line, part) for line in lines) else []
    return per_level(caption, axis, lines, [*fields, *more], note) if fields else None


_KNOWN_QUANTILE: tuple[Field[Level], ...] = (
    Field("Metric", lambda line: metric_title(value_at(line, "known.metric")), numeric=False, console="metric"),
    *fields_of("known"),
)


def known_table(axis: str, lines: Lines) -> Table | None:
    """How closely the percentile of --stop-when is known."""
    seen = [line for line in lines if line.known]
    note = "A level ends once the ends of the 95 % interval are as near to the percentile as asked."
    caption = "How closely a percentile is known"
    return per_level(caption, axis, seen, _KNOWN_QUANTILE, note) if seen else None


def known_rows(levels: Lines) -> list[dict[str, str]]:
    """The same as console rows."""
    return named_rows(_KNOWN_QUANTILE, [line for line in levels if line.known])


def _reading(line: Level) -> Cell:
    if value_at(line, "server.power.valid"):
        return Cell(f"valid, by {value_at(line, 'server.power.source')}", "", "good")
    return Cell("too short to tell", "the level gave too few readings", "warn")


sessions_table = partial(_part_table, "sessions", "Conversations")
engine_table = partial(_part_table, "engine", "The engine's slots and cache")
ttft_split_table = partial(_part_table, "ttft_split", "Where the time to first token goes", note=NOTES["parts of TTFT"])
power_table = partial(_part_table, "server.power", "Energy", more=(Field("Reading", _reading, numeric=False),))

TABLES: Final[Sequence[Callable[[str, Lines], Table | None]]] = (
    search_table,
    spread_table,
    sessions_table,
    turns_table,
    steady_table,
    engine_table,
    server_table,
    ttft_split_table,
    known_table,
    power_table,
)
