"""Reads files in which a tool lists its requests; times in seconds since any common start.

llmperf's requests have no times of day; llmeter's and inference-perf's are seconds, AIPerf's
nanoseconds with a unit at each metric.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from itertools import accumulate
from typing import Any

from lmi_bench.analysis.results.latency import summarise_ms
from lmi_bench.core.errors import InputError
from lmi_bench.core.load import Load
from lmi_bench.core.records import RequestRecord
from lmi_bench.interchange.imports.level import (
    Imported,
    ImportedLevel,
    in_ms,
    missing,
    number_of,
    record_level,
    request_record,
    summary_level,
    value_at,
    whole_of,
)
from lmi_bench.interchange.imports.summary import tables

Lines = Sequence[Mapping[str, Any]]


def vllm_records(content: Mapping[str, Any]) -> list[RequestRecord]:
    """The requests of `vllm bench serve --save-detailed`; empty if start times are missing."""
    names = ("start_times", "ttfts", "itls", "input_lens", "output_lens")
    columns: list[list[Any]] = [content.get(name) or [] for name in names]
    if not all(columns):
        return []
    errors = content.get("errors") or [""] * len(columns[0])
    return [
        _vllm_record(number, row) for number, row in enumerate(zip(*columns, errors, strict=True))
    ]


def _vllm_record(number: int, row: Sequence[Any]) -> RequestRecord:
    start_s, ttft_s, gaps_s, input_tokens, output_tokens, error = row
    tokens = (input_tokens, output_tokens)
    if error or not output_tokens:
        return request_record(number, start_s, tokens=tokens, error=str(error or "no output"))
    times = tuple(start_s + at for at in accumulate(gaps_s, initial=ttft_s))
    return request_record(number, start_s, times_s=times, tokens=tokens)


def read_requests(tool: str, lines: Lines, load: Load) -> Imported:
    """One file in which the tool lists its requests, those of a warm-up left out."""
    if tool == "llmperf":
        return _read_llmperf(lines, load)
    read = {"aiperf": _aiperf_record, "llmeter": _llmeter_record}.get(tool, _inference_perf_record)
    phases = (value_at(line, "metadata.benchmark_phase") for line in lines)
    measured = [
        line for line, phase in zip(lines, phases, strict=True) if phase in (None, "profiling")
    ]
    records = [read(number, line) for number, line in enumerate(measured)]
    absent = dict(tables()[tool].get("absent", {}))
    lengths = [(len(each.token_times_s), each.output_tokens) for each in records if each.ok]
    if tool == "aiperf" and any(times == 2 and tokens > 2 for times, tokens in lengths):
        absent["itl_ms"] = "the file has no gaps between chunks (inter_chunk_latency)"
    return Imported(tool, (record_level(load, records, tool=tool, missing_metrics=absent),))


def _aiperf_record(number: int, line: Mapping[str, Any]) -> RequestRecord:
    metadata, metrics = line["metadata"], line.get("metrics") or {}
    sent_s = metadata["request_start_ns"] * 1e-9
    if line.get("error") or metadata.get("was_cancelled") or not metrics:
        message = str((line.get("error") or {}).get("message") or "cancelled")
        ended_ns = metadata.get("request_end_ns")
        ended_s = None if ended_ns is None else ended_ns * 1e-9
        return request_record(number, sent_s, error=message, ended_s=ended_s)
    ttft_s, e2e_s = (
        None
        if (value := number_of(metrics, f"{name}.value")) is None
        else value * _unit_s(metrics[name])
        for name in ("time_to_first_token", "request_latency")
    )
    if e2e_s is None:
        raise InputError(f"request {number} of the file has no request_latency")
    output_tokens, input_tokens = (
        round(next((n for name in names if (n := number_of(metrics, f"{name}.value"))), 0))
        for names in (("output_sequence_length", "output_token_count"), ("input_sequence_length",))
    )
    times: tuple[float, ...] = ()
    gaps = metrics.get("inter_chunk_latency") or {}
    if isinstance(gaps.get("value"), list) and gaps["value"] and ttft_s is not None:
        scale = _unit_s(gaps)
        times = tuple(accumulate((gap * scale for gap in gaps["value"]), initial=sent_s + ttft_s))
    return request_record(
        number,
        sent_s,
        times_s=times,
        ttft_s=ttft_s,
        ended_s=sent_s + e2e_s,
        tokens=(input_tokens, output_tokens),
    )


def _unit_s(metric: Mapping[str, Any]) -> float:
    return in_ms(metric.get("unit", "ms")) / 1e3


def _llmeter_record(number: int, line: Mapping[str, Any]) -> RequestRecord:
    try:
        sent_s = datetime.fromisoformat(str(line.get("request_time"))).timestamp()
    except ValueError:
        raise InputError(
            f"response {number} has no request_time that can be read (ISO 8601), got "
            f"{line.get('request_time')!r}"
        ) from None
    e2e_s = number_of(line, "time_to_last_token")
    return request_record(
        number,
        sent_s,
        ttft_s=number_of(line, "time_to_first_token"),
        ended_s=None if e2e_s is None else sent_s + e2e_s,
        tokens=(whole_of(line, "num_tokens_input") or 0, whole_of(line, "num_tokens_output") or 0),
        error=str(line.get("error") or ("no answer" if e2e_s is None else "")),
    )


def _read_llmperf(lines: Lines, load: Load) -> Imported:
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
    notes = (
        "llmperf's requests have no times of day: no duration and no throughput (its _summary.json "
        "has both)",
    )
    return Imported("llmperf", (ImportedLevel(level),), notes=notes)


def _inference_perf_record(number: int, line: Mapping[str, Any]) -> RequestRecord:
    sent_s, ended_s = float(line["start_time"]), float(line["end_time"])
    info = line.get("info") or {}
    asked = (info.get("request_metrics") or {}).get("text") or info  # flat in old versions
    got = info.get("response_metrics") or info
    input_tokens = whole_of(asked, "input_tokens") or 0
    output_tokens = whole_of(
        {**got, **(got.get("server_usage") or {})}, "completion_tokens", "output_tokens"
    )
    error = line.get("error")
    message = error.get("error_msg") if isinstance(error, Mapping) else error
    times = tuple(float(at_s) for at_s in got.get("output_token_times") or ())
    return request_record(
        number,
        sent_s,
        times_s=times,
        ended_s=ended_s,
        tokens=(input_tokens, output_tokens or 0),
        error=str(message or "no output") if error or not output_tokens else "",
    )
