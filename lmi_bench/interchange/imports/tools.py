"""Summaries of other tools' runs: how each is recognised, and what its table of paths cannot say.

TPOT is (E2E - TTFT) / (n - 1) of a request and ITL the gap between streamed items, as here, but:
- SGLang divides its gaps by the accepted draft length and writes 0 where it measured nothing;
- InferenceX gives seconds, and throughput for one GPU;
- AIPerf, genai-perf: `inter_token_latency` is our TPOT, `inter_chunk_latency` our ITL;
- guidellm: `inter_token_latency_ms` is our TPOT, `time_per_output_token_ms` E2E / n, our latency
  per token; latencies are of successful requests, throughput is of all (guidellm issue 529);
- genai-bench leaves out the speed of answers whose tokens came within a millisecond;
- llmperf's `inter_token_latency_s` contains the TTFT and divides by chunks: neither ITL nor TPOT;
- inference-perf, llm-d: `normalized_time_per_output_token` is E2E / n, our latency per token;
- awscurl measures the first byte, which a server may send before any token: it is no TTFT;
- evalscope's names changed with its versions, and the unit is in the name; its percentiles are by
  nearest rank, negative values mean that it measured nothing, a rate of -1 that users are stated;
- vllm: a rate of "inf" sent all prompts at once; some versions wrote `request_goodput:`.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lmi_bench.core.errors import InputError
from lmi_bench.core.load import Load
from lmi_bench.interchange.imports.level import (
    Imported,
    ImportedLevel,
    finite,
    in_ms,
    number_of,
    record_level,
    stated_load,
    value_at,
    whole_of,
)
from lmi_bench.interchange.imports.requests import vllm_records
from lmi_bench.interchange.imports.summary import Knows, Object, Reader, has, summary_of


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


def _vllm_failures(content: Object) -> Object:
    sent, completed = whole_of(content, "num_prompts"), whole_of(content, "completed")
    unknown = content.get("failed") is None and sent is not None and completed is not None
    return {**content, "failed": sent - completed} if unknown else content  # type: ignore[operator]


VLLM = summary_of("vllm", _vllm_failures)


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


SGLANG = summary_of("sglang", _sglang_lengths)


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


INFERENCEX = summary_of("inferencex", _inferencex_totals)


def read_inferencex(content: Object, load: Load | None) -> Imported:
    """One `agg_*.json` of InferenceX (InferenceMAX)."""
    split = ("several nodes or pools: the number of GPUs is not known, so no total throughput",)
    return replace(INFERENCEX.read(content, load), notes=split if _is_split(content) else ())


def _aiperf_config(content: Object) -> Object:
    config = content.get("input_config") or {}
    items = value_at(config, "models.items")  # as AIPerf 0.13 has it
    named = [item.get("name") for item in items or () if isinstance(item, Mapping)]
    names = _find(config, "model_names") or _find(config, "model") or named
    return {
        **content,
        "users": _find(config, "concurrency"),
        "rate": _find(config, "request_rate"),
        "model": names[0] if isinstance(names, list) and names else names,
    }


AIPERF = summary_of("aiperf", _aiperf_config)


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


def _guidellm_counts(benchmark: Object) -> Object:
    found = benchmark["metrics"].get("request_latency") or {}
    kinds = {
        kind: whole_of(found.get(kind) or {}, "count") or 0
        for kind in ("successful", "errored", "incomplete")
    }
    times = benchmark.get("scheduler_metrics") or benchmark
    ends = [number_of(times, f"measure_{edge}_time", f"{edge}_time") for edge in ("start", "end")]
    return {
        **benchmark,
        "kinds": kinds,
        "units": {"request_latency": "s"},
        "requests": sum(kinds.values()),
        "errors": kinds["errored"] + kinds["incomplete"],
        "wall_s": None if ends[0] is None or ends[1] is None else ends[1] - ends[0],
    }


GUIDELLM = summary_of("guidellm", _guidellm_counts)


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
    if (rate := number_of(strategy, "rate")) is not None:
        return stated_load(rate_per_s=rate)
    alone = str(strategy.get("type_")) == "synchronous"
    return stated_load(1 if alone else whole_of(strategy, "streams", "max_concurrency"))


def _genai_bench_lengths(content: Object) -> Object:
    fixed = re.fullmatch(r"D\((\d+), ?(\d+)\)", str(content["aggregated_metrics"].get("scenario")))
    return {**content, **(dict(zip(("isl", "osl"), fixed.groups(), strict=True)) if fixed else {})}


_LEVEL = "aggregated_metrics"
GENAI_BENCH = summary_of("genai-bench", _genai_bench_lengths)


def _is_guidellm(content: Object) -> bool:
    benchmarks = content.get("benchmarks")
    return (
        isinstance(benchmarks, list)
        and bool(benchmarks)
        and "time_to_first_token_ms" in (benchmarks[0].get("metrics") or {})
    )


LLMPERF = summary_of("llmperf")
LLMETER = summary_of("llmeter")


def read_llmeter(content: Object, load: Load | None) -> Imported:
    """The stats.json of one llmeter run; its summary.json counts only."""
    if "time_to_last_token-average" not in content:
        raise InputError(
            "llmeter's summary.json holds no latencies: import stats.json or responses.jsonl "
            "from the same folder"
        )
    return LLMETER.read(content, load)


INFERENCE_PERF = summary_of("inference-perf")


def _llm_d_parts(content: Object) -> Object:
    found = value_at(content, "results.request_performance.aggregate") or {}
    stack = [each.get("standardized") or {} for each in value_at(content, "scenario.stack") or ()]
    duration = str(value_at(content, "run.time.duration") or "")
    seconds = re.fullmatch(r"PT([\d.]+)S", duration)  # ISO 8601, seconds only
    return {
        **found,
        "load": value_at(content, "scenario.load.standardized") or {},
        "engine": next((engine for engine in stack if engine.get("accelerator")), {}),
        "wall_s": seconds[1] if seconds else None,
    }


LLM_D = summary_of("llm-d", _llm_d_parts)


AWSCURL = summary_of("awscurl")


Rows = Sequence[Object]
_SUMMARY, _PERCENTILES = "benchmark_summary.json", "benchmark_percentile.json"
_OLD_NAMES = {
    "Average time to first token": "TTFT",
    "Average time per output token": "TPOT",
    "Average inter-token latency": "ITL",
    "Average latency": "Latency",
}


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
    """Counts by their names without units, and the times of each statistic in milliseconds."""
    rows = {str(row.get("Percentiles")): _times_ms(row) for row in content.get("percentiles") or ()}
    counts = {key.split(" (")[0]: value for key, value in content.items()}
    return {**counts, **rows, "mean": _times_ms(content)}


def _times_ms(row: Object) -> dict[str, float]:
    found = {}
    for key, value in row.items():
        named = re.fullmatch(r"(?:Avg )?(.+) \((s|ms)\)", key)
        number = finite(value)
        if named and number is not None and number >= 0:
            found[_OLD_NAMES.get(named[1], named[1])] = number * in_ms(named[2])
    return found


EVALSCOPE = summary_of("evalscope", _evalscope_metrics)


def read_evalscope(content: Object, load: Load | None) -> Imported:
    """One run of `evalscope perf`, both files joined."""
    counts = _evalscope_metrics(content)
    completed = whole_of(counts, "Success Requests", "Succeed requests")
    whole = whole_of(counts, "Stream Requests") == 0 and completed
    absent = dict.fromkeys(("ttft_ms", "tpot_ms", "itl_ms"), "the answers were not streamed")
    return EVALSCOPE.without(absent if whole else {}).read(content, load)


# The first match reads: SGLang's lines have nearly all of vLLM's fields, AIPerf's file has some.
SUMMARIES: tuple[tuple[Knows, Reader], ...] = (
    (has("request_throughput", "random_range_ratio"), read_sglang),
    (has("request_throughput", "mean_e2e_latency_ms"), read_sglang),
    (has("request_latency.avg", "request_latency.unit"), read_aiperf),
    (has("request_throughput", "total_token_throughput"), read_vllm),
    (has("request_throughput", "num_prompts"), read_vllm),
    (has("tput_per_gpu", "conc"), read_inferencex),
    (lambda content: isinstance(content.get("per_combination_metrics"), list), read_aiperf_sweep),
    (
        lambda content: value_at(content, "metadata.aggregation_type") == "confidence",
        read_aiperf_aggregate,
    ),
    (_is_guidellm, read_guidellm),
    (has(f"{_LEVEL}.stats", f"{_LEVEL}.num_concurrency"), GENAI_BENCH.read),
    (has("results_ttft_s_mean"), LLMPERF.read),
    (has("num_concurrent_requests", "results_number_errors"), LLMPERF.read),
    (has("clients", "total_requests", "total_test_time"), read_llmeter),
    (has("load_summary", "successes"), INFERENCE_PERF.read),
    (is_evalscope, read_evalscope),
    (has("totalTimeMills", "concurrentClients"), AWSCURL.read),
    (
        lambda content: str(content.get("version", "")).startswith("0.2") and "results" in content,
        LLM_D.read,
    ),
)
