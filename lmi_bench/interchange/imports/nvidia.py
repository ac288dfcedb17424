"""Results of AIPerf and genai-perf: a summary of metrics with units, a line a request, a sweep.

Their `inter_token_latency` is (E2E - TTFT) / (n - 1) of a request, which is our TPOT; gaps between
chunks are `inter_chunk_latency`, our ITL. Single values stand in `avg`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from lmi_bench.core.errors import InputError
from lmi_bench.core.exchange import Exchange
from lmi_bench.core.load import Load
from lmi_bench.core.records import RequestRecord
from lmi_bench.interchange.imports.level import (
    Imported,
    ImportedLevel,
    failed_record,
    number_of,
    record_level,
    stated_load,
    statistics,
    summary_line,
    two_event_record,
    whole_of,
)

_METRICS = {
    "time_to_first_token": "ttft_ms",
    "inter_token_latency": "tpot_ms",
    "inter_chunk_latency": "itl_ms",
    "request_latency": "e2e_ms",
}
_NAMES = {
    "mean": "avg", "p50": "p50", "p90": "p90", "p95": "p95", "p99": "p99",
    "min": "min", "max": "max", "std": "std",
}  # fmt: skip
_UNIT_MS = {"ms": 1.0, "s": 1e3, "sec": 1e3, "us": 1e-3, "ns": 1e-6}
SEARCH_HISTORY_HELP = (
    "search_history.json holds the path of a search and not what its levels measured: import the "
    "profile_export_aiperf.json of each iteration, which lie beside it"
)
_NO_CHUNKS = "the file has no gaps between chunks (inter_chunk_latency)"


def is_summary(content: Mapping[str, Any]) -> bool:
    """Whether an object is a summary of AIPerf or genai-perf."""
    metric = content.get("request_latency")
    return isinstance(metric, Mapping) and "avg" in metric and "unit" in metric


def is_request_line(content: Mapping[str, Any]) -> bool:
    """Whether an object is a line of AIPerf's profile_export.jsonl."""
    metadata = content.get("metadata")
    return isinstance(metadata, Mapping) and "request_start_ns" in metadata


def is_sweep(content: Mapping[str, Any]) -> bool:
    """Whether an object is AIPerf's profile_export_aiperf_sweep.json."""
    return isinstance(content.get("per_combination_metrics"), list)


def is_aggregate(content: Mapping[str, Any]) -> bool:
    """Whether an object is AIPerf's profile_export_aiperf_aggregate.json."""
    metadata = content.get("metadata")
    return isinstance(metadata, Mapping) and metadata.get("aggregation_type") == "confidence"


def is_search_history(content: Mapping[str, Any]) -> bool:
    """Whether an object is AIPerf's search_history.json."""
    return "iterations" in content and ("boundary_summary" in content or "best" in content)


def load_of(content: Mapping[str, Any]) -> Load:
    """What a summary says of how it was measured."""
    config = content.get("input_config") or {}
    rate = number_of({"x": _find(config, "request_rate")}, "x")
    # a rate with a cap on the concurrency is an open loop
    if rate:
        return stated_load(rate_per_s=rate)
    return stated_load(concurrency=whole_of({"x": _find(config, "concurrency")}, "x"))


def read_sweep(content: Mapping[str, Any], load: Load | None) -> Imported:
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


def read_aggregate(content: Mapping[str, Any], load: Load | None) -> Imported:
    """One profile_export_aiperf_aggregate.json: the mean of the runs of one level."""
    metadata = content["metadata"]
    level = _mean_of_runs(metadata.get("variation_values") or {}, content["metrics"], load)
    return Imported("aiperf", (level,), facts={"model": metadata.get("model")})


def read_summary(content: Mapping[str, Any], load: Load | None) -> Imported:
    """One `profile_export_aiperf.json` or `profile_export_genai_perf.json`."""
    tool = "aiperf" if _is_aiperf(content) else "genai-perf"
    config = content.get("input_config") or {}
    completed = whole_of(_metric(content, "request_count"), "avg")
    errors = whole_of(_metric(content, "error_request_count"), "avg")
    latencies = {
        key: statistics(_in_ms(_metric(content, name)), n=None if key == "itl_ms" else completed)
        for name, key in _METRICS.items()
        if _metric(content, name)
    }
    lengths = [
        number_of(_metric(content, name), "avg")
        for name in ("input_sequence_length", "output_sequence_length")
    ]
    totals = [None if mean is None or completed is None else mean * completed for mean in lengths]
    throughput = number_of(_metric(content, "output_token_throughput"), "avg")
    rate_per_s = number_of(_metric(content, "request_throughput"), "avg")
    line = summary_line(
        load or load_of(content),
        tool=tool,
        requests=None if completed is None else completed + (errors or 0),
        errors=errors,
        input_tokens=totals[0],
        output_tokens=totals[1],
        wall_s=None if not rate_per_s or completed is None else completed / rate_per_s,
        throughput=throughput,
        total_throughput=number_of(_metric(content, "total_token_throughput"), "avg"),
        request_throughput=rate_per_s,
        latencies=latencies,
        extra={"goodput": number_of(_metric(content, "goodput"), "avg")},
    )
    names = _find(config, "model_names") or _find(config, "model") or _named_models(config)
    model = names[0] if isinstance(names, list) and names else names
    return Imported(tool, (ImportedLevel(line),), facts={"model": model})


def read_requests(lines: Sequence[Mapping[str, Any]], load: Load | None) -> Imported:
    """One profile_export.jsonl of AIPerf: its profiling phase, not its warm-up."""
    if load is None:
        raise InputError(
            "profile_export.jsonl does not say under which load it was measured: give "
            "--concurrency N or --rate R"
        )
    records: list[RequestRecord] = []
    chunks = True
    for line in lines:
        metadata = line["metadata"]
        if metadata.get("benchmark_phase", "profiling") != "profiling":
            continue
        sent_s = metadata["request_start_ns"] * 1e-9
        metrics = line.get("metrics") or {}
        number = len(records)
        if line.get("error") or metadata.get("was_cancelled") or not metrics:
            error = line.get("error") or {}
            message = str(error.get("message") or "cancelled")
            ended_s = metadata.get("request_end_ns")
            records.append(
                failed_record(
                    number,
                    sent_s=sent_s,
                    error=message,
                    ended_s=None if ended_s is None else ended_s * 1e-9,
                )
            )
            continue
        record = _record(number, sent_s, metrics)
        chunks &= len(record.token_times_s) != 2 or record.output_tokens <= 2
        records.append(record)
    absent = {} if chunks else {"itl_ms": _NO_CHUNKS}
    level = record_level(load, records, tool="aiperf", missing_metrics=absent)
    return Imported("aiperf", (level,))


def _mean_of_runs(
    parameters: Mapping[str, Any], found: Mapping[str, Any], load: Load | None
) -> ImportedLevel:
    """A level of which the file has each statistic's mean over the runs.

    A metric holds its statistics, or each of them stands by itself, as `time_to_first_token_p90`.
    The deviation in it is that of the runs and not of the requests: it is left out.
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
    (level,) = read_summary(metrics, load).levels
    extra = {**level.line["imported"], "parameters": dict(parameters)}
    return ImportedLevel({**level.line, "imported_from": "aiperf", "imported": extra})


def _record(number: int, sent_s: float, metrics: Mapping[str, Any]) -> RequestRecord:
    ttft_ms = _value_ms(metrics.get("time_to_first_token"))
    e2e_ms = _value_ms(metrics.get("request_latency"))
    if e2e_ms is None:
        raise InputError(f"request {number} of the file has no request_latency")
    output_tokens = round(
        _value(metrics.get("output_sequence_length"))
        or _value(metrics.get("output_token_count"))
        or 0
    )
    input_tokens = round(_value(metrics.get("input_sequence_length")) or 0)
    gaps = metrics.get("inter_chunk_latency") or {}
    if isinstance(gaps.get("value"), list) and gaps["value"] and ttft_ms is not None:
        scale = _UNIT_MS[str(gaps.get("unit", "ms"))] / 1e3
        times = accumulate((gap * scale for gap in gaps["value"]), initial=sent_s + ttft_ms / 1e3)
        return RequestRecord(
            number,
            sent_s,
            Exchange(sent_s, tuple(times), ended_s=sent_s + e2e_ms / 1e3),
            input_tokens=input_tokens,
            output_tokens=output_tokens,
        )
    return two_event_record(
        number,
        sent_s=sent_s,
        ttft_s=None if ttft_ms is None else ttft_ms / 1e3,
        e2e_s=e2e_ms / 1e3,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
    )


def _is_aiperf(content: Mapping[str, Any]) -> bool:
    config = content.get("input_config") or {}
    return "loadgen" in config or "was_cancelled" in content


def _metric(content: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = content.get(name)
    return found if isinstance(found, Mapping) else {}


def _in_ms(metric: Mapping[str, Any]) -> dict[str, float | None]:
    scale = _scale(metric)
    return {
        ours: None if value is None else value * scale
        for ours, theirs in _NAMES.items()
        for value in [number_of(metric, theirs)]
    }


def _scale(metric: Mapping[str, Any]) -> float:
    unit = str(metric.get("unit", "ms"))
    if unit not in _UNIT_MS:
        raise InputError(f"the file's unit {unit!r} of a latency is not known")
    return _UNIT_MS[unit]


def _value(metric: Any) -> float | None:
    return number_of(metric, "value") if isinstance(metric, Mapping) else None


def _value_ms(metric: Any) -> float | None:
    value = _value(metric)
    return None if value is None else value * _scale(metric)


def _named_models(config: Mapping[str, Any]) -> list[Any]:
    """Names as AIPerf 0.13 lists them: models.items[].name."""
    models = config.get("models")
    items = models.get("items") if isinstance(models, Mapping) else None
    return [item.get("name") for item in items or () if isinstance(item, Mapping)]


def _find(content: Any, name: str) -> Any:
    """The first value under a name, however deep: the two tools nest their options apart.

    AIPerf 0.13 lists phases; that of the warm-up has a load of its own, which is passed over.
    """
    if isinstance(content, list):
        content = dict(enumerate(content))
    if isinstance(content, Mapping) and content.get("kind") == "warmup":
        return None
    if not isinstance(content, Mapping):
        return None
    if content.get(name) is not None:
        return content[name]
    return next((found for v in content.values() if (found := _find(v, name)) is not None), None)
