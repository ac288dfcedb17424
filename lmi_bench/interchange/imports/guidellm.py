"""Reports of guidellm: one benchmark a level.

Its `inter_token_latency_ms` is (last - first) / (n - 1) of a request, which is our TPOT; its
`time_per_output_token_ms` is (last token - request start) / n, which is our latency per token.
Latencies are of successful requests, throughput is of all (guidellm issue 529).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lmi_bench.core.errors import InputError
from lmi_bench.core.load import Load
from lmi_bench.interchange.imports.level import (
    Imported,
    ImportedLevel,
    Statistics,
    missing,
    number_of,
    stated_load,
    statistics,
    summary_line,
    whole_of,
)

_METRICS = {
    "time_to_first_token_ms": ("ttft_ms", 1.0),
    "inter_token_latency_ms": ("tpot_ms", 1.0),
    "time_per_output_token_ms": ("latency_ms_per_token", 1.0),
    "request_latency": ("e2e_ms", 1e3),
}
_NO_GAPS = "guidellm gives one mean gap a request (our TPOT), not the gaps"


def is_guidellm(content: Mapping[str, Any]) -> bool:
    """Whether an object is a report of guidellm."""
    benchmarks = content.get("benchmarks")
    return (
        isinstance(benchmarks, list)
        and bool(benchmarks)
        and "time_to_first_token_ms" in (benchmarks[0].get("metrics") or {})
    )


def read_guidellm(content: Mapping[str, Any], load: Load | None) -> Imported:
    """A report of version 1 or 2; each of its benchmarks is a level."""
    levels = tuple(_level(benchmark, load) for benchmark in content["benchmarks"])
    return Imported("guidellm", levels, facts={"model": _model(content)})


def _level(benchmark: Mapping[str, Any], load: Load | None) -> ImportedLevel:
    metrics = benchmark["metrics"]
    counts = {
        kind: whole_of(_of(metrics, "request_latency", kind), "count") or 0
        for kind in ("successful", "errored", "incomplete")
    }
    completed = counts["successful"]
    latencies: dict[str, Statistics] = {"itl_ms": missing(_NO_GAPS)}
    for name, (key, scale) in _METRICS.items():
        latencies[key] = statistics(
            _in_ms(_of(metrics, name, "successful"), scale), n=completed or None
        )
    tokens = [
        number_of(_of(metrics, name, "successful"), "total_sum")
        for name in ("prompt_token_count", "output_token_count")
    ]
    line = summary_line(
        load or _load(benchmark),
        tool="guidellm",
        requests=sum(counts.values()),
        errors=counts["errored"] + counts["incomplete"],
        input_tokens=tokens[0],
        output_tokens=tokens[1],
        wall_s=_wall_s(benchmark),
        throughput=number_of(_of(metrics, "output_tokens_per_second", "total"), "mean"),
        total_throughput=number_of(_of(metrics, "tokens_per_second", "total"), "mean"),
        request_throughput=number_of(_of(metrics, "requests_per_second", "successful"), "mean"),
        latencies=latencies,
        extra={
            "incomplete_requests": counts["incomplete"],
            "measured_concurrency": number_of(_of(metrics, "request_concurrency", "total"), "mean"),
        },
    )
    kinds = {kind: n for kind, n in counts.items() if n and kind != "successful"}
    return ImportedLevel({**line, "errors_by_kind": kinds})


def _load(benchmark: Mapping[str, Any]) -> Load:
    """The strategy of the benchmark, wherever its version keeps it."""
    strategy = _find(benchmark, "strategy")
    if not isinstance(strategy, Mapping):
        raise InputError(
            "the guidellm report does not name its strategy: give --concurrency N or --rate R"
        )
    rate = number_of(strategy, "rate")
    if rate is not None:
        return stated_load(rate_per_s=rate)
    if str(strategy.get("type_")) == "synchronous":
        return stated_load(concurrency=1)
    return stated_load(concurrency=whole_of(strategy, "streams", "max_concurrency"))


def _wall_s(benchmark: Mapping[str, Any]) -> float | None:
    times = benchmark.get("scheduler_metrics") or benchmark
    start = number_of(times, "measure_start_time", "start_time")
    end = number_of(times, "measure_end_time", "end_time")
    return None if start is None or end is None else end - start


def _of(metrics: Mapping[str, Any], name: str, kind: str) -> Mapping[str, Any]:
    found = (metrics.get(name) or {}).get(kind)
    return found if isinstance(found, Mapping) else {}


def _in_ms(found: Mapping[str, Any], scale: float) -> dict[str, float | None]:
    percentiles = found.get("percentiles") or {}
    values = {
        "mean": number_of(found, "mean"),
        "std": number_of(found, "std_dev"),
        "min": number_of(found, "min"),
        "max": number_of(found, "max"),
        **{name: number_of(percentiles, name) for name in ("p50", "p90", "p95", "p99")},
    }
    return {name: None if value is None else value * scale for name, value in values.items()}


def _model(content: Mapping[str, Any]) -> str | None:
    found = _find(content.get("config") or content.get("args") or {}, "model")
    return str(found) if found is not None else None


def _find(content: Any, name: str) -> Any:
    if not isinstance(content, Mapping):
        return None
    if content.get(name) is not None:
        return content[name]
    return next((found for v in content.values() if (found := _find(v, name)) is not None), None)
