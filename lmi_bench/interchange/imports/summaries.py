"""Results of inference-perf, awscurl, and llm-d benchmark reports: summaries with stated units.

inference-perf's `time_per_output_token` is (last - first) / (n - 1), our TPOT, and its normalised
one E2E / n, our latency per token; all its times are seconds. awscurl measures the first byte,
which a server may send before any token, so it is kept aside and not called TTFT.
"""

from __future__ import annotations

from collections.abc import Mapping
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

_INFERENCE_PERF = {
    "time_to_first_token": "ttft_ms",
    "time_per_output_token": "tpot_ms",
    "inter_token_latency": "itl_ms",
    "request_latency": "e2e_ms",
    "normalized_time_per_output_token": "latency_ms_per_token",
}
_LLM_D_SCALE = {"ms": 1.0, "s": 1e3, "ms/token": 1.0, "s/token": 1e3}
_FIRST_BYTE = "awscurl measures the first byte, not the first token"


def is_inference_perf(content: Mapping[str, Any]) -> bool:
    """Whether an object is a lifecycle summary of inference-perf."""
    return "load_summary" in content and "successes" in content


def is_awscurl(content: Mapping[str, Any]) -> bool:
    """Whether an object is what `awscurl -o json` prints."""
    return "totalTimeMills" in content and "concurrentClients" in content


def is_llm_d(content: Mapping[str, Any]) -> bool:
    """Whether an object is a benchmark report of llm-d, version 0.2."""
    return str(content.get("version", "")).startswith("0.2") and "results" in content


def read_inference_perf(content: Mapping[str, Any], load: Load | None) -> Imported:
    """One stage, or the summary of all, of inference-perf."""
    successes, failures = content["successes"], content.get("failures") or {}
    asked = content["load_summary"]
    completed = whole_of(successes, "count") or 0
    errors = whole_of(failures, "count") or 0
    found = successes.get("latency") or {}
    rates = successes.get("throughput") or {}
    mean_output = number_of(successes.get("output_len") or {}, "mean")
    rate = number_of(asked, "requested_rate", "achieved_rate")
    line = summary_line(
        load or stated_load(rate_per_s=rate),
        tool="inference-perf",
        requests=completed + errors,
        errors=errors,
        input_tokens=number_of(successes.get("prompt_tokens") or {}, "total"),
        output_tokens=None if mean_output is None else mean_output * completed,
        wall_s=number_of(content, "benchmark_time_seconds"),
        throughput=number_of(rates, "output_tokens_per_sec"),
        total_throughput=number_of(rates, "total_tokens_per_sec"),
        request_throughput=number_of(rates, "requests_per_sec"),
        latencies={
            key: statistics(
                _named(found.get(name) or {}, {"p50": ("p50", "median")}, 1e3),
                n=None if name == "inter_token_latency" else completed,
            )
            for name, key in _INFERENCE_PERF.items()
        },
        extra={
            "achieved_rate": number_of(asked, "achieved_rate"),
            "goodput_percentage": number_of(
                content.get("goodput_metrics") or {}, "goodput_percentage"
            ),
        },
    )
    return Imported("inference-perf", (ImportedLevel(line),))


def read_awscurl(content: Mapping[str, Any], load: Load | None) -> Imported:
    """One result of awscurl; all its times are milliseconds."""
    requests, failed = whole_of(content, "totalRequests"), whole_of(content, "failedRequests")
    completed = None if requests is None else requests - (failed or 0)
    by_request = number_of(content, "tokenPerRequest")
    tokens = None if by_request is None or completed is None else by_request * completed
    total_ms = number_of(content, "totalTimeMills")
    line = summary_line(
        load or stated_load(concurrency=whole_of(content, "concurrentClients")),
        tool="awscurl",
        requests=requests,
        errors=failed,
        output_tokens=tokens,
        wall_s=None if total_ms is None else total_ms / 1e3,
        throughput=number_of(content, "tokenThroughput"),
        request_throughput=number_of(content, "tps"),
        latencies={
            "ttft_ms": missing(_FIRST_BYTE),
            "ttft_from_sent_ms": missing(_FIRST_BYTE),
            "e2e_ms": statistics(
                {
                    "mean": number_of(content, "averageLatency"),
                    **{p: number_of(content, f"{p}Latency") for p in ("p50", "p90", "p99")},
                },
                n=completed,
            ),
        },
        extra={
            "time_to_first_byte_ms": number_of(content, "timeToFirstByte"),
            **{
                f"{p}_time_to_first_byte_ms": number_of(content, f"{p}TimeToFirstByte")
                for p in ("p50", "p90", "p99")
            },
        },
    )
    notes = (_FIRST_BYTE,)
    return Imported("awscurl", (ImportedLevel(line),), notes=notes)


def read_llm_d(content: Mapping[str, Any], load: Load | None) -> Imported:
    """One benchmark report 0.2; its units are written with each metric."""
    scenario = content.get("scenario") or {}
    asked = (scenario.get("load") or {}).get("standardized") or {}
    found = (content["results"].get("request_performance") or {}).get("aggregate") or {}
    requests, rates = found.get("requests") or {}, found.get("throughput") or {}
    total, failures = whole_of(requests, "total"), whole_of(requests, "failures") or 0
    completed = None if total is None else total - failures
    if load is None:
        rate = number_of(asked, "rate_qps")
        users = whole_of(asked, "concurrency")
        load = stated_load(concurrency=users) if users is not None else stated_load(rate_per_s=rate)
    tokens = [
        None if mean is None or completed is None else mean * completed
        for name in ("input_length", "output_length")
        for mean in [number_of(requests.get(name) or {}, "mean")]
    ]

    def rate_of(name: str) -> float | None:
        return number_of(rates.get(name) or {}, "mean")

    duration = str(((content.get("run") or {}).get("time") or {}).get("duration") or "")
    line = summary_line(
        load,
        tool="llm-d",
        requests=total,
        errors=failures,
        input_tokens=tokens[0],
        output_tokens=tokens[1],
        wall_s=_seconds(duration),
        throughput=rate_of("output_token_rate"),
        total_throughput=rate_of("total_token_rate"),
        request_throughput=rate_of("requests_rate") or rate_of("request_rate"),
        latencies={
            key: _llm_d_statistics((found.get("latency") or {}).get(name), completed, key)
            for name, key in _INFERENCE_PERF.items()
        },
    )
    return Imported("llm-d", (ImportedLevel(line),), facts=_llm_d_facts(scenario))


def _llm_d_statistics(
    metric: Mapping[str, Any] | None, completed: int | None, key: str
) -> dict[str, Any]:
    if not metric:
        return missing()
    unit = str(metric.get("units"))
    if unit not in _LLM_D_SCALE:
        raise InputError(f"the report's unit {unit!r} of a latency is not known")
    values = _named(metric, {"std": ("stddev",)}, _LLM_D_SCALE[unit])
    return statistics(values, n=None if key == "itl_ms" else completed)


def _llm_d_facts(scenario: Mapping[str, Any]) -> dict[str, Any]:
    for component in scenario.get("stack") or ():
        engine = component.get("standardized") or {}
        accelerator = engine.get("accelerator")
        if accelerator:
            return {
                "model": (engine.get("model") or {}).get("name"),
                "accelerator": accelerator.get("model"),
                "n_accelerators": accelerator.get("count"),
                "tensor_parallel": (accelerator.get("parallelism") or {}).get("tp"),
            }
    return {}


def _seconds(duration: str) -> float | None:
    """Seconds of an ISO 8601 duration that has seconds only, such as PT12.5S."""
    if not (duration.startswith("PT") and duration.endswith("S")):
        return None
    return number_of({"s": duration[2:-1]}, "s")


def _named(
    found: Mapping[str, Any], other_names: Mapping[str, tuple[str, ...]], scale: float
) -> dict[str, float | None]:
    names = ("mean", "std", "min", "max", "p50", "p90", "p95", "p99")
    return {
        name: None if value is None else value * scale
        for name in names
        for value in [number_of(found, *other_names.get(name, (name,)))]
    }
