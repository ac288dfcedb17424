"""The tables of an optimization job: what each combination of techniques costs and gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lmi_bench.core.units import MIB
from lmi_bench.report.formats import MISSING, count, number, share, usd
from lmi_bench.report.table import Cell, Column, Row, Table

_EMULATED = "emulated"
_WORST = 3


def optimization_tables(results: Sequence[Mapping[str, Any]]) -> tuple[Table, ...]:
    """One table that sets the variants side by side, and one of the matrices that suffered most.

    results  as `optimize.json` keeps them, the baseline first
    """
    tables = [_side_by_side(results)]
    errors = _errors(results)
    if errors is not None:
        tables.append(errors)
    products = _products(results)
    if products is not None:
        tables.append(products)
    return (*tables, _jobs(results))


def _products(results: Sequence[Mapping[str, Any]]) -> Table | None:
    """Times of the matrix products and what they are of the baseline's."""
    base = results[0].get("products_ms") or {}
    if not base:
        return None
    columns = [Column("Variant", numeric=False)]
    for rows in base:
        columns += [Column(f"ms at {rows}"), Column(f"of the baseline's at {rows}")]
    lines = []
    for each in results:
        times = each.get("products_ms") or {}
        if each["emulated"] or not times:
            continue
        cells = [Cell(each["name"])]
        for rows, base_ms in base.items():
            cells += [Cell(number(times[rows])), Cell(number(times[rows] / base_ms))]
        lines.append(Row(tuple(cells)))
    note = (
        "Products of attention and MLPs in one decode step, by sequences, unpacking included; "
        "above 1, unpacking costs more than the smaller weights save. Not measured over ranks."
    )
    return Table("Matrix products of a decode step", tuple(columns), tuple(lines), note)


def _jobs(results: Sequence[Mapping[str, Any]]) -> Table:
    stages = ("load_s", "quality_s", "sweep_s", "prepare_s", "devices", "device_s")
    names = ("loading, s", "quality, s", "sweep, s", "weights, s", "devices", "device-seconds")
    columns = (Column("Variant", numeric=False), *(Column(name) for name in names))
    rows = [
        Row((Cell(each["name"]), *(Cell(number(each["job"][stage])) for stage in stages)))
        for each in results
    ]
    note = "Loading holds calibration unless an earlier job left its factors; speculation has none."
    return Table("What the job took", columns, tuple(rows), note)


def _side_by_side(results: Sequence[Mapping[str, Any]]) -> Table:
    loads = [level["concurrency"] for level in results[0]["levels"]]
    columns = (
        Column("Variant", numeric=False),
        Column("perplexity", "Quality"),
        Column("same tokens", "Quality"),
        Column("logprob shift", "Quality"),
        Column("output error", "Quality"),
        Column("weights, MiB", "Memory"),
        Column("KV tokens", "Memory"),
        *(Column(f"tok/s at {load}", "Speed") for load in loads),
        Column(f"ms/token at {loads[0] if loads else 1}", "Speed"),
        Column("tok/s against the baseline", "Speed"),
        Column("USD/1M out", "Price"),
    )
    note = (
        "Same tokens: greedy output up to the first that differs from the baseline's. Logprob "
        "shift: mean |change| of the text's log-probabilities. A model of random weights (the demo "
        "models) knows no text: its perplexity says nothing, the shift does. KV tokens: what the "
        "cache holds when weights and cache take the baseline's memory together. Ratios: 95 % over "
        "requests of one run each, at the highest load; price at the best level."
    )
    return Table("Variants side by side", columns, tuple(_row(r, loads) for r in results), note)


def _row(result: Mapping[str, Any], loads: Sequence[int]) -> Row:
    quality, memory = result["quality"], result["memory"]
    by_load = {level["concurrency"]: level for level in result["levels"]}
    missing = _EMULATED if result["emulated"] else MISSING

    def speed(load: int, key: str) -> Cell:
        value = by_load.get(load, {}).get(key)
        return Cell(missing if value is None else number(value))

    price = result["usd_per_1m_output"]
    return Row(
        (
            Cell(result["name"], hint=result["kernels"] or ""),
            Cell(number(quality["perplexity"], 4)),
            Cell(share(quality["agreement_frac"])),
            Cell(number(quality["logprob_shift"])),
            Cell(share(quality["mean_output_error"])),
            Cell(number(memory["weight_bytes"] / MIB)),
            Cell(count(memory["kv_tokens_in_baseline_memory"])),
            *(speed(load, "throughput_tokens_per_s") for load in loads),
            speed(loads[0] if loads else 1, "latency_ms_per_token_mean"),
            Cell(_ratio(result["throughput_ratios"]) or missing),
            Cell(missing if result["emulated"] else usd(price)),
        )
    )


def _ratio(ratios: Mapping[str, Sequence[float | None]]) -> str:
    """The ratio of the last, highest level with its interval; empty where there is none."""
    if not ratios:
        return ""
    middle, low, high = list(ratios.values())[-1]
    return f"{number(middle)} ({number(low)} to {number(high)})"


def _errors(results: Sequence[Mapping[str, Any]]) -> Table | None:
    rows = []
    for result in results:
        errors = result["quality"]["output_error_of_layer"]
        worst = sorted(errors.items(), key=lambda item: -item[1])[:_WORST]
        rows += [
            Row((Cell(result["name"]), Cell(name), Cell(share(error)))) for name, error in worst
        ]
    if not rows:
        return None
    columns = (
        Column("Variant", numeric=False),
        Column("matrix", numeric=False),
        Column("error of outputs"),
    )
    return Table(
        "Matrices that rounding moves most",
        columns,
        tuple(rows),
        "|rounded outputs - outputs| / |outputs| on calibration text; all in optimize.json.",
    )
