"""What a run's levels say beside their latencies: where they do, a table; else none.

The search for a load, repeats, conversations, steady windows, the engine's slots and cache, the
server's own metrics, energy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from lmi_bench.core.findings import SloAnswer
from lmi_bench.core.level import Level, ServerMetrics, Sessions
from lmi_bench.report.formats import MISSING, count, load_name, number, share, statistic_cell
from lmi_bench.report.run_tables import Lines, load_cell, load_column
from lmi_bench.report.values import Cell, Column, Headline, Row, Table

_Shown = tuple[Column, Callable[[Level], Cell]]
_SHAPES = {
    "smooth": "the SLO is passed gradually",
    "cliff": "a cliff: one step of the load breaks it by far",
}


def search_headline(answer: SloAnswer | None) -> Headline | None:
    """The highest load that a search found, as one of the numbers to read first."""
    if answer is None:
        return None
    slos = ", ".join(answer.slo)
    unit = "concurrent requests" if answer.load == "concurrency" else "req/s"
    spent = f"{number(answer.endpoint_seconds)} endpoint seconds"
    if answer.value is None:
        breach = load_name(answer.load, answer.first_breach)
        detail = f"{breach} already misses {answer.binding}; {spent}"
        return Headline("Highest load under the SLOs", "none", "", detail, "bad")
    if answer.first_breach is None:
        detail = f"{slos}: the highest that was tried, nothing broke; {spent}"
        return Headline("Highest load under the SLOs", f"≥ {answer.value:g}", unit, detail)
    detail = (
        f"{slos}; boundary {number(answer.low)} to {number(answer.high)} (95 %), "
        f"{_SHAPES.get(answer.boundary or '', '')}; first breach at "
        f"{load_name(answer.load, answer.first_breach)}: {answer.binding}; {spent}"
    )
    return Headline("Highest load under the SLOs", f"{answer.value:g}", unit, detail)


def search_table(axis: str, lines: Lines) -> Table | None:
    """The loads that a search tried, in the order in which it did."""
    tried = [
        (line, line.search)
        for line in sorted(lines, key=lambda line: line.index)
        if line.search is not None
    ]
    if not tried:
        return None
    rows = []
    for place, (line, verdict) in enumerate(tried, start=1):
        endless, passed = not math.isfinite(verdict.ratio), verdict.passed
        rows.append(
            Row(
                (
                    Cell(str(place)),
                    load_cell(axis, line),
                    Cell(f"{count(line.requests)} of {count(verdict.planned)}"),
                    Cell(number(line.wall_s)),
                    Cell("endless" if endless else number(verdict.ratio)),
                    Cell(verdict.binding or MISSING),
                    Cell("met" if passed else "missed", "", "good" if passed else "bad"),
                )
            )
        )
    columns = (
        Column("Step"),
        load_column(axis),
        Column("Requests sent, of those planned"),
        Column("Seconds"),
        Column("Measured / limit"),
        Column("Nearest to its limit", numeric=False),
        Column("SLOs", numeric=False),
    )
    note = "A level is cut short as soon as no further answer can save it."
    return Table("How the highest load was found", columns, tuple(rows), note)


def spread_table(axis: str, lines: Lines) -> Table | None:
    """Each metric over the attempts of levels that ran several times."""
    rows = []
    for line in lines:
        for metric, found in line.spread.items():
            interval = f"{number(found.low)} to {number(found.high)}"
            rows.append(
                Row(
                    (
                        load_cell(axis, line),
                        Cell(_metric_title(metric)),
                        Cell(count(line.attempts)),
                        Cell(number(found.mean)),
                        Cell(MISSING if found.low is None else interval),
                        Cell(share(found.cv)),
                    )
                )
            )
    if not rows:
        return None
    columns = (
        load_column(axis),
        Column("Metric", numeric=False),
        Column("Attempts"),
        Column("Mean"),
        Column("95 % interval"),
        Column("Variation", hint="standard deviation over mean"),
    )
    note = (
        "The other tables pool the requests of all attempts; the interval is Student's t over "
        "the attempts' own values."
    )
    return Table("Repeats", columns, tuple(rows), note)


def steady_table(axis: str, lines: Lines) -> Table | None:
    """The steady window of each level beside the whole of it."""
    if not any(line.steady.start_s is not None for line in lines):
        return None

    def of(key: str) -> Callable[[Level], Cell]:
        return lambda line: Cell(number(getattr(line.steady, key)))

    def change(line: Level) -> Cell:
        whole = line.throughput_tokens_per_s
        steady = line.steady.throughput_tokens_per_s
        if not whole or steady is None:
            return Cell(MISSING, line.steady.reason or "", "na")
        return Cell(f"{(steady / whole - 1) * 100:+.1f} %")

    shown: list[_Shown] = [
        (
            Column("Whole level, tok/s"),
            lambda line: Cell(number(line.throughput_tokens_per_s)),
        ),
        (Column("tok/s", "Steady window"), of("throughput_tokens_per_s")),
        (Column("95 % low", "Steady window"), of("low")),
        (Column("95 % high", "Steady window"), of("high")),
        (Column("from, s", "Steady window"), of("start_s")),
        (Column("to, s", "Steady window"), of("end_s")),
        (
            Column("of the level", "Steady window"),
            lambda line: Cell(share(line.steady.share)),
        ),
        (Column("Difference"), change),
    ]
    note = (
        "Ramp and drain are left out where the token events show them; costs rest on this window."
    )
    return _table("Steady window beside the whole level", axis, lines, shown, note)


def sessions_table(axis: str, lines: Lines) -> Table | None:
    """Conversations: what first and later turns waited for."""
    if not any(line.sessions for line in lines):
        return None

    def of(line: Level) -> Sessions:
        return line.sessions or Sessions()

    def of_turns(key: str, name: str) -> Callable[[Level], Cell]:
        return lambda line: statistic_cell(getattr(of(line), key), name)

    shown: list[_Shown] = [
        (Column("begun", "Conversations"), lambda line: Cell(count(of(line).started))),
        (Column("failed", "Conversations"), lambda line: Cell(count(of(line).failed))),
        (Column("turns", "Conversations"), lambda line: Cell(number(of(line).turns_mean))),
    ]
    for key, title in (("first_turn", "first turn"), ("later_turns", "later turns")):
        shown += [
            (Column(name, f"TTFT {title}, ms"), of_turns(f"ttft_{key}_ms", name))
            for name in ("mean", "p50", "p90")
        ]
    return _table("Conversations", axis, lines, shown)


def engine_table(axis: str, lines: Lines) -> Table | None:
    """What the engine in the same process did."""
    if not any(line.engine for line in lines):
        return None

    def of(key: str, shown: Callable[[Any], str]) -> Callable[[Level], Cell]:
        def cell(line: Level) -> Cell:
            value = (line.engine or {}).get(key)
            return Cell(MISSING if value is None else shown(value))

        return cell

    shown: list[_Shown] = [
        (Column("Steps"), of("steps", count)),
        (Column("Most sequences so far"), of("peak_running", count)),
        (Column("Idle slots of decode steps"), of("slot_waste_frac", share)),
        (Column("Reserved cache without a token"), of("cache_waste_frac", share)),
        (Column("Preemptions"), of("preemptions", count)),
    ]
    optional = (
        ("prefix_hit_frac", "Prompt tokens found in the cache", share),
        ("draft_acceptance_frac", "Drafted tokens that held", share),
        ("tokens_per_decode", "Tokens a decode step", number),
    )
    shown += [
        (Column(title), of(key, text))
        for key, title, text in optional
        if any((line.engine or {}).get(key) is not None for line in lines)
    ]
    return _table("The engine's slots and cache", axis, lines, shown)


def server_table(axis: str, lines: Lines) -> Table | None:
    """The server's own metrics beside the client's."""
    servers = [line.server or ServerMetrics() for line in lines]
    known = [
        (key, title, group, text)
        for key, title, group, text in _SERVER_COLUMNS
        if any(_dig(server, key) is not None for server in servers)
    ]
    if not known:
        return None

    def of(key: str, text: Callable[[Any], str]) -> Callable[[Level], Cell]:
        def cell(line: Level) -> Cell:
            value = _dig(line.server, key)
            return Cell(MISSING if value is None else text(value))

        return cell

    shown: list[_Shown] = [
        (Column(title, group), of(key, text)) for key, title, group, text in known
    ]
    sources = next((server.sources for server in servers if server.sources), ())
    return _table(
        "The server's own view",
        axis,
        lines,
        shown,
        f"Read from {', '.join(sources)}." if sources else "",
    )


def power_table(axis: str, lines: Lines) -> Table | None:
    """Energy of the accelerators, where they could be read."""
    if not any(_dig(line.server, "power") for line in lines):
        return None

    def of(key: str, text: Callable[[Any], str]) -> Callable[[Level], Cell]:
        def cell(line: Level) -> Cell:
            value = _dig(line.server, f"power.{key}")
            return Cell(MISSING if value is None else text(value))

        return cell

    def verdict(line: Level) -> Cell:
        power = None if line.server is None else line.server.power
        if power is not None and power.valid:
            return Cell(f"valid, by {power.source}", "", "good")
        return Cell("too short to tell", "the level gave too few readings", "warn")

    shown: list[_Shown] = [
        (Column("GPUs"), of("gpus", count)),
        (Column("Mean power, W"), of("mean_power_w", number)),
        (Column("Use"), of("gpu_use_frac", share)),
        (Column("Energy, J"), of("energy_j", number)),
        (Column("J per output token"), of("joules_per_output_token", number)),
        (Column("Reading", numeric=False), verdict),
    ]
    return _table("Energy", axis, lines, shown)


_SERVER_COLUMNS: tuple[tuple[str, str, str, Callable[[Any], str]], ...] = (
    ("running.mean", "mean", "Running", number),
    ("running.max", "max", "Running", count),
    ("waiting.mean", "mean", "Waiting", number),
    ("waiting.max", "max", "Waiting", count),
    ("kv_usage_frac.mean", "mean", "KV cache in use", share),
    ("kv_usage_frac.max", "max", "KV cache in use", share),
    ("preemptions", "Preemptions", "", count),
    ("prefix_cache_hit_rate", "Prefix-cache hits", "", share),
    ("ttft_mean_ms", "server", "Mean TTFT, ms", number),
    ("client_ttft_mean_ms", "client", "Mean TTFT, ms", number),
    ("client_minus_server_ttft_ms", "between", "Mean TTFT, ms", number),
    ("requests", "Requests", "", count),
    ("skew", "Busiest replica over mean", "", number),
    ("cloudwatch.invocations", "Invocations", "CloudWatch", count),
    ("cloudwatch.model_latency_mean_ms", "model, ms", "CloudWatch", number),
    ("cloudwatch.overhead_latency_mean_ms", "overhead, ms", "CloudWatch", number),
    ("cloudwatch.gpu_utilization_mean_percent", "GPU use, %", "CloudWatch", number),
    ("cloudwatch.gpu_memory_mean_percent", "GPU memory, %", "CloudWatch", number),
)


def _metric_title(metric: str) -> str:
    """`ttft_p90` as a heading: `TTFT p90, ms`."""
    if metric == "throughput":
        return "Throughput, tok/s"
    name, _, statistic = metric.rpartition("_")
    return f"{name.upper()} {statistic}, ms"


def _dig(value: Any, dotted: str) -> Any:
    """An attribute of an attribute; None where one of them is None."""
    for name in dotted.split("."):
        value = None if value is None else getattr(value, name)
    return value


def _table(title: str, axis: str, lines: Lines, shown: Sequence[_Shown], note: str = "") -> Table:
    columns = (load_column(axis), *(column for column, _ in shown))
    rows = tuple(Row((load_cell(axis, line), *(cell(line) for _, cell in shown))) for line in lines)
    return Table(title, columns, rows, note)
