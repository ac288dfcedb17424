"""Results of llmeter and of llmperf, whose own units are seconds.

llmperf's `inter_token_latency_s` contains the TTFT and divides by chunks, so it is neither ITL nor
TPOT and is left out; its duration follows from the completed requests by minute.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from lmi_bench.errors import InputError
from lmi_bench.interchange.imports.level import (
    Imported,
    ImportedLevel,
    Load,
    failed_record,
    missing,
    number_of,
    record_level,
    statistics,
    summary_line,
    two_event_record,
    whole_of,
)

_LLMPERF_ITL = "llmperf's inter-token latency contains the TTFT and divides by chunks"


def is_llmperf(content: Mapping[str, Any]) -> bool:
    """Whether an object is a `_summary.json` of llmperf."""
    return "results_ttft_s_mean" in content or (
        "num_concurrent_requests" in content and "results_number_errors" in content
    )


def is_llmeter_line(content: Mapping[str, Any]) -> bool:
    """Whether an object is a line of llmeter's responses.jsonl."""
    return "time_to_last_token" in content and "num_tokens_output" in content


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
        load or Load(concurrency=whole_of(content, "num_concurrent_requests")),
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
    absent = {"itl_ms": "llmeter keeps first and last token only"}
    level = record_level(load, records, tool="llmeter", missing_metrics=absent)
    return Imported("llmeter", (level,))


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
