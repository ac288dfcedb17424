"""Other tools' files: what the tables of paths cannot say of a summary, and lists of requests.

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

A function `_of_TOOL` rearranges a file's object for its tool's table, into one object a level.
Requests have times in seconds since any common start: llmperf's have no times of day, llmeter's and
inference-perf's are seconds, AIPerf's nanoseconds with a unit at each metric.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from itertools import accumulate
from typing import Any

from lmi_bench.analysis.results.latency import summarise_ms
from lmi_bench.catalog.tables import read_rows
from lmi_bench.core.errors import InputError
from lmi_bench.core.load import Load
from lmi_bench.core.records import RequestRecord
from lmi_bench.interchange.imports.level import (
    Imported,
    ImportedLevel,
    finite,
    in_ms,
    missing,
    number_of,
    record_level,
    request_record,
    summary_level,
    value_at,
    whole_of,
)
from lmi_bench.interchange.imports.summary import Object, Summary, tables

Rows = Sequence[Object]


def _of_sglang(content: Object) -> Rows:
    absent = {
        key: "0 in the file, which the tool writes where it measured nothing"
        for key, name in tables()["sglang"]["metrics"].items()
        if number_of(content, f"mean_{name}_ms") == 0
    }
    accepted = number_of(content, "accept_length")
    if accepted is not None and accepted > 1:
        divided = f"the file's ITL is divided by the accepted draft length {accepted:g}"
        absent = {"itl_ms": divided, **absent}
    lengths = {"isl": content.get("random_input_len"), "osl": content.get("random_output_len")}
    is_fixed = number_of(content, "random_range_ratio") == 1
    return [{**content, "_absent": absent, **(lengths if is_fixed else {})}]


def _of_inferencex(content: Object) -> Rows:
    """Throughput of all GPUs, unless they form several groups."""
    degree, stages = (whole_of(content, name) or 1 for name in ("tp", "pp"))
    if any(str(content.get(name)).lower() == "true" for name in ("is_multinode", "disagg")):
        note = "several nodes or pools: the number of GPUs is not known, so no total throughput"
        return [{**content, "degree": degree, "_notes": [note]}]
    gpus = degree * stages
    by_gpu = {name: number_of(content, f"{name}tput_per_gpu") for name in ("", "output_")}
    totals = {f"{name}tput": each * gpus for name, each in by_gpu.items() if each is not None}
    return [{**content, "degree": degree, "gpus": gpus, **totals}]


def _of_aiperf(content: Object) -> Rows:
    """One run, one level as the mean of its runs, or a sweep with several such levels."""
    if isinstance(sweep := content.get("per_combination_metrics"), list):
        return [_mean_of_runs(each["parameters"], each["metrics"]) for each in sweep]
    if value_at(content, "metadata.aggregation_type") is not None:
        metadata = content["metadata"]
        mean = _mean_of_runs(metadata.get("variation_values") or {}, content["metrics"])
        return [{**mean, "model": metadata.get("model")}]
    is_own = "loadgen" in (content.get("input_config") or {}) or "was_cancelled" in content
    return [{**content, "_tool": None if is_own else "genai-perf"}]


def _mean_of_runs(parameters: Object, found: Object) -> Object:
    """A level from each statistic's mean over several runs.

    A metric is an object of statistics, or each is a key such as `time_to_first_token_p90`. The
    file's deviation is between runs, not between requests: it is left out.
    """
    values = {str(name).split(".")[-1]: value for name, value in parameters.items()}
    metrics: dict[str, dict[str, Any]] = {}
    for name, metric in found.items():
        unit = metric.get("unit", "ms")
        if "avg" in metric:
            metrics[name] = {**metric, "unit": unit, "std": None}
            continue
        of, _, statistic = name.rpartition("_")
        if statistic != "std":
            metrics.setdefault(of, {"unit": unit})[statistic] = metric.get("mean")
    load = {"rate": values.get("request_rate"), "users": values.get("concurrency")}
    return {**metrics, **load, "parameters": dict(parameters)}


def _of_guidellm(content: Object) -> Rows:
    """A report of version 1 or 2; each of its benchmarks is a level."""
    model = value_at(content.get("config") or content.get("args"), "?model")
    named = None if model is None else str(model)
    return [{**_guidellm_level(each), "model": named} for each in content["benchmarks"]]


def _guidellm_level(benchmark: Object) -> Object:
    """The counts and the load, wherever the report's version keeps them."""
    found = benchmark["metrics"].get("request_latency") or {}
    kinds = {kind: whole_of(found.get(kind) or {}, "count") or 0 for kind in ("successful", "errored", "incomplete")}
    times = benchmark.get("scheduler_metrics") or benchmark
    ends = [number_of(times, f"measure_{edge}_time", f"{edge}_time") for edge in ("start", "end")]
    alone = str(value_at(benchmark, "?strategy.type_")) == "synchronous"
    return {
        **benchmark,
        "users": 1 if alone else None,
        "kinds": kinds,
        "units": {"request_latency": "s"},
        "requests": sum(kinds.values()),
        "errors": kinds["errored"] + kinds["incomplete"],
        "_failed": {kind: n for kind, n in kinds.items() if n and kind != "successful"},
        "wall_s": None if ends[0] is None or ends[1] is None else ends[1] - ends[0],
    }


def _of_genai_bench(content: Object) -> Rows:
    scenario = str(content["aggregated_metrics"].get("scenario"))
    fixed = re.fullmatch(r"D\((?P<isl>\d+), ?(?P<osl>\d+)\)", scenario)
    return [{**content, **(fixed.groupdict() if fixed else {})}]


def _of_llm_d(content: Object) -> Rows:
    found = value_at(content, "results.request_performance.aggregate") or {}
    stack = [each.get("standardized") or {} for each in value_at(content, "scenario.stack") or ()]
    duration = str(value_at(content, "run.time.duration") or "")
    seconds = re.fullmatch(r"PT([\d.]+)S", duration)  # ISO 8601, seconds only
    return [
        {
            **found,
            "load": value_at(content, "scenario.load.standardized") or {},
            "engine": next((engine for engine in stack if engine.get("accelerator")), {}),
            "wall_s": seconds[1] if seconds else None,
        }
    ]


_SUMMARY, _PERCENTILES = "benchmark_summary.json", "benchmark_percentile.json"
_OLD_NAMES = {row["old"]: row["new"] for row in read_rows("evalscope_names.csv", "interchange")}


def join_evalscope(objects: Rows, read_beside: Callable[[str], Rows | None]) -> Object:
    """The summary with the rows of quantiles under `percentiles`; either file may be given.

    Raises InputError if the summary is missing: the quantiles do not state their load.
    """
    if "Percentiles" not in objects[0]:
        return {**objects[0], "percentiles": list(read_beside(_PERCENTILES) or ())}
    summary = read_beside(_SUMMARY)
    if summary is None:
        raise InputError(f"the load and the counts are in {_SUMMARY}, which is not in its folder")
    return {**summary[0], "percentiles": list(objects)}


def _of_evalscope(content: Object) -> Rows:
    """Counts by their names without units, and the times of each statistic in milliseconds."""
    rows = {str(row.get("Percentiles")): _times_ms(row) for row in content.get("percentiles") or ()}
    counts = {key.split(" (")[0]: value for key, value in content.items()}
    completed = whole_of(counts, "Success Requests", "Succeed requests")
    absent = {}
    if completed and whole_of(counts, "Stream Requests") == 0:
        absent = dict.fromkeys(("ttft_ms", "tpot_ms", "itl_ms"), "the answers were not streamed")
    return [{**counts, **rows, "mean": _times_ms(content), "_absent": absent}]


def _times_ms(row: Object) -> dict[str, float]:
    found = {}
    for key, value in row.items():
        named = re.fullmatch(r"(?:Avg )?(.+) \((s|ms)\)", key)
        number = finite(value)
        if named and number is not None and number >= 0:
            found[_OLD_NAMES.get(named[1], named[1])] = number * in_ms(named[2])
    return found


_PREPARED: Mapping[str, Callable[[Object], Rows]] = {
    "sglang": _of_sglang,
    "aiperf": _of_aiperf,
    "inferencex": _of_inferencex,
    "guidellm": _of_guidellm,
    "genai-bench": _of_genai_bench,
    "llm-d": _of_llm_d,
    "evalscope": _of_evalscope,
}


def summary_of(tool: str) -> Summary:
    """A tool's summary by its table."""
    prepare = _PREPARED.get(tool, lambda content: [content])
    return Summary(tool=tool, prepare=prepare, **tables()[tool])


def read_summary(tool: str, content: Object, load: Load | None) -> Imported:
    """The levels of one object of a tool's file; `load` overrides the file's own."""
    whole = summary_of(tool).read(content, load)
    records = vllm_records(content) if tool == "vllm" else ()  # saved in detail
    if not records:
        return whole
    found = whole.levels[0].level
    level = record_level(found.load, records, tool=tool, extra=found.imported)
    return replace(whole, levels=(level,))


def vllm_records(content: Object) -> list[RequestRecord]:
    """The requests of `vllm bench serve --save-detailed`; empty if start times are missing."""
    names = ("start_times", "ttfts", "itls", "input_lens", "output_lens")
    columns: list[list[Any]] = [content.get(name) or [] for name in names]
    if not all(columns):
        return []
    errors, records = content.get("errors") or [""] * len(columns[0]), []
    for number, row in enumerate(zip(*columns, errors, strict=True)):
        start_s, ttft_s, gaps_s, input_tokens, output_tokens, error = row
        failed = str(error or "no output") if error or not output_tokens else ""
        times = [] if failed else [start_s + at for at in accumulate(gaps_s, initial=ttft_s)]
        tokens = (input_tokens, output_tokens)
        records.append(request_record(number, start_s, times_s=times, tokens=tokens, error=failed))
    return records


def read_requests(tool: str, lines: Rows, load: Load) -> Imported:
    """One file in which the tool lists its requests, those of a warm-up left out."""
    if tool == "llmperf":
        return _read_llmperf(lines, load)
    read = {"aiperf": _aiperf_record, "llmeter": _llmeter_record}.get(tool, _inference_perf_record)
    phase, wanted = "metadata.benchmark_phase", (None, "profiling")
    measured = [line for line in lines if value_at(line, phase) in wanted]
    table = tables()[tool]
    asked, told = (table["requests"][side] for side in ("input_tokens", "output_tokens"))
    records = [
        read(number, line, (whole_of(line, *asked) or 0, whole_of(line, *told) or 0))
        for number, line in enumerate(measured)
    ]
    absent = dict(table.get("absent", {}))
    lengths = [(len(each.token_times_s), each.output_tokens) for each in records if each.ok]
    if tool == "aiperf" and any(times == 2 and tokens > 2 for times, tokens in lengths):
        absent["itl_ms"] = "the file has no gaps between chunks (inter_chunk_latency)"
    return Imported(tool, (record_level(load, records, tool=tool, missing_metrics=absent),))


def _aiperf_record(number: int, line: Object, tokens: tuple[int, int]) -> RequestRecord:
    metadata, metrics = line["metadata"], line.get("metrics") or {}
    sent_s = metadata["request_start_ns"] * 1e-9
    if line.get("error") or metadata.get("was_cancelled") or not metrics:
        message = str((line.get("error") or {}).get("message") or "cancelled")
        ended_ns = metadata.get("request_end_ns")
        ended_s = None if ended_ns is None else ended_ns * 1e-9
        return request_record(number, sent_s, error=message, ended_s=ended_s)

    def second_of(name: str) -> float:
        """Seconds per unit of a metric."""
        return in_ms(metrics[name].get("unit", "ms")) / 1e3

    ttft_s, e2e_s = (
        None if (value := number_of(metrics, f"{name}.value")) is None else value * second_of(name)
        for name in ("time_to_first_token", "request_latency")
    )
    if e2e_s is None:
        raise InputError(f"request {number} of the file has no request_latency")
    times: tuple[float, ...] = ()
    gaps = value_at(metrics, "inter_chunk_latency.value")
    if isinstance(gaps, list) and gaps and ttft_s is not None:
        scale = second_of("inter_chunk_latency")
        times = tuple(accumulate((gap * scale for gap in gaps), initial=sent_s + ttft_s))
    ended_s = sent_s + e2e_s
    return request_record(number, sent_s, times_s=times, ttft_s=ttft_s, ended_s=ended_s, tokens=tokens)


def _llmeter_record(number: int, line: Object, tokens: tuple[int, int]) -> RequestRecord:
    try:
        sent_s = datetime.fromisoformat(str(line.get("request_time"))).timestamp()
    except ValueError:
        raise InputError(
            f"response {number} has no request_time that can be read (ISO 8601), got {line.get('request_time')!r}"
        ) from None
    e2e_s = number_of(line, "time_to_last_token")
    return request_record(
        number,
        sent_s,
        ttft_s=number_of(line, "time_to_first_token"),
        ended_s=None if e2e_s is None else sent_s + e2e_s,
        tokens=tokens,
        error=str(line.get("error") or ("no answer" if e2e_s is None else "")),
    )


def _read_llmperf(lines: Rows, load: Load) -> Imported:
    """The `_individual_responses.json` of one llmperf run: latencies, and no timeline."""
    answered = [line for line in lines if line.get("error_code") is None]
    ttft_s, e2e_s = (
        [value for line in answered if (value := number_of(line, f"{name}_s")) is not None]
        for name in ("ttft", "end_to_end_latency")
    )
    tokens = {
        f"{side}_tokens": sum(whole_of(line, f"number_{side}_tokens") or 0 for line in answered)
        for side in ("input", "output")
    }
    level = summary_level(
        load,
        tool="llmperf",
        numbers={"requests": len(lines), "errors": len(lines) - len(answered), **tokens},
        latencies={
            "ttft_ms": summarise_ms(ttft_s).to_json(),
            "e2e_ms": summarise_ms(e2e_s).to_json(),
            **{key: missing(why) for key, why in tables()["llmperf"]["absent"].items()},
        },
    )
    notes = ("llmperf's requests have no times of day: no duration and no throughput (its _summary.json has both)",)
    return Imported("llmperf", (ImportedLevel(level),), notes=notes)


def _inference_perf_record(number: int, line: Object, tokens: tuple[int, int]) -> RequestRecord:
    sent_s, ended_s = float(line["start_time"]), float(line["end_time"])
    info = line.get("info") or {}
    got = info.get("response_metrics") or info  # flat in old versions
    error = line.get("error")
    message = error.get("error_msg") if isinstance(error, Mapping) else error
    times = tuple(float(at_s) for at_s in got.get("output_token_times") or ())
    why = str(message or "no output") if error or not tokens[1] else ""
    return request_record(number, sent_s, times_s=times, ended_s=ended_s, tokens=tokens, error=why)
