"""What a run's levels say beside their latencies: where they do, a table; else none.

The search for a load, repeats, conversations, steady windows, the engine's slots and cache, the
server's own metrics, energy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lmi_bench.report.formats import MISSING, count, load_name, number, share, statistic_cell
from lmi_bench.report.run_tables import Lines, load_cell, load_column
from lmi_bench.report.values import Cell, Column, Headline, Row, Table

_Shown = tuple[Column, Callable[[Mapping[str, Any]], Cell]]
_SHAPES = {
    "smooth": "the SLO is passed gradually",
    "cliff": "a cliff: one step of the load breaks it by far",
}


def search_headline(answer: Mapping[str, Any] | None) -> Headline | None:
    """The highest load that a search found, as one of the numbers to read first."""
    if not answer:
        return None
    slos = ", ".join(answer.get("slo") or ())
    unit = "concurrent requests" if answer.get("load") == "concurrency" else "req/s"
    spent = f"{number(answer.get('endpoint_seconds'))} endpoint seconds"
    value, breach = answer.get("value"), answer.get("first_breach")
    axis = str(answer.get("load"))
    if value is None:
        detail = f"{load_name(axis, breach)} already misses {answer.get('binding')}; {spent}"
        return Headline("Highest load under the SLOs", "none", "", detail, "bad")
    if breach is None:
        detail = f"{slos}: the highest that was tried, nothing broke; {spent}"
        return Headline("Highest load under the SLOs", f"≥ {value:g}", unit, detail)
    detail = (
        f"{slos}; boundary {number(answer.get('low'))} to {number(answer.get('high'))} (95 %), "
        f"{_SHAPES.get(str(answer.get('boundary')), '')}; first breach at "
        f"{load_name(axis, breach)}: {answer.get('binding')}; {spent}"
    )
    return Headline("Highest load under the SLOs", f"{value:g}", unit, detail)


def search_table(axis: str, lines: Lines) -> Table | None:
    """The loads that a search tried, in the order in which it did."""
    tried = sorted((line for line in lines if line.get("search")), key=lambda line: line["level"])
    if not tried:
        return None
    rows = []
    for place, line in enumerate(tried, start=1):
        verdict = line["search"]
        ratio = verdict.get("ratio")
        passed = bool(verdict.get("passed"))
        rows.append(
            Row(
                (
                    Cell(str(place)),
                    load_cell(axis, line),
                    Cell(f"{count(line.get('requests'))} of {count(verdict.get('planned'))}"),
                    Cell(number(line.get("wall_s"))),
                    Cell("endless" if ratio is None else number(ratio)),
                    Cell(str(verdict.get("binding") or MISSING)),
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
        for metric, found in (line.get("spread") or {}).items():
            low, high = found.get("low"), found.get("high")
            interval = MISSING if low is None else f"{number(low)} to {number(high)}"
            rows.append(
                Row(
                    (
                        load_cell(axis, line),
                        Cell(_metric_title(metric)),
                        Cell(count(line.get("attempts"))),
                        Cell(number(found.get("mean"))),
                        Cell(interval),
                        Cell(share(found.get("cv"))),
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
    if not any((line.get("steady") or {}).get("start_s") is not None for line in lines):
        return None

    def of(key: str) -> Callable[[Mapping[str, Any]], Cell]:
        return lambda line: Cell(number((line.get("steady") or {}).get(key)))

    def change(line: Mapping[str, Any]) -> Cell:
        whole = line.get("throughput_tokens_per_s")
        steady = (line.get("steady") or {}).get("throughput_tokens_per_s")
        if not whole or steady is None:
            return Cell(MISSING, str((line.get("steady") or {}).get("reason") or ""), "na")
        return Cell(f"{(steady / whole - 1) * 100:+.1f} %")

    shown: list[_Shown] = [
        (
            Column("Whole level, tok/s"),
            lambda line: Cell(number(line.get("throughput_tokens_per_s"))),
        ),
        (Column("tok/s", "Steady window"), of("throughput_tokens_per_s")),
        (Column("95 % low", "Steady window"), of("low")),
        (Column("95 % high", "Steady window"), of("high")),
        (Column("from, s", "Steady window"), of("start_s")),
        (Column("to, s", "Steady window"), of("end_s")),
        (
            Column("of the level", "Steady window"),
            lambda line: Cell(share((line.get("steady") or {}).get("share"))),
        ),
        (Column("Difference"), change),
    ]
    note = (
        "Ramp and drain are left out where the token events show them; costs rest on this window."
    )
    return _table("Steady window beside the whole level", axis, lines, shown, note)


def sessions_table(axis: str, lines: Lines) -> Table | None:
    """Conversations: what first and later turns waited for."""
    if not any(line.get("sessions") for line in lines):
        return None

    def of(line: Mapping[str, Any]) -> Mapping[str, Any]:
        return line.get("sessions") or {}

    shown: list[_Shown] = [
        (Column("begun", "Conversations"), lambda line: Cell(count(of(line).get("started")))),
        (Column("failed", "Conversations"), lambda line: Cell(count(of(line).get("failed")))),
        (Column("turns", "Conversations"), lambda line: Cell(number(of(line).get("turns_mean")))),
    ]
    for key, title in (("first_turn", "first turn"), ("later_turns", "later turns")):
        shown += [
            (Column(name, f"TTFT {title}, ms"), _statistic(f"ttft_{key}_ms", name))
            for name in ("mean", "p50", "p90")
        ]
    return _table("Conversations", axis, lines, shown)


def _statistic(key: str, name: str) -> Callable[[Mapping[str, Any]], Cell]:
    return lambda line: statistic_cell((line.get("sessions") or {}).get(key), name)


def engine_table(axis: str, lines: Lines) -> Table | None:
    """What the engine in the same process did."""
    if not any(line.get("engine") for line in lines):
        return None

    def of(key: str, shown: Callable[[Any], str]) -> Callable[[Mapping[str, Any]], Cell]:
        def cell(line: Mapping[str, Any]) -> Cell:
            value = (line.get("engine") or {}).get(key)
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
        if any((line.get("engine") or {}).get(key) is not None for line in lines)
    ]
    return _table("The engine's slots and cache", axis, lines, shown)


def server_table(axis: str, lines: Lines) -> Table | None:
    """The server's own metrics beside the client's."""
    servers = [line.get("server") or {} for line in lines]
    known = [
        (key, title, group, text)
        for key, title, group, text in _SERVER_COLUMNS
        if any(_dig(server, key) is not None for server in servers)
    ]
    if not known:
        return None

    def of(key: str, text: Callable[[Any], str]) -> Callable[[Mapping[str, Any]], Cell]:
        def cell(line: Mapping[str, Any]) -> Cell:
            value = _dig(line.get("server") or {}, key)
            return Cell(MISSING if value is None else text(value))

        return cell

    shown: list[_Shown] = [
        (Column(title, group), of(key, text)) for key, title, group, text in known
    ]
    sources = next((server["sources"] for server in servers if server.get("sources")), ())
    return _table(
        "The server's own view",
        axis,
        lines,
        shown,
        f"Read from {', '.join(sources)}." if sources else "",
    )


def power_table(axis: str, lines: Lines) -> Table | None:
    """Energy of the accelerators, where they could be read."""
    if not any((line.get("server") or {}).get("power") for line in lines):
        return None

    def of(key: str, text: Callable[[Any], str]) -> Callable[[Mapping[str, Any]], Cell]:
        def cell(line: Mapping[str, Any]) -> Cell:
            value = ((line.get("server") or {}).get("power") or {}).get(key)
            return Cell(MISSING if value is None else text(value))

        return cell

    def verdict(line: Mapping[str, Any]) -> Cell:
        power = (line.get("server") or {}).get("power") or {}
        if power.get("valid"):
            return Cell(f"valid, by {power.get('source')}", "", "good")
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


def _dig(mapping: Mapping[str, Any], dotted: str) -> Any:
    value: Any = mapping
    for name in dotted.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _table(title: str, axis: str, lines: Lines, shown: Sequence[_Shown], note: str = "") -> Table:
    columns = (load_column(axis), *(column for column, _ in shown))
    rows = tuple(Row((load_cell(axis, line), *(cell(line) for _, cell in shown))) for line in lines)
    return Table(title, columns, rows, note)
