"""The tables of one run: levels, all statistics, knees, SLOs, the generator's self-check."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from lmi_bench.analysis.results.knee_cause import CAUSE_TITLES
from lmi_bench.analysis.results.slo_results import check_slo, goodput
from lmi_bench.core.errors import InputError
from lmi_bench.core.findings import Knee
from lmi_bench.core.level import STATISTICS, GeneratorReport, Level, Metric, SteadyWindow
from lmi_bench.core.records import RequestRecord
from lmi_bench.core.slo import Slo, parse_slo
from lmi_bench.core.units import format_figure, s_to_ms
from lmi_bench.report.formats import (
    MISSING,
    count,
    load_name,
    number,
    share,
    statistic_cell,
)
from lmi_bench.report.values import Cell, Column, Row, Table

RULE_TITLES: Mapping[str, str] = {
    "latency_limit": "Latency limit",
    "half_latency": "Half-latency",
    "kneedle": "Kneedle",
    "theory": "Theory",
}

_METRICS: tuple[tuple[Metric, str], ...] = (
    ("ttft", "TTFT, ms"),
    ("ttft_answer", "TTFT of the answer, ms"),
    ("ttft_from_sent", "TTFT from sent, ms"),
    ("dispatch_delay", "Dispatch delay, ms"),
    ("itl", "ITL, ms"),
    ("tpot", "TPOT, ms"),
    ("e2e", "E2E latency, ms"),
    ("e2e_from_sent", "E2E latency from sent, ms"),
    ("latency_per_token", "Latency, ms/token"),
    ("connect", "Connect, ms"),
    ("tls", "TLS handshake, ms"),
)

Lines = Sequence[Level]


def load_cell(axis: str, line: Level) -> Cell:
    """The level's load, as the first cell of a row."""
    value = line.load.on(axis)
    return Cell(f"{value:g}" if value is not None else MISSING, line.name)


def load_column(axis: str) -> Column:
    """The heading over the levels' loads."""
    return Column("Concurrent requests" if axis == "concurrency" else "Request rate, req/s")


def levels_table(axis: str, lines: Lines, marked: float | None) -> Table:
    """Concurrent requests | throughput | latency ms/token | TTFT | ITL | errors."""
    priced = any(line.usd_per_1m_output_tokens is not None for line in lines)
    cost = (Column("output", "USD per 1M tokens"), Column("in and out", "USD per 1M tokens"))
    columns = (
        load_column(axis),
        Column("whole level", "Throughput, tok/s"),
        Column("steady", "Throughput, tok/s", hint="ramp and drain left out"),
        Column("mean", "Latency, ms/token"),
        Column("p90", "Latency, ms/token"),
        Column("mean", "TTFT, ms"),
        Column("p90", "TTFT, ms"),
        Column("p50", "ITL, ms"),
        Column("p99", "ITL, ms"),
        Column("sent", "Requests"),
        Column("errors", "Requests"),
        *(cost if priced else ()),
        Column("State", numeric=False),
    )
    rows = []
    for line in lines:
        state = _state(line)
        rows.append(
            Row(
                (
                    load_cell(axis, line),
                    Cell(number(line.throughput_tokens_per_s)),
                    _steady_cell(line.steady),
                    statistic_cell(line.of("latency_per_token"), "mean"),
                    statistic_cell(line.of("latency_per_token"), "p90"),
                    statistic_cell(line.of("ttft"), "mean"),
                    statistic_cell(line.of("ttft"), "p90"),
                    statistic_cell(line.of("itl"), "p50"),
                    statistic_cell(line.of("itl"), "p99"),
                    Cell(count(line.requests)),
                    _errors_cell(line),
                    *(_cost_cells(line) if priced else ()),
                    state,
                ),
                tone="bad" if state.tone == "bad" else "",
                strong=marked is not None and line.load.on(axis) == marked,
            )
        )
    note = "n/a: too few samples for that percentile (hover for the numbers)."
    if marked is not None:
        note = f"Highlighted: the recommended knee, {load_name(axis, marked)}. {note}"
    return Table("Levels", columns, tuple(rows), note)


def _cost_cells(line: Level) -> tuple[Cell, Cell]:
    """What a million tokens cost at this level's own throughput."""
    hint = "at the level's whole throughput, by the price of the target"
    output, total = line.usd_per_1m_output_tokens, line.usd_per_1m_total_tokens
    return Cell(number(output), hint), Cell(number(total), hint)


def _steady_cell(steady: SteadyWindow) -> Cell:
    value = steady.throughput_tokens_per_s
    if value is None:
        return Cell(MISSING, steady.reason or "not measured", "na")
    hint = f"{share(steady.share)} of the level"
    if steady.low is not None:
        hint += f", 95 % interval {number(steady.low)} to {number(steady.high)}"
    return Cell(number(value), hint)


def _errors_cell(line: Level) -> Cell:
    errors = line.failed
    examples = line.error_examples or {}
    kinds = ", ".join(
        f"{n} {kind}" + (f" ({examples[kind][0]})" if examples.get(kind) else "")
        for kind, n in line.errors_by_kind.items()
    )
    return Cell(count(errors), kinds, "bad" if errors else "")


def _state(line: Level) -> Cell:
    if not line.valid:
        return Cell("invalid", line.invalid_reason or "no reason given", "bad")
    if line.stopped_by:
        return Cell(f"stopped: {line.stopped_by}", "the level ended before its time", "warn")
    return Cell("valid", "", "good")


def statistics_tables(axis: str, lines: Lines) -> tuple[Table, ...]:
    """Every statistic of every latency, one table a metric."""
    columns = (load_column(axis), *(Column(name) for name in STATISTICS), Column("n"))
    tables = []
    for metric, title in _METRICS:
        if not any(line.of(metric).n for line in lines):
            continue
        rows = tuple(
            Row(
                (
                    load_cell(axis, line),
                    *(statistic_cell(line.of(metric), name) for name in STATISTICS),
                    Cell(count(line.of(metric).n)),
                )
            )
            for line in lines
        )
        tables.append(Table(title, columns, rows))
    tables.append(_rates_table(axis, lines))
    return tuple(tables)


def _rates_table(axis: str, lines: Lines) -> Table:
    keys: tuple[tuple[str, str], ...] = (
        ("total_throughput_tokens_per_s", "Total tokens, tok/s"),
        ("request_throughput_per_s", "Requests, req/s"),
        ("mean_concurrency", "Mean concurrency"),
        ("little_law_ratio", "Little's law ratio"),
        ("wall_s", "Wall, s"),
        ("input_tokens", "Input tokens"),
        ("output_tokens", "Output tokens"),
    )
    if any(line.reasoning_tokens for line in lines):
        keys = (*keys, ("reasoning_tokens", "Reasoning tokens"))
    rows = tuple(
        Row((load_cell(axis, line), *(Cell(number(getattr(line, key))) for key, _ in keys)))
        for line in lines
    )
    columns = (load_column(axis), *(Column(title) for _, title in keys))
    return Table("Rates, counts and Little's law", columns, rows)


def knees_table(axis: str, knees: Sequence[Knee]) -> Table:
    """Each rule's knee, its interval, its cause and what moves it."""
    rows = []
    told: set[str] = set()
    for knee in knees:
        load = knee.load if knee.axis == axis else None
        change = knee.change or MISSING
        repeated = change in told and change != MISSING
        told.add(change)
        rows.append(
            Row(
                (
                    Cell(rule_title(knee), "recommended" if knee.recommended else ""),
                    Cell(MISSING if load is None else format_figure(load)),
                    Cell(knee_interval(knee)),
                    Cell(CAUSE_TITLES.get(knee.cause, knee.cause) if load is not None else MISSING),
                    Cell("as above", change) if repeated else Cell(change),
                    Cell(knee.why),
                ),
                strong=knee.recommended,
            )
        )
    unit = "Concurrent requests" if axis == "concurrency" else "Request rate, req/s"
    columns = (
        Column("Rule", numeric=False),
        Column(unit),
        Column("Interval"),
        Column("What binds beyond it", numeric=False),
        Column("The change that moves it", numeric=False),
        Column("How it was found", numeric=False),
    )
    return Table(
        "Knees",
        columns,
        tuple(rows),
        "Highlighted: the recommended one. Intervals hold the spread of this run's requests or, "
        "without their records, the neighbouring levels; not the spread between runs.",
    )


def rule_title(knee: Knee) -> str:
    """A rule for people; a file of another version may hold one more."""
    return RULE_TITLES.get(knee.rule, knee.rule)


def knee_interval(knee: Knee) -> str:
    """The interval of a knee's load."""
    if knee.low is None or knee.high is None:
        return MISSING
    return f"{format_figure(knee.low)} to {format_figure(knee.high)}"


def slo_table(
    axis: str,
    lines: Lines,
    records: Sequence[Sequence[RequestRecord]] | None,
    texts: Sequence[str],
    limits: Sequence[str] = (),
) -> Table | None:
    """Each SLO against each level, the share of requests that meet it, and the goodput.

    limits  of a good request, where they are not the SLOs
    """
    slos, goods = _readable(texts), _readable(limits)
    if not slos and not goods:
        return None
    columns = [load_column(axis)]
    for slo in slos:
        columns += [Column("level", str(slo)), Column("of requests", str(slo))]
    columns += [Column("share", "Goodput"), Column("req/s", "Goodput")]
    rows = []
    for index, line in enumerate(lines):
        kept = records[index] if records is not None and index < len(records) else ()
        open_loop = line.load.is_open
        cells = [load_cell(axis, line)]
        for slo in slos:
            cells += [_verdict_cell(line, slo), _goodput_cells(kept, [slo], open_loop)[0]]
        rows.append(Row((*cells, *_goodput_cells(kept, goods or slos, open_loop))))
    what = ", ".join([good.of_a_request for good in goods] or map(str, slos))
    note = f"Goodput: requests that meet {what} each; a failed request meets nothing."
    return Table("Service-level objectives", tuple(columns), tuple(rows), note)


def _goodput_cells(
    records: Sequence[RequestRecord], slos: Sequence[Slo], open_loop: bool
) -> tuple[Cell, Cell]:
    """Share of the requests that meet all of these, and how many a second."""
    if not records:
        return Cell(MISSING), Cell(MISSING)
    found = goodput(records, slos, open_loop=open_loop)
    hint = f"{found.good} of {found.requests} requests"
    return Cell(share(found.share), hint), Cell(number(found.per_s))


def _readable(texts: Sequence[str]) -> list[Slo]:
    """The SLOs that this version understands; a file of another one may hold more."""
    slos = []
    for text in texts:
        try:
            slos.append(parse_slo(str(text)))
        except InputError:
            continue
    return slos


def _verdict_cell(line: Level, slo: Slo) -> Cell:
    result = check_slo(line, slo)
    if result.verdict == "unsupported":
        return Cell("n/a", result.reason, "na")
    shown = "" if result.measured_ms is None else f" {number(result.measured_ms)} ms"
    if result.verdict == "pass":
        return Cell(f"pass{shown}", f"slack {number(result.slack_ms)} ms", "good")
    over = result.reason or f"over by {number(-(result.slack_ms or 0))} ms"
    return Cell(f"fail{shown}", over, "bad")


def generator_table(axis: str, lines: Lines) -> Table:
    """What the load generator says of itself, level by level."""
    rows = []
    for line in lines:
        check = line.generator
        valid = line.valid
        reason = line.invalid_reason or ""
        rows.append(
            Row(
                (
                    load_cell(axis, line),
                    Cell(_ms(check.dispatch_delay_p50_s)),
                    Cell(_ms(check.dispatch_delay_p99_s)),
                    Cell(_ms(check.dispatch_delay_max_s)),
                    Cell(_ms(check.loop_lag_p99_s)),
                    Cell(_ms(check.receive_delay_p99_s)),
                    Cell(share(check.cpu_share)),
                    _bound_cell(check, "ttft"),
                    _bound_cell(check, "itl"),
                    _load_reached_cell(check),
                    Cell(", ".join(_clock_and_receiver(check)) or MISSING),
                    Cell("ok", "", "good") if valid else Cell(_blamed(reason), reason, "bad"),
                ),
                tone="" if valid else "bad",
            )
        )
    columns = (
        load_column(axis),
        Column("p50", "Dispatch delay, ms"),
        Column("p99", "Dispatch delay, ms"),
        Column("max", "Dispatch delay, ms"),
        Column("Loop lag p99, ms"),
        Column("Receive delay p99, ms"),
        Column("Share of a core"),
        Column("TTFT p99, ms", "Own error, at most"),
        Column("ITL p99, ms", "Own error, at most"),
        Column("Load reached, of that asked for"),
        Column("Clock of events, who read", numeric=False),
        Column("Verdict", numeric=False),
    )
    workers = max((line.generator.workers or 1 for line in lines), default=1)
    note = (
        "Own error: bounds of what reading late, sending late and the clocks can have done; "
        "queueing in the network and in the server before a request is read is outside them."
    )
    if workers > 1:
        note += f" Sent by up to {workers} processes."
    return Table("Load generator's self-check", columns, tuple(rows), note)


def _blamed(reason: str) -> str:
    """The short verdict on an invalid level; the whole reason stands among the warnings."""
    blamed, _, why = reason.partition(": ")
    return f"invalid: {blamed}" if why else "invalid"


def _clock_and_receiver(check: GeneratorReport) -> list[str]:
    stated = (check.timestamps, f"{check.receiver} receiver" if check.receiver else None)
    return [part for part in stated if part]


def _bound_cell(check: GeneratorReport, name: Literal["ttft", "itl"]) -> Cell:
    """By how much the generator itself may have moved a quantile; an unknown bound is no zero."""
    bound_ms, bound_frac = check.p99_bound(name)
    if bound_ms is None:
        return Cell(MISSING, "not known for this target", "na")
    return Cell(number(bound_ms), f"{share(bound_frac)} of it")


def _load_reached_cell(check: GeneratorReport) -> Cell:
    asked, achieved = check.asked_load, check.achieved_load
    if not asked or achieved is None:
        return Cell(MISSING, "too few requests to tell", "na")
    return Cell(share(achieved / asked), f"{number(achieved)} of {number(asked)}")


def _ms(seconds: float | None) -> str:
    return MISSING if seconds is None else number(s_to_ms(seconds))
