"""Results of llmeter, llmperf and inference-perf that list requests, and the first two's summaries.

Their times are seconds. llmperf's `inter_token_latency_s` contains the TTFT and divides by chunks,
so it is neither ITL nor TPOT and is left out; its duration follows from the completed requests by
minute, and its requests have no times of day. llmeter's `time_per_output_token` is our TPOT.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from lmi_bench.analysis.results.latency import summarise_ms
from lmi_bench.core.errors import InputError
from lmi_bench.core.exchange import Exchange
from lmi_bench.core.load import Load
from lmi_bench.core.records import RequestRecord
from lmi_bench.interchange.imports.level import (
    Imported,
    ImportedLevel,
    failed_record,
    missing,
    number_of,
    record_level,
    stated_load,
    statistics,
    summary_line,
    two_event_record,
    whole_of,
)

_NO_GAPS = "llmeter keeps first and last token only"
_LLMPERF_ITL = "llmperf's inter-token latency contains the TTFT and divides by chunks"


def is_llmperf(content: Mapping[str, Any]) -> bool:
    """Whether an object is a `_summary.json` of llmperf."""
    return "results_ttft_s_mean" in content or (
        "num_concurrent_requests" in content and "results_number_errors" in content
    )


def is_llmeter_line(content: Mapping[str, Any]) -> bool:
    """Whether an object is a line of llmeter's responses.jsonl."""
    return "time_to_last_token" in content and "num_tokens_output" in content


def is_llmeter_summary(content: Mapping[str, Any]) -> bool:
    """Whether an object is a stats.json or summary.json of llmeter."""
    return {"clients", "total_requests", "total_test_time"} <= content.keys()


def is_llmperf_request(content: Mapping[str, Any]) -> bool:
    """Whether an object is a request of llmperf's `_individual_responses.json`."""
    return "error_code" in content and "request_output_throughput_token_per_s" in content


def is_inference_perf_request(content: Mapping[str, Any]) -> bool:
    """Whether an object is a request of inference-perf's per_request_lifecycle_metrics.json."""
    return {"start_time", "end_time", "info"} <= content.keys()


def llmeter_load(content: Mapping[str, Any]) -> Load:
    """What a summary.json of llmeter says of how it was measured."""
    return stated_load(concurrency=whole_of(content, "clients"))


def llmperf_load(content: Mapping[str, Any]) -> Load:
    """What a `_summary.json` of llmperf says of how it was measured."""
    return stated_load(concurrency=whole_of(content, "num_concurrent_requests"))


def read_llmperf(content: Mapping[str, Any], load: Load | None) -> Imported:
    """One summary of llmperf."""
    completed = whole_of(content, "results_num_completed_requests")
    errors = whole_of(content, "results_number_errors") or 0
    by_minute = number_of(content, "results_num_completed_requests_per_min")
    wall_s = None if not by_minute or completed is None else completed / by_minute * 60
    tokens = [
        None if mean is None or completed is None else mean * completed
        for name in ("number_input_tokens", "number_output_tokens")
        for mean in [number_of(content, f"results_{name}_mean")]
    ]
    line = summary_line(
        load or stated_load(concurrency=whole_of(content, "num_concurrent_requests")),
        tool="llmperf",
        requests=None if completed is None else completed + errors,
        errors=errors,
        input_tokens=tokens[0],
        output_tokens=tokens[1],
        wall_s=wall_s,
        throughput=number_of(content, "results_mean_output_throughput_token_per_s"),
        request_throughput=None if by_minute is None else by_minute / 60,
        latencies={
            "ttft_ms": _llmperf(content, "ttft_s", completed),
            "e2e_ms": _llmperf(content, "end_to_end_latency_s", completed),
            "itl_ms": missing(_LLMPERF_ITL),
            "tpot_ms": missing(_LLMPERF_ITL),
        },
    )
    notes = ("tokens are counted with a Llama 2 tokenizer, whatever the model",)
    return Imported("llmperf", (ImportedLevel(line),), {"model": content.get("model")}, {}, notes)


def read_llmeter(lines: Sequence[Mapping[str, Any]], load: Load | None) -> Imported:
    """The responses.jsonl of one llmeter run; times are the requests' own, to the file's digits."""
    if load is None:
        raise InputError(
            "responses.jsonl does not say how many clients there were: give --concurrency N"
        )
    records = []
    for number, line in enumerate(lines):
        sent_s = _epoch_s(line.get("request_time"), number)
        e2e_s = number_of(line, "time_to_last_token")
        if line.get("error") or e2e_s is None:
            records.append(
                failed_record(number, sent_s=sent_s, error=str(line.get("error") or "no answer"))
            )
            continue
        records.append(
            two_event_record(
                number,
                sent_s=sent_s,
                ttft_s=number_of(line, "time_to_first_token"),
                e2e_s=e2e_s,
                input_tokens=whole_of(line, "num_tokens_input") or 0,
                output_tokens=whole_of(line, "num_tokens_output") or 0,
            )
        )
    absent = {"itl_ms": _NO_GAPS}
    level = record_level(load, records, tool="llmeter", missing_metrics=absent)
    return Imported("llmeter", (level,))


def read_llmeter_summary(content: Mapping[str, Any], load: Load | None) -> Imported:
    """The stats.json of one llmeter run; its summary.json counts only."""
    if "time_to_last_token-average" not in content:
        raise InputError(
            "llmeter's summary.json holds no latencies: import stats.json or responses.jsonl, "
            "which lie beside it"
        )
    requests, failed = whole_of(content, "total_requests"), whole_of(content, "failed_requests")
    completed = None if requests is None else requests - (failed or 0)
    wall_s = number_of(content, "total_test_time")
    tokens = [number_of(content, f"total_{side}_tokens") for side in ("input", "output")]

    def per_s(amount: float | None) -> float | None:
        return None if amount is None or not wall_s else amount / wall_s

    line = summary_line(
        load or llmeter_load(content),
        tool="llmeter",
        requests=requests,
        errors=failed,
        input_tokens=tokens[0],
        output_tokens=tokens[1],
        wall_s=wall_s,
        throughput=per_s(tokens[1]),
        total_throughput=per_s(None if None in tokens else sum(t or 0 for t in tokens)),
        request_throughput=per_s(completed),
        latencies={
            "ttft_ms": _llmeter(content, "time_to_first_token", completed),
            "tpot_ms": _llmeter(content, "time_per_output_token", completed),
            "e2e_ms": _llmeter(content, "time_to_last_token", completed),
            "itl_ms": missing(_NO_GAPS),
        },
    )
    return Imported("llmeter", (ImportedLevel(line),), {"model": content.get("model_id")})


def read_llmperf_requests(lines: Sequence[Mapping[str, Any]], load: Load | None) -> Imported:
    """The `_individual_responses.json` of one llmperf run: latencies, and no timeline."""
    if load is None:
        raise InputError(
            "the requests do not say how many there were at once: give --concurrency N"
        )
    answered = [line for line in lines if line.get("error_code") is None]
    errors = len(lines) - len(answered)
    ttft_s, e2e_s = (
        [value for line in answered if (value := number_of(line, f"{name}_s")) is not None]
        for name in ("ttft", "end_to_end_latency")
    )
    tokens = [
        sum(whole_of(line, f"number_{side}_tokens") or 0 for line in answered)
        for side in ("input", "output")
    ]
    line = summary_line(
        load,
        tool="llmperf",
        requests=len(lines),
        errors=errors,
        input_tokens=tokens[0],
        output_tokens=tokens[1],
        latencies={
            "ttft_ms": summarise_ms(ttft_s).to_json(),
            "e2e_ms": summarise_ms(e2e_s).to_json(),
            "itl_ms": missing(_LLMPERF_ITL),
            "tpot_ms": missing(_LLMPERF_ITL),
        },
    )
    notes = (
        "llmperf's requests have no times of day: no duration and no throughput (its _summary.json "
        "has both)",
    )
    return Imported("llmperf", (ImportedLevel(line),), notes=notes)


def read_inference_perf_requests(lines: Sequence[Mapping[str, Any]], load: Load | None) -> Imported:
    """One per_request_lifecycle_metrics.json; its times are of one clock, whose zero is any."""
    if load is None:
        raise InputError(
            "the requests do not say under which load they were sent: give --rate R or "
            "--concurrency N"
        )
    records = [_inference_perf_record(number, line) for number, line in enumerate(lines)]
    return Imported("inference-perf", (record_level(load, records, tool="inference-perf"),))


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
    if error or not output_tokens:
        said = error.get("error_msg") if isinstance(error, Mapping) else error
        reason = str(said or "no output")
        return failed_record(
            number, sent_s=sent_s, error=reason, input_tokens=input_tokens, ended_s=ended_s
        )
    times = [float(at_s) for at_s in got.get("output_token_times") or ()]
    return RequestRecord(
        number,
        sent_s,
        Exchange(
            sent_s,
            tuple(times) or (ended_s,),
            () if times else (output_tokens,),
            ended_s=ended_s,
            streamed=bool(times),
        ),
        input_tokens=input_tokens,
        output_tokens=output_tokens,
    )


def _llmeter(content: Mapping[str, Any], name: str, n: int | None) -> dict[str, Any]:
    fields = {"mean": "average", "p50": "p50", "p90": "p90", "p99": "p99"}
    values = {
        ours: None if value is None else value * 1e3
        for ours, theirs in fields.items()
        for value in [number_of(content, f"{name}-{theirs}")]
    }
    return statistics(values, n=n)


def _llmperf(content: Mapping[str, Any], name: str, n: int | None) -> dict[str, Any]:
    fields = {
        "mean": "mean", "std": "stddev", "min": "min", "max": "max",
        **{p: f"quantiles_{p}" for p in ("p50", "p90", "p95", "p99")},
    }  # fmt: skip
    values = {
        ours: None if value is None else value * 1e3
        for ours, theirs in fields.items()
        for value in [number_of(content, f"results_{name}_{theirs}")]
    }
    return statistics(values, n=n)


def _epoch_s(text: Any, number: int) -> float:
    try:
        return datetime.fromisoformat(str(text)).timestamp()
    except ValueError:
        raise InputError(
            f"response {number} has no request_time that can be read (ISO 8601), got {text!r}"
        ) from None
