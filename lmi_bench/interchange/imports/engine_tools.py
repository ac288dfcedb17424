"""Summaries of vLLM's, SGLang's and InferenceX's benchmarks, AIPerf, guidellm and genai-bench.

TPOT is (E2E - TTFT) / (n - 1) of a request and ITL the gap between streamed items, as here, but:

- SGLang divides its gaps by the accepted draft length and writes 0 where it measured nothing;
- InferenceX gives seconds, and throughput for one GPU;
- AIPerf, genai-perf: `inter_token_latency` is our TPOT, `inter_chunk_latency` our ITL;
- guidellm: `inter_token_latency_ms` is our TPOT, `time_per_output_token_ms` E2E / n, our latency
  per token; latencies are of successful requests, throughput is of all (guidellm issue 529);
- genai-bench leaves out the speed of answers whose tokens came within a millisecond.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lmi_bench.core.errors import InputError
from lmi_bench.core.load import Load
from lmi_bench.interchange.imports.level import (
    Imported,
    ImportedLevel,
    number_of,
    record_level,
    stated_load,
    whole_of,
)
from lmi_bench.interchange.imports.requests import vllm_records
from lmi_bench.interchange.imports.summary import PLAIN, Knows, Object, Path, Reader, Summary, has

_QUANTILES = ("p90", "p95", "p99")
_NO_GAPS = "{} gives one mean gap a request (our TPOT), not the gaps"
SEARCH_HISTORY_HELP = (
    "search_history.json holds the path of a search and not what its levels measured: import the "
    "profile_export_aiperf.json of each iteration, from the same folder"
)


def _find(content: Any, name: str) -> Any:
    """The first value under a name, however deep: versions nest their options differently.

    AIPerf 0.13 lists phases; the warm-up has its own load and is skipped.
    """
    if isinstance(content, list):
        content = dict(enumerate(content))
    if not isinstance(content, Mapping) or content.get("kind") == "warmup":
        return None
    if content.get(name) is not None:
        return content[name]
    return next((found for v in content.values() if (found := _find(v, name)) is not None), None)


# --- vLLM, SGLang, InferenceX -------------------------------------------------------------------


def _vllm_failures(content: Object) -> Object:
    sent, completed = whole_of(content, "num_prompts"), whole_of(content, "completed")
    unknown = content.get("failed") is None and sent is not None and completed is not None
    return {**content, "failed": sent - completed} if unknown else content  # type: ignore[operator]


_VLLM_NUMBERS: Mapping[str, Path] = {
    "rate": "request_rate",  # "inf" is no finite number: all prompts at once
    "users": ("max_concurrency", "num_prompts", "completed"),
    "completed": "completed",
    "errors": "failed",
    "input_tokens": "total_input_tokens",
    "output_tokens": "total_output_tokens",
    "wall_s": "duration",
    "throughput": "output_throughput",
    "total_throughput": ("total_throughput", "total_token_throughput"),
    "request_throughput": "request_throughput",
}
_VLLM_STATISTICS = {
    **{name: f"{name}_{{}}_ms" for name in ("mean", "std", *_QUANTILES)},
    "p50": "median_{}_ms",
}
VLLM = Summary(
    tool="vllm",
    prepare=_vllm_failures,
    numbers=_VLLM_NUMBERS,
    metrics={"ttft_ms": "ttft", "tpot_ms": "tpot", "itl_ms": "itl", "e2e_ms": "e2el"},
    statistics=_VLLM_STATISTICS,
    extra={
        "request_goodput": ("request_goodput:", "request_goodput"),  # some versions wrote the colon
        "burstiness": "burstiness",
        "max_output_tokens_per_s": "max_output_tokens_per_s",
    },
    facts={"model": "model_id", "back_end": ("backend", "endpoint_type")},
)


def read_vllm(content: Object, load: Load | None) -> Imported:
    """One run of `vllm bench serve --save-result`, by its requests if saved in detail."""
    whole = VLLM.read(content, load)
    records = vllm_records(content)
    if not records:
        return whole
    found = whole.levels[0].level
    level = record_level(found.load, records, tool="vllm", extra=found.imported)
    return replace(whole, levels=(level,))


def _sglang_lengths(content: Object) -> Object:
    if number_of(content, "random_range_ratio") != 1:
        return content
    return {
        **content,
        "isl": content.get("random_input_len"),
        "osl": content.get("random_output_len"),
    }


SGLANG = Summary(
    tool="sglang",
    prepare=_sglang_lengths,
    numbers={name: path for name, path in _VLLM_NUMBERS.items() if name != "errors"},
    metrics={**VLLM.metrics, "e2e_ms": "e2e_latency"},
    statistics=_VLLM_STATISTICS,
    extra={"measured_concurrency": "concurrency"},
    facts={"back_end": "backend"},
    notes=("failed requests are not in the file",),
)


def read_sglang(content: Object, load: Load | None) -> Imported:
    """One line of `sglang.bench_serving --output-file`."""
    absent = {
        key: "0 in the file, which the tool writes where it measured nothing"
        for key, name in SGLANG.metrics.items()
        if number_of(content, f"mean_{name}_ms") == 0
    }
    accepted = number_of(content, "accept_length")
    if accepted is not None and accepted > 1 and "itl_ms" not in absent:
        absent["itl_ms"] = f"the file's ITL is divided by the accepted draft length {accepted:g}"
    return SGLANG.without(absent).read(content, load)


def _inferencex_totals(content: Object) -> Object:
    """Throughput of all GPUs, unless they form several groups."""
    degrees = [whole_of(content, name) or 1 for name in ("tp", "pp")]
    gpus = degrees[0] * degrees[1]
    if _is_split(content):
        return {**content, "degree": degrees[0]}
    by_gpu = {name: number_of(content, f"{name}tput_per_gpu") for name in ("", "output_")}
    totals = {f"{name}tput": each * gpus for name, each in by_gpu.items() if each is not None}
    return {**content, "degree": degrees[0], "gpus": gpus, **totals}


def _is_split(content: Object) -> bool:
    return any(str(content.get(name)).lower() == "true" for name in ("is_multinode", "disagg"))


INFERENCEX = Summary(
    tool="inferencex",
    prepare=_inferencex_totals,
    numbers={"users": "conc", "throughput": "output_tput", "total_throughput": "tput"},
    metrics=VLLM.metrics,
    statistics={
        **{name: f"{name}_{{}}" for name in ("mean", "std", *_QUANTILES)},
        "p50": "median_{}",
    },
    factor_ms=1e3,
    extra={
        name: name for name in ("tput_per_gpu", "output_tput_per_gpu", "joules_per_output_token")
    },
    facts={
        "model": ("model", "infmax_model_prefix"),
        "accelerator": "hw",
        "n_accelerators": "gpus",
        "tensor_parallel": "degree",
        "dtype": "precision",
        "back_end": "framework",
    },
)


def read_inferencex(content: Object, load: Load | None) -> Imported:
    """One `agg_*.json` of InferenceX (InferenceMAX)."""
    split = ("several nodes or pools: the number of GPUs is not known, so no total throughput",)
    return replace(INFERENCEX.read(content, load), notes=split if _is_split(content) else ())


# --- AIPerf, genai-perf -------------------------------------------------------------------------


def _aiperf_config(content: Object) -> Object:
    config = content.get("input_config") or {}
    models = config.get("models")
    items = models.get("items") if isinstance(models, Mapping) else None  # as AIPerf 0.13 has it
    named = [item.get("name") for item in items or () if isinstance(item, Mapping)]
    names = _find(config, "model_names") or _find(config, "model") or named
    return {
        **content,
        "users": _find(config, "concurrency"),
        "rate": _find(config, "request_rate"),
        "model": names[0] if isinstance(names, list) and names else names,
    }


AIPERF = Summary(
    tool="aiperf",
    prepare=_aiperf_config,
    numbers={
        "users": "users",
        "rate": "rate",  # with a cap on the concurrency, too, an open loop
        "completed": "request_count.avg",
        "errors": "error_request_count.avg",
        "mean_input_tokens": "input_sequence_length.avg",
        "mean_output_tokens": "output_sequence_length.avg",
        "throughput": "output_token_throughput.avg",
        "total_throughput": "total_token_throughput.avg",
        "request_throughput": "request_throughput.avg",
    },
    metrics={
        "ttft_ms": "time_to_first_token",
        "tpot_ms": "inter_token_latency",
        "itl_ms": "inter_chunk_latency",
        "e2e_ms": "request_latency",
    },
    statistics={**PLAIN, "mean": "{}.avg"},
    unit="{}.unit",
    unit_if_none="ms",
    extra={"goodput": "goodput.avg"},
    facts={"model": "model"},
)


def read_aiperf(content: Object, load: Load | None) -> Imported:
    """One `profile_export_aiperf.json` or `profile_export_genai_perf.json`."""
    config = content.get("input_config") or {}
    is_aiperf = "loadgen" in config or "was_cancelled" in content
    return replace(AIPERF, tool="aiperf" if is_aiperf else "genai-perf").read(content, load)


def read_aiperf_sweep(content: Object, load: Load | None) -> Imported:
    """One profile_export_aiperf_sweep.json: a level for each combination, the mean of its runs."""
    if load is not None:
        raise InputError(
            "a sweep states the load of each level: leave --concurrency and --rate out"
        )
    levels = tuple(
        _mean_of_runs(each["parameters"], each["metrics"], None)
        for each in content["per_combination_metrics"]
    )
    return Imported("aiperf", levels)


def read_aiperf_aggregate(content: Object, load: Load | None) -> Imported:
    """One profile_export_aiperf_aggregate.json: the mean of the runs of one level."""
    metadata = content["metadata"]
    level = _mean_of_runs(metadata.get("variation_values") or {}, content["metrics"], load)
    return Imported("aiperf", (level,), facts={"model": metadata.get("model")})


def _mean_of_runs(parameters: Object, found: Object, load: Load | None) -> ImportedLevel:
    """A level from each statistic's mean over several runs.

    A metric is an object of statistics, or each is a key such as `time_to_first_token_p90`. The
    file's deviation is between runs, not between requests: it is left out.
    """
    values = {str(name).split(".")[-1]: value for name, value in parameters.items()}
    if load is None and values.get("request_rate"):
        load = stated_load(rate_per_s=number_of(values, "request_rate"))
    elif load is None:
        load = stated_load(concurrency=whole_of(values, "concurrency"))
    metrics: dict[str, dict[str, Any]] = {}
    for name, metric in found.items():
        unit = metric.get("unit", "ms")
        if "avg" in metric:
            metrics[name] = {**metric, "unit": unit, "std": None}
            continue
        of, _, statistic = name.rpartition("_")
        if statistic != "std":
            metrics.setdefault(of, {"unit": unit})[statistic] = metric.get("mean")
    (level,) = AIPERF.read(metrics, load).levels
    kept = {**(level.level.imported or {}), "parameters": dict(parameters)}
    return ImportedLevel(replace(level.level, imported=kept))


# --- guidellm, genai-bench ----------------------------------------------------------------------


def _guidellm_counts(benchmark: Object) -> Object:
    kinds = {
        kind: whole_of(_guidellm_part(benchmark, kind), "count") or 0
        for kind in ("successful", "errored", "incomplete")
    }
    times = benchmark.get("scheduler_metrics") or benchmark
    ends = [number_of(times, f"measure_{edge}_time", f"{edge}_time") for edge in ("start", "end")]
    return {
        **benchmark,
        "kinds": kinds,
        "requests": sum(kinds.values()),
        "errors": kinds["errored"] + kinds["incomplete"],
        "wall_s": None if ends[0] is None or ends[1] is None else ends[1] - ends[0],
    }


def _guidellm_part(benchmark: Object, kind: str) -> Object:
    found = (benchmark["metrics"].get("request_latency") or {}).get(kind)
    return found if isinstance(found, Mapping) else {}


GUIDELLM = Summary(
    tool="guidellm",
    prepare=_guidellm_counts,
    numbers={
        "requests": "requests",
        "errors": "errors",
        "input_tokens": "metrics.prompt_token_count.successful.total_sum",
        "output_tokens": "metrics.output_token_count.successful.total_sum",
        "wall_s": "wall_s",
        "throughput": "metrics.output_tokens_per_second.total.mean",
        "total_throughput": "metrics.tokens_per_second.total.mean",
        "request_throughput": "metrics.requests_per_second.successful.mean",
    },
    metrics={
        "ttft_ms": "time_to_first_token_ms",
        "tpot_ms": "inter_token_latency_ms",
        "latency_ms_per_token": "time_per_output_token_ms",
        "e2e_ms": "request_latency",
    },
    absent={"itl_ms": _NO_GAPS.format("guidellm")},
    statistics={
        **{name: f"metrics.{{}}.successful.{name}" for name in ("mean", "min", "max")},
        "std": "metrics.{}.successful.std_dev",
        **{p: f"metrics.{{}}.successful.percentiles.{p}" for p in ("p50", *_QUANTILES)},
    },
    factor_ms={"e2e_ms": 1e3},
    extra={
        "incomplete_requests": "kinds.incomplete",
        "measured_concurrency": "metrics.request_concurrency.total.mean",
    },
)


def read_guidellm(content: Object, load: Load | None) -> Imported:
    """A report of version 1 or 2; each of its benchmarks is a level."""
    levels = []
    for benchmark in content["benchmarks"]:
        (level,) = GUIDELLM.read(benchmark, load or _guidellm_load(benchmark)).levels
        kinds = _guidellm_counts(benchmark)["kinds"]
        failed = {kind: n for kind, n in kinds.items() if n and kind != "successful"}
        levels.append(ImportedLevel(replace(level.level, errors_by_kind=failed)))
    model = _find(content.get("config") or content.get("args") or {}, "model")
    return Imported("guidellm", tuple(levels), {"model": None if model is None else str(model)})


def _guidellm_load(benchmark: Object) -> Load:
    """The strategy of the benchmark, wherever its version keeps it."""
    strategy = _find(benchmark, "strategy")
    if not isinstance(strategy, Mapping):
        raise InputError(
            "the guidellm report does not name its strategy: give --concurrency N or --rate R"
        )
    rate = number_of(strategy, "rate")
    if rate is not None:
        return stated_load(rate_per_s=rate)
    alone = str(strategy.get("type_")) == "synchronous"
    users = 1 if alone else whole_of(strategy, "streams", "max_concurrency")
    return stated_load(concurrency=users)


def _genai_bench_lengths(content: Object) -> Object:
    fixed = re.fullmatch(r"D\((\d+), ?(\d+)\)", str(content["aggregated_metrics"].get("scenario")))
    return {**content, **(dict(zip(("isl", "osl"), fixed.groups(), strict=True)) if fixed else {})}


_LEVEL = "aggregated_metrics"
GENAI_BENCH = Summary(
    tool="genai-bench",
    prepare=_genai_bench_lengths,
    numbers={
        "users": f"{_LEVEL}.num_concurrency",
        "requests": f"{_LEVEL}.num_requests",
        "completed": f"{_LEVEL}.num_completed_requests",
        "errors": f"{_LEVEL}.num_error_requests",
        "input_tokens": f"{_LEVEL}.stats.num_input_tokens.sum",
        "output_tokens": f"{_LEVEL}.stats.num_output_tokens.sum",
        "wall_s": f"{_LEVEL}.run_duration",
        "throughput": f"{_LEVEL}.mean_output_throughput_tokens_per_s",
        "total_throughput": f"{_LEVEL}.mean_total_tokens_throughput_tokens_per_s",
        "request_throughput": f"{_LEVEL}.requests_per_second",
    },
    metrics={"ttft_ms": "ttft", "tpot_ms": "tpot", "e2e_ms": "e2e_latency"},
    absent={"itl_ms": _NO_GAPS.format("genai-bench")},
    statistics={
        **{name: f"{_LEVEL}.stats.{path}" for name, path in PLAIN.items()},
        "std": f"{_LEVEL}.stats.{{}}.stddev",
    },
    unit="_time_unit",
    unit_if_none="s",
    extra={"scenario": f"{_LEVEL}.scenario", "status_codes": f"{_LEVEL}.error_codes_frequency"},
)


# --- recognises the tool of a summary ---------------------------------------------------------


def _is_vllm(content: Object) -> bool:
    return isinstance(content.get("request_throughput"), int | float) and (
        "total_token_throughput" in content or "num_prompts" in content
    )


def _is_sglang(content: Object) -> bool:
    return "request_throughput" in content and (
        "random_range_ratio" in content or "mean_e2e_latency_ms" in content
    )


def _is_aiperf_aggregate(content: Object) -> bool:
    metadata = content.get("metadata")
    return isinstance(metadata, Mapping) and metadata.get("aggregation_type") == "confidence"


def _is_guidellm(content: Object) -> bool:
    benchmarks = content.get("benchmarks")
    return (
        isinstance(benchmarks, list)
        and bool(benchmarks)
        and "time_to_first_token_ms" in (benchmarks[0].get("metrics") or {})
    )


def is_search_history(content: Object) -> bool:
    """Whether an object is AIPerf's search_history.json, which holds no levels."""
    return "iterations" in content and ("boundary_summary" in content or "best" in content)


# The first match reads: SGLang's lines have nearly all of vLLM's fields.
SUMMARIES: tuple[tuple[Knows, Reader], ...] = (
    (_is_sglang, read_sglang),
    (_is_vllm, read_vllm),
    (has("tput_per_gpu", "conc"), read_inferencex),
    (has("request_latency.avg", "request_latency.unit"), read_aiperf),
    (lambda content: isinstance(content.get("per_combination_metrics"), list), read_aiperf_sweep),
    (_is_aiperf_aggregate, read_aiperf_aggregate),
    (_is_guidellm, read_guidellm),
    (has(f"{_LEVEL}.stats", f"{_LEVEL}.num_concurrency"), GENAI_BENCH.read),
)
