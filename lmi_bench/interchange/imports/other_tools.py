"""Summaries of llmperf, llmeter, inference-perf, llm-d, awscurl and evalscope; then all by tool.

TPOT and ITL are as here, but:

- llmperf's `inter_token_latency_s` contains the TTFT and divides by chunks: neither ITL nor TPOT;
- inference-perf, llm-d: `normalized_time_per_output_token` is E2E / n, our latency per token;
- awscurl measures the first byte, which a server may send before any token: it is no TTFT;
- evalscope's names changed with its versions, and the unit is in the name; its percentiles are by
  nearest rank, and negative values mean that it measured nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from lmi_bench.core.errors import InputError
from lmi_bench.core.load import Load
from lmi_bench.interchange.imports.level import Imported, number_of, whole_of
from lmi_bench.interchange.imports.requests import LLMETER_GAPS, LLMPERF_ITL
from lmi_bench.interchange.imports.summary import PLAIN, Knows, Object, Reader, Summary, has

_QUANTILES = ("p90", "p95", "p99")
_FIRST_BYTE = "awscurl measures the first byte, not the first token"


def _llmperf_rate(content: Object) -> Object:
    by_minute = number_of(content, "results_num_completed_requests_per_min")
    return {**content, "per_s": None if by_minute is None else by_minute / 60}


LLMPERF = Summary(
    tool="llmperf",
    prepare=_llmperf_rate,
    numbers={
        "users": "num_concurrent_requests",
        "completed": "results_num_completed_requests",
        "errors": ("results_number_errors", 0),
        "mean_input_tokens": "results_number_input_tokens_mean",
        "mean_output_tokens": "results_number_output_tokens_mean",
        "throughput": "results_mean_output_throughput_token_per_s",
        "request_throughput": "per_s",
    },
    metrics={"ttft_ms": "ttft_s", "e2e_ms": "end_to_end_latency_s"},
    absent={"itl_ms": LLMPERF_ITL, "tpot_ms": LLMPERF_ITL},
    statistics={
        **{name: f"results_{{}}_{name}" for name in ("mean", "min", "max")},
        "std": "results_{}_stddev",
        **{p: f"results_{{}}_quantiles_{p}" for p in ("p50", *_QUANTILES)},
    },
    factor_ms=1e3,
    facts={"model": "model"},
    notes=("tokens are counted with a Llama 2 tokenizer, whatever the model",),
)


def _llmeter_rates(content: Object) -> Object:
    wall_s = number_of(content, "total_test_time")
    if not wall_s:
        return content
    sides = [number_of(content, f"total_{side}_tokens") for side in ("input", "output")]
    requests = number_of(content, "total_requests")
    amounts = {
        "tokens_per_s": sides[1],
        "all_tokens_per_s": None if None in sides else sum(each or 0 for each in sides),
        "per_s": None
        if requests is None
        else requests - (number_of(content, "failed_requests") or 0),
    }
    return {**content, **{k: n / wall_s for k, n in amounts.items() if n is not None}}


LLMETER = Summary(
    tool="llmeter",
    prepare=_llmeter_rates,
    numbers={
        "users": "clients",
        "requests": "total_requests",
        "errors": "failed_requests",
        "input_tokens": "total_input_tokens",
        "output_tokens": "total_output_tokens",
        "wall_s": "total_test_time",
        "throughput": "tokens_per_s",
        "total_throughput": "all_tokens_per_s",
        "request_throughput": "per_s",
    },
    metrics={
        "ttft_ms": "time_to_first_token",
        "tpot_ms": "time_per_output_token",
        "e2e_ms": "time_to_last_token",
    },
    absent={"itl_ms": LLMETER_GAPS},
    statistics={"mean": "{}-average", **{p: f"{{}}-{p}" for p in ("p50", "p90", "p99")}},
    factor_ms=1e3,
    facts={"model": "model_id"},
)


def read_llmeter(content: Object, load: Load | None) -> Imported:
    """The stats.json of one llmeter run; its summary.json counts only."""
    if "time_to_last_token-average" not in content:
        raise InputError(
            "llmeter's summary.json holds no latencies: import stats.json or responses.jsonl "
            "from the same folder"
        )
    return LLMETER.read(content, load)


# --- inference-perf, llm-d, awscurl -------------------------------------------------------------

_INFERENCE_PERF_METRICS = {
    "ttft_ms": "time_to_first_token",
    "tpot_ms": "time_per_output_token",
    "itl_ms": "inter_token_latency",
    "e2e_ms": "request_latency",
    "latency_ms_per_token": "normalized_time_per_output_token",
}
INFERENCE_PERF = Summary(
    tool="inference-perf",
    numbers={
        "rate": ("load_summary.requested_rate", "load_summary.achieved_rate"),
        "completed": ("successes.count", 0),
        "errors": ("failures.count", 0),
        "input_tokens": "successes.prompt_tokens.total",
        "mean_output_tokens": "successes.output_len.mean",
        "wall_s": "benchmark_time_seconds",
        "throughput": "successes.throughput.output_tokens_per_sec",
        "total_throughput": "successes.throughput.total_tokens_per_sec",
        "request_throughput": "successes.throughput.requests_per_sec",
    },
    metrics=_INFERENCE_PERF_METRICS,
    statistics={
        **{name: f"successes.latency.{path}" for name, path in PLAIN.items()},
        "p50": ("successes.latency.{}.p50", "successes.latency.{}.median"),
    },
    factor_ms=1e3,
    extra={
        "achieved_rate": "load_summary.achieved_rate",
        "goodput_percentage": "goodput_metrics.goodput_percentage",
    },
)


def _llm_d_parts(content: Object) -> Object:
    scenario = content.get("scenario") or {}
    found = (content["results"].get("request_performance") or {}).get("aggregate") or {}
    stack = [part.get("standardized") or {} for part in scenario.get("stack") or ()]
    duration = str(((content.get("run") or {}).get("time") or {}).get("duration") or "")
    seconds = re.fullmatch(r"PT([\d.]+)S", duration)  # ISO 8601, seconds only
    return {
        **found,
        "load": (scenario.get("load") or {}).get("standardized") or {},
        "engine": next((engine for engine in stack if engine.get("accelerator")), {}),
        "wall_s": seconds[1] if seconds else None,
    }


LLM_D = Summary(
    tool="llm-d",
    prepare=_llm_d_parts,
    numbers={
        "users": "load.concurrency",
        "rate": "load.rate_qps",
        "requests": "requests.total",
        "errors": ("requests.failures", 0),
        "mean_input_tokens": "requests.input_length.mean",
        "mean_output_tokens": "requests.output_length.mean",
        "wall_s": "wall_s",
        "throughput": "throughput.output_token_rate.mean",
        "total_throughput": "throughput.total_token_rate.mean",
        "request_throughput": ("throughput.requests_rate.mean", "throughput.request_rate.mean"),
    },
    users_first=True,
    metrics=_INFERENCE_PERF_METRICS,
    statistics={
        **{name: f"latency.{path}" for name, path in PLAIN.items()},
        "std": "latency.{}.stddev",
    },
    unit="latency.{}.units",
    facts={
        "model": "engine.model.name",
        "accelerator": "engine.accelerator.model",
        "n_accelerators": "engine.accelerator.count",
        "tensor_parallel": "engine.accelerator.parallelism.tp",
    },
)


def _awscurl_tokens(content: Object) -> Object:
    total_ms = number_of(content, "totalTimeMills")
    return {**content, "wall_s": None if total_ms is None else total_ms / 1e3}


AWSCURL = Summary(
    tool="awscurl",
    prepare=_awscurl_tokens,
    numbers={
        "users": "concurrentClients",
        "requests": "totalRequests",
        "errors": "failedRequests",
        "mean_output_tokens": "tokenPerRequest",
        "wall_s": "wall_s",
        "throughput": "tokenThroughput",
        "request_throughput": "tps",
    },
    metrics={"e2e_ms": "Latency"},
    absent={"ttft_ms": _FIRST_BYTE, "ttft_from_sent_ms": _FIRST_BYTE},
    statistics={"mean": "average{}", **{p: f"{p}{{}}" for p in ("p50", "p90", "p99")}},
    extra={
        "time_to_first_byte_ms": "timeToFirstByte",
        **{f"{p}_time_to_first_byte_ms": f"{p}TimeToFirstByte" for p in ("p50", "p90", "p99")},
    },
    notes=(_FIRST_BYTE,),
)


# --- evalscope ----------------------------------------------------------------------------------

Rows = Sequence[Object]
_SUMMARY, _PERCENTILES = "benchmark_summary.json", "benchmark_percentile.json"
_NAMES = {
    "ttft_ms": ("TTFT", "Avg TTFT", "Average time to first token"),
    "tpot_ms": ("TPOT", "Avg TPOT", "Average time per output token"),
    "itl_ms": ("ITL", "Avg ITL", "Average inter-token latency"),
    "e2e_ms": ("Latency", "Avg Latency", "Average latency"),
}
_LABELS = {"50%": "p50", "90%": "p90", "95%": "p95", "99%": "p99", "min": "min", "max": "max"}


def is_evalscope(content: Object) -> bool:
    """Whether an object is of one of the two files of `evalscope perf`."""
    return _is_evalscope_summary(content) or "Percentiles" in content


def _is_evalscope_summary(content: Object) -> bool:
    return any(f"{name} (s)" in content for name in ("Test Duration", "Time taken for tests"))


def join_evalscope(objects: Rows, read_beside: Callable[[str], Rows | None]) -> Object:
    """The summary with the rows of quantiles under `percentiles`; either file may be given.

    Raises InputError if the summary is missing: the quantiles do not state their load.
    """
    if _is_evalscope_summary(objects[0]):
        return {**objects[0], "percentiles": list(read_beside(_PERCENTILES) or ())}
    summary = read_beside(_SUMMARY)
    if summary is None:
        raise InputError(f"the load and the counts are in {_SUMMARY}, which is not in its folder")
    return {**summary[0], "percentiles": list(objects)}


def _evalscope_metrics(content: Object) -> Object:
    """Counts by their names without units, and the times of each metric in milliseconds."""
    rows = {str(row.get("Percentiles")): row for row in content.get("percentiles") or ()}
    times = {
        key: {
            "mean": _in_ms(content, names),
            **{ours: _in_ms(rows.get(label) or {}, names[:1]) for label, ours in _LABELS.items()},
        }
        for key, names in _NAMES.items()
    }
    return {**{key.split(" (")[0]: value for key, value in content.items()}, **times}


def _in_ms(content: Object, names: Sequence[str]) -> float | None:
    for key in content:
        named = re.fullmatch(r"(.+) \((s|ms)\)", key)
        value = number_of(content, key)
        if named and named[1] in names and value is not None and value >= 0:
            return value * (1e3 if named[2] == "s" else 1.0)
    return None


EVALSCOPE = Summary(
    tool="evalscope",
    prepare=_evalscope_metrics,
    numbers={
        "users": ("Concurrency", "Number of concurrency"),
        "rate": "Request Rate",  # -1: no rate, but users
        "requests": ("Total Requests", "Total requests"),
        "completed": ("Success Requests", "Succeed requests"),
        "errors": ("Failed Requests", "Failed requests"),
        "mean_input_tokens": ("Avg Input Tokens", "Average input tokens per request"),
        "mean_output_tokens": ("Avg Output Tokens", "Average output tokens per request"),
        "wall_s": ("Test Duration", "Time taken for tests"),
        "throughput": ("Output Throughput", "Output token throughput"),
        "total_throughput": ("Total Throughput", "Total token throughput"),
        "request_throughput": ("Req Throughput", "Request throughput"),
    },
    metrics={key: key for key in _NAMES},
)


def read_evalscope(content: Object, load: Load | None) -> Imported:
    """One run of `evalscope perf`, both files joined."""
    counts = _evalscope_metrics(content)
    completed = whole_of(counts, "Success Requests", "Succeed requests")
    whole = whole_of(counts, "Stream Requests") == 0 and completed
    absent = dict.fromkeys(("ttft_ms", "tpot_ms", "itl_ms"), "the answers were not streamed")
    return EVALSCOPE.without(absent if whole else {}).read(content, load)


def _is_llmperf(content: Object) -> bool:
    return "results_ttft_s_mean" in content or (
        "num_concurrent_requests" in content and "results_number_errors" in content
    )


SUMMARIES: tuple[tuple[Knows, Reader], ...] = (
    (_is_llmperf, LLMPERF.read),
    (has("clients", "total_requests", "total_test_time"), read_llmeter),
    (has("load_summary", "successes"), INFERENCE_PERF.read),
    (has("totalTimeMills", "concurrentClients"), AWSCURL.read),
    (
        lambda content: str(content.get("version", "")).startswith("0.2") and "results" in content,
        LLM_D.read,
    ),
)
