"""The tables of one run: levels, all statistics, knees, SLOs, the generator's self-check."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, Literal, cast

from lmi_bench.analysis.results.knee_cause import CAUSE_TITLES
from lmi_bench.analysis.results.slo_results import FailureRule, SloResult, goodput, level_slo
from lmi_bench.analysis.results.sweep_curve import work_per_s
from lmi_bench.catalog.tables import Row, read_rows
from lmi_bench.core.errors import InputError
from lmi_bench.core.findings import Knee
from lmi_bench.core.level import KNOWN, STATISTICS, GeneratorReport, Level, Metric
from lmi_bench.core.load import load_name
from lmi_bench.core.records import RequestRecord
from lmi_bench.core.slo import Slo, parse_slo
from lmi_bench.core.units import format_figure, ms_to_s, s_to_ms
from lmi_bench.report.formats import MISSING, NOT_SUPPORTED, count, interval, number, plain, share, statistic_cell
from lmi_bench.report.table import NOTES, Cell, Field, Table, console_rows, table_of

LEVEL_GIVE_WAY = ("ms/token mean", "ITL ms p99", "TTFT ms mean", "ITL ms p50")
"""Columns of `level_rows` that a narrow terminal leaves out; errors and state always stay."""

COLUMNS: Final = read_rows("level_columns.csv", "report")
"""Columns by the part of a level that they are `of`: empty, the level itself; latency, its metrics.
page_always and console_always: shown although all their values are missing or 0."""

_RULE_TITLES: Final = {row["key"]: row["title"] for row in COLUMNS if row["of"] == "knee rule"}
TTFT_PARTS: Final = {row["key"]: row["title"] for row in COLUMNS if row["of"] == "ttft_split" and row["group"]}
"""Title of each part of the mean TTFT."""

Lines = Sequence[Level]
Records = Sequence[Sequence[RequestRecord]]
LevelFields = Sequence[Field[Level]]


def load_title(axis: str) -> str:
    """The heading of a load on this axis."""
    return "Concurrent requests" if axis == "concurrency" else "Request rate, req/s"


def load_field(axis: str) -> Field[Level]:
    """The level's load, the first column of every table of levels."""

    def cell(line: Level) -> Cell:
        value = line.load.on(axis)
        return Cell(f"{value:g}" if value is not None else MISSING, line.name)

    return Field(load_title(axis), cell)


def per_level(caption: str, axis: str, lines: Lines, fields: LevelFields, note: str = "") -> Table:
    """A table with a row for each level, its load first."""
    return table_of(caption, (load_field(axis), *fields), lines, note)


def value_at(value: Any, dotted: str) -> Any:
    """A nested attribute or key by its dotted name; None if a part of it is None."""
    for name in dotted.split("."):
        if isinstance(value, Mapping):
            value = value.get(name)
        else:
            value = None if value is None else getattr(value, name)
    return value


def key_field(
    key: str, title: str, group: str = "", shown: Callable[[Any], Cell | str] = number, console: str = ""
) -> Field[Level]:
    """A number of the level by its dotted name."""

    def cell(line: Level) -> Cell | str:
        value = value_at(line, key)
        return MISSING if value is None else shown(value)

    return Field(title, cell, group, console=console)


FORMATS: Final[Mapping[str, Callable[[Any], Cell | str]]] = {
    "number": number,
    "count": count,
    "share": share,
    "s to ms": lambda seconds: number(s_to_ms(seconds)),
    "ms to s": lambda ms: number(ms_to_s(ms)),
    **{name: partial(statistic_cell, name=name) for name in STATISTICS},
}


def fields_of(
    part: str, shown: Callable[[Row], object] = bool, formats: Mapping[str, Callable[[Any], Cell | str]] = FORMATS
) -> list[Field[Level]]:
    """The columns of a part of a level, those whose row of `COLUMNS` is to be shown."""
    return [
        key_field(
            f"{part}.{row['key']}".removeprefix("."), row["title"], row["group"], formats[row["format"]], row["console"]
        )
        for row in COLUMNS
        if row["of"] == part and shown(row)
    ]


def level_state(line: Level) -> Cell:
    """Whether the level is valid, and why not."""
    if not line.valid:
        return Cell("invalid", line.invalid_reason or "no reason given", "bad")
    if line.stopped_by and line.stopped_by != KNOWN:
        return Cell(f"stopped: {line.stopped_by}", "the level ended before its time", "warn")
    return Cell("valid", "", "good")


Interval = Callable[[Level, Metric | Literal["throughput"], str], str]
"""The interval of a level's predicted metric and statistic; empty for a measured one."""
_MEASURED: Interval = lambda *_: ""  # noqa: E731  a default


def _statistic_field(
    key: str, name: str, group: str = "", console: str = "", between: Interval = _MEASURED
) -> Field[Level]:
    metric = cast("Metric", key)

    def cell(line: Level) -> Cell:
        return replace(statistic_cell(line.of(metric), name), interval=between(line, metric, name))

    return Field(name, cell, group, console=console)


def _steady_cell(line: Level) -> Cell:
    steady = line.steady
    if steady.throughput_tokens_per_s is None:
        return Cell(MISSING, steady.reason or "not measured", "na")
    between = "" if steady.low is None or steady.high is None else interval(steady.low, steady.high)
    hint = f"{share(steady.share)} of the level" + (f", 95 % interval {between}" if between else "")
    return Cell(number(steady.throughput_tokens_per_s), hint, interval=between)


def _errors_cell(line: Level) -> Cell:
    examples = line.error_examples or {}
    kinds = ", ".join(
        f"{n} {kind}" + (f" ({examples[kind][0]})" if examples.get(kind) else "")
        for kind, n in line.errors_by_kind.items()
    )
    return Cell(count(line.failed), kinds, "bad" if line.failed else "")


def _cost_field(title: str, key: str) -> Field[Level]:
    hint = "at the level's whole throughput, by the price of the target"
    return Field(title, lambda line: Cell(number(getattr(line, key)), hint), "USD per 1M tokens")


_COST: LevelFields = (
    _cost_field("output", "usd_per_1m_output_tokens"),
    _cost_field("in and out", "usd_per_1m_total_tokens"),
)
_STATE: Field[Level] = Field("State", level_state, numeric=False, console="state")


def _level_fields(lines: Lines, between: Interval = _MEASURED) -> LevelFields:
    def throughput(line: Level) -> Cell:
        return Cell(number(work_per_s(line)), interval=between(line, "throughput", ""))

    steady = Field("steady", _steady_cell, "Throughput, tok/s", hint="ramp and drain left out")
    requests = key_field("request_throughput_per_s", "req/s", "Throughput", console="req/s")
    what, pace, part = "tok/s", steady, "levels"
    if any(line.is_tokenless for line in lines):  # embeddings
        what, pace, part = "input tok/s", requests, "levels without tokens"
    return (
        Field("whole level", throughput, f"Throughput, {what}", console=what),
        pace,
        *(
            _statistic_field(row["key"], row["title"], row["group"], row["console"], between)
            for row in COLUMNS
            if row["of"] == part
        ),
        Field("sent", lambda line: count(line.requests), "Requests"),
        Field("errors", _errors_cell, "Requests"),
        Field("errors", lambda line: f"{line.failed}/{line.sent}", console="errors", on_page=False),
    )


def levels_table(axis: str, lines: Lines, marked: float | None, between: Interval = _MEASURED) -> Table:
    """Concurrent requests | throughput | latency ms/token | TTFT | ITL | errors."""
    priced = any(line.usd_per_1m_output_tokens is not None for line in lines)
    note = "n/a: too few samples for that percentile (hover for the numbers)."
    if any(between(line, "throughput", "") for line in lines):
        note += " Under each prediction its 80 % interval, under steady throughput that of 95 %."
        if not all(between(line, "latency_per_token", "mean") for line in lines):
            note += (
                " A latency without one is of a rate near the predicted capacity or above, where a "
                "small error of the capacity is a large one of the latency."
            )
    if marked is not None:
        note = f"Highlighted: the recommended knee, {load_name(axis, marked)}. {note}"
    return table_of(
        "Levels",
        (load_field(axis), *_level_fields(lines, between), *(_COST if priced else ()), _STATE),
        lines,
        note,
        tone=lambda line: "" if line.valid else "bad",
        strong=lambda line: marked is not None and line.load.on(axis) == marked,
    )


def level_rows(levels: Lines) -> list[dict[str, str]]:
    """The levels as console rows, all with the same keys."""
    rows = console_rows((*_level_fields(levels), _STATE), levels)
    return [{**load_item(line), **row} for line, row in zip(levels, rows, strict=True)]


def named_rows(fields: LevelFields, lines: Lines) -> list[dict[str, str]]:
    """Console rows that begin with the level's name."""
    rows = console_rows(fields, lines)
    return [{"level": line.name, **row} for line, row in zip(lines, rows, strict=True)]


def load_item(line: Level) -> dict[str, str]:
    """The level's load, with its title."""
    if line.load.concurrency is not None:
        return {"Concurrent requests": plain(line.load.concurrency)}
    title = "Sessions begun a second" if line.sessions else "Request rate (req/s)"
    return {title: plain(line.load.rate_per_s)}


def statistics_tables(axis: str, lines: Lines) -> tuple[Table, ...]:
    """Every statistic of every latency, a table for each metric; then rates and counts."""
    tables = []
    for row in [each for each in COLUMNS if each["of"] == "latency"]:
        metric = row["key"]
        if any(line.of(metric).n for line in lines):
            fields = [_statistic_field(metric, name) for name in STATISTICS]
            fields.append(key_field(f"latency.{metric}.n", "n", "", count))
            tables.append(per_level(row["title"], axis, lines, fields))
    rates = fields_of("", lambda row: row["page_always"] or any(value_at(line, row["key"]) for line in lines))
    return (*tables, per_level("Rates, counts and Little's law", axis, lines, rates))


def _knee_fields(axis: str, knees: Sequence[Knee]) -> tuple[Field[Knee], ...]:
    changes = [knee.change or MISSING for knee in knees]
    unit, title = ("", "Concurrent requests") if axis == "concurrency" else (" req/s", "Rate")

    def change(knee: Knee) -> Cell:
        text = knee.change or MISSING
        repeated = text != MISSING and text in changes[: knees.index(knee)]
        return Cell("as above", text) if repeated else Cell(text)

    def rule(knee: Knee) -> str:
        return f"{rule_title(knee)}{' *' if knee.recommended else ''}"

    def load(knee: Knee) -> str:
        if knee.axis != axis or knee.load is None:
            return MISSING
        return f"{'>= ' if knee.high is None else ''}{format_figure(knee.load)}{unit}"

    def cause(knee: Knee) -> str:
        return MISSING if load(knee) == MISSING else cause_title(knee)

    return (
        Field("Rule", rule, numeric=False, console="rule"),
        Field(title, load, console="knee"),
        Field("Interval", knee_interval, console="interval"),
        Field("What binds beyond it", cause, numeric=False, console="what binds"),
        Field("The change that moves it", change, numeric=False),
        Field("How it was found", lambda knee: knee.why, numeric=False, console="why"),
    )


def knees_table(axis: str, knees: Sequence[Knee]) -> Table:
    """Each rule's knee, its interval, its cause and what moves it."""
    fields = _knee_fields(axis, knees)
    return table_of("Knees", fields, knees, NOTES["knees"], strong=lambda knee: knee.recommended)


def knee_rows(axis: str, knees: Sequence[Knee]) -> list[dict[str, str]]:
    """The knees as console rows."""
    return console_rows(_knee_fields(axis, knees), knees)


def cause_title(knee: Knee) -> str:
    """A cause's title; a file of another version may have an unknown cause."""
    return CAUSE_TITLES.get(knee.cause, knee.cause)


def rule_title(knee: Knee) -> str:
    """A rule's title; a file of another version may have an unknown rule."""
    return _RULE_TITLES.get(knee.rule, knee.rule)


def knee_interval(knee: Knee) -> str:
    """The interval of a knee's load."""
    if knee.low is None:
        return MISSING
    if knee.high is None:
        return f">= {format_figure(knee.low)}"
    return f"{format_figure(knee.low)} to {format_figure(knee.high)}"


def slo_fields(
    lines: Lines, records: Records, slos: Sequence[Slo], limits: Sequence[Slo] = (), failures: FailureRule = "exclude"
) -> LevelFields:
    """Goodput, and each SLO against the level and against its requests.

    limits  limits of a good request; empty: the SLOs
    """
    kept = dict(zip(map(id, lines), records, strict=True))

    def met(line: Level, wanted: Sequence[Slo]) -> tuple[Cell, str]:
        """Share of the requests that meet all of these limits, and their rate per second."""
        asked = kept[id(line)]
        if not asked:
            return Cell(MISSING), MISSING
        found = goodput(asked, wanted, open_loop=line.load.is_open)
        hint = f"{found.good} of {found.requests} requests"
        return Cell(share(found.share), hint), number(found.per_s)

    def of_slo(slo: Slo) -> Iterator[Field[Level]]:
        def verdict(line: Level) -> Cell:
            found = level_slo(line, kept[id(line)], slo, failures)
            if found.measured_ms is None or (line.valid and found.verdict != "unsupported"):
                return _verdict_cell(found)
            return Cell(number(found.measured_ms), line.invalid_reason or found.reason or "invalid", "warn")

        shown = f"{slo.metric}_{slo.statistic} <= {number(slo.limit_ms)} ms"
        yield Field("level, ms", verdict, shown, console=shown)
        yield Field("of requests", lambda line: met(line, [slo])[0], shown)

    return (
        Field("req/s", lambda line: met(line, limits or slos)[1], "Goodput", console="goodput req/s"),
        Field("share", lambda line: met(line, limits or slos)[0], "Goodput", console="good"),
        *(each for slo in slos for each in of_slo(slo)),
    )


def slo_table(
    axis: str, lines: Lines, records: Records, texts: Sequence[str], limits: Sequence[str] = ()
) -> Table | None:
    """The SLOs and limits of a run, level by level; None without any."""
    slos, goods = readable_slos(texts), readable_slos(limits)
    if not slos and not goods:
        return None
    what = ", ".join([good.of_a_request for good in goods] or map(str, slos))
    note = f"Goodput: requests that meet {what} each; a failed request meets nothing."
    fields = slo_fields(lines, records, slos, goods)
    return per_level("Service-level objectives", axis, lines, fields, note)


def readable_slos(texts: Sequence[str]) -> list[Slo]:
    """The SLOs that this version can parse; a file of another version may have others."""
    slos = []
    for text in texts:
        try:
            slos.append(parse_slo(str(text)))
        except InputError:
            continue
    return slos


def _verdict_cell(result: SloResult) -> Cell:
    if result.verdict == "unsupported":
        return Cell(NOT_SUPPORTED, result.reason, "na")
    shown = "" if result.measured_ms is None else f"{number(result.measured_ms)} "
    if result.verdict == "pass":
        return Cell(f"{shown}ok", f"slack {number(result.slack_ms)} ms", "good")
    over = result.reason or f"over by {number(-(result.slack_ms or 0))} ms"
    return Cell(f"{shown}MISS", over, "bad")


def _bound_cell(check: GeneratorReport, name: Literal["ttft", "itl"]) -> Cell:
    """The largest error that the generator may have added to a quantile."""
    bound_ms, bound_frac = check.p99_bound(name)
    if bound_ms is None:
        return Cell(MISSING, "not known for this target", "na")
    return Cell(number(bound_ms), f"{share(bound_frac)} of it")


def _load_reached_cell(line: Level) -> Cell:
    asked, achieved = line.generator.asked_load, line.generator.achieved_load
    if not asked or achieved is None:
        return Cell(MISSING, "too few requests to tell", "na")
    return Cell(share(achieved / asked), f"{number(achieved)} of {number(asked)}")


def _clock_and_receiver(line: Level) -> str:
    check = line.generator
    reader = f"{check.receiver} receiver" if check.receiver else None
    stated = (check.timestamps, reader, check.priority and f"priority {check.priority}")
    return ", ".join(part for part in stated if part) or MISSING


def _generator_verdict(line: Level) -> Cell:
    """A short verdict; the warnings have the whole reason."""
    if line.valid:
        return Cell("ok", "", "good")
    reason = line.invalid_reason or ""
    blamed, _, why = reason.partition(": ")
    return Cell(f"invalid: {blamed}" if why else "invalid", reason, "bad")


_OWN_ERROR = "Own error, at most"
_GENERATOR: LevelFields = (
    *fields_of("generator"),
    Field("TTFT p99, ms", lambda line: _bound_cell(line.generator, "ttft"), _OWN_ERROR),
    Field("ITL p99, ms", lambda line: _bound_cell(line.generator, "itl"), _OWN_ERROR),
    Field("Reached share of the planned load", _load_reached_cell),
    Field("Clock and receiver", _clock_and_receiver, numeric=False),
    Field("Verdict", _generator_verdict, numeric=False),
)


def generator_table(axis: str, lines: Lines) -> Table:
    """The load generator's report on itself, level by level."""
    workers = max((line.generator.workers or 1 for line in lines), default=1)
    note = NOTES["self-check"]
    if workers > 1:
        note += f" Sent by up to {workers} processes."
    return table_of(
        "Load generator's self-check",
        (load_field(axis), *_GENERATOR),
        lines,
        note,
        tone=lambda line: "" if line.valid else "bad",
    )
