"""Results of `evalscope perf`: means in benchmark_summary.json, quantiles in the file beside it.

Its names are those that people see and changed with its versions: TTFT, TPOT and ITL were seconds
and are milliseconds, so the unit is read out of the name. TPOT is (E2E - TTFT) / (n - 1), ITL the
gap between chunks, as with us. Its percentiles are by nearest rank, rounded to two digits.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lmi_bench.core.errors import InputError
from lmi_bench.core.load import Load
from lmi_bench.interchange.imports.level import (
    Imported,
    ImportedLevel,
    missing,
    number_of,
    stated_load,
    statistics,
    summary_line,
    whole_of,
)

_NOT_STREAMED = "the answers were not streamed"
SUMMARY, PERCENTILES = "benchmark_summary.json", "benchmark_percentile.json"
_UNIT_MS = {"s": 1e3, "ms": 1.0}
_MEANS = {
    "ttft_ms": ("TTFT", "Avg TTFT", "Average time to first token"),
    "tpot_ms": ("TPOT", "Avg TPOT", "Average time per output token"),
    "itl_ms": ("ITL", "Avg ITL", "Average inter-token latency"),
    "e2e_ms": ("Avg Latency", "Average latency"),
}
_QUANTILES = {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "itl_ms": "ITL", "e2e_ms": "Latency"}
_NAMED_UNIT = re.compile(r"(.+) \((.+)\)")

Rows = Sequence[Mapping[str, Any]]


def is_summary(content: Mapping[str, Any]) -> bool:
    """Whether an object is a benchmark_summary.json."""
    return any(f"{name} (s)" in content for name in ("Test Duration", "Time taken for tests"))


def is_percentiles(content: Mapping[str, Any]) -> bool:
    """Whether an object is a row of benchmark_percentile.json."""
    return "Percentiles" in content


def join(objects: Rows, read_beside: Callable[[str], Rows | None]) -> Mapping[str, Any]:
    """The summary with the rows of quantiles under `percentiles`, whichever of both was named.

    Raises InputError where only the quantiles are there: they do not say of what load.
    """
    if is_summary(objects[0]):
        return {**objects[0], "percentiles": list(read_beside(PERCENTILES) or ())}
    summary = read_beside(SUMMARY)
    if summary is None:
        raise InputError(f"the load and the counts are in {SUMMARY}, which is not beside it")
    return {**summary[0], "percentiles": list(objects)}


def read_evalscope(content: Mapping[str, Any], load: Load | None) -> Imported:
    """One run of `evalscope perf`, both files joined."""
    found = _without_units(content)
    if load is None:
        rate = number_of(found, "Request Rate")  # -1: no rate, but users
        users = whole_of(found, "Concurrency", "Number of concurrency")
        load = (
            stated_load(rate_per_s=rate)
            if rate is not None and rate > 0
            else stated_load(concurrency=users)
        )
    completed = whole_of(found, "Success Requests", "Succeed requests")
    mean_tokens = [
        number_of(found, *names)
        for names in (
            ("Avg Input Tokens", "Average input tokens per request"),
            ("Avg Output Tokens", "Average output tokens per request"),
        )
    ]
    tokens = [None if m is None or completed is None else m * completed for m in mean_tokens]
    unseen = whole_of(found, "Stream Requests") == 0 and bool(completed)
    line = summary_line(
        load,
        tool="evalscope",
        requests=whole_of(found, "Total Requests", "Total requests"),
        errors=whole_of(found, "Failed Requests", "Failed requests"),
        input_tokens=tokens[0],
        output_tokens=tokens[1],
        wall_s=number_of(found, "Test Duration", "Time taken for tests"),
        throughput=number_of(found, "Output Throughput", "Output token throughput"),
        total_throughput=number_of(found, "Total Throughput", "Total token throughput"),
        request_throughput=number_of(found, "Req Throughput", "Request throughput"),
        latencies={
            key: missing(_NOT_STREAMED)
            if unseen and key != "e2e_ms"
            else statistics(
                {
                    "mean": _in_ms(content, *names),
                    **_quantiles(content.get("percentiles") or (), _QUANTILES[key]),
                },
                n=None if key == "itl_ms" else completed,
            )
            for key, names in _MEANS.items()
        },
    )
    return Imported("evalscope", (ImportedLevel(line),))


def _quantiles(rows: Rows, name: str) -> dict[str, float | None]:
    """p50 to p99, least and largest of one metric."""
    labels = {"50%": "p50", "90%": "p90", "95%": "p95", "99%": "p99", "min": "min", "max": "max"}
    return {
        labels[label]: _in_ms(row, name)
        for row in rows
        for label in [str(row.get("Percentiles"))]
        if label in labels
    }


def _in_ms(content: Mapping[str, Any], *names: str) -> float | None:
    """The first of some times that is there; negative where the tool measured nothing."""
    for key, value in content.items():
        named = _NAMED_UNIT.fullmatch(key)
        if named is not None and named[1] in names and named[2] in _UNIT_MS:
            number = number_of({key: value}, key)
            if number is not None and number >= 0:
                return number * _UNIT_MS[named[2]]
    return None


def _without_units(content: Mapping[str, Any]) -> dict[str, Any]:
    return {key.split(" (")[0]: value for key, value in content.items()}
