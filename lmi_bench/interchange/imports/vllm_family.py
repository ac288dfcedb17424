"""Results of `vllm bench serve`, SGLang's bench_serving, and InferenceX, which share their names.

TPOT is (E2E - TTFT) / (n - 1) and ITL the gap between streamed items, as with us. SGLang divides
its gaps by the accepted draft length, and writes 0 where it measured nothing. InferenceX gives
seconds, and throughput by GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import Any

from lmi_bench.core.exchange import Exchange
from lmi_bench.core.load import Load
from lmi_bench.core.records import RequestRecord
from lmi_bench.interchange.imports.level import (
    Imported,
    ImportedLevel,
    Statistics,
    failed_record,
    missing,
    number_of,
    record_level,
    stated_load,
    statistics,
    summary_line,
    whole_of,
)

_KEYS = {"ttft": "ttft_ms", "tpot": "tpot_ms", "itl": "itl_ms", "e2el": "e2e_ms"}
_NAMES = {"mean": "mean", "p50": "median", "std": "std", "p90": "p90", "p95": "p95", "p99": "p99"}
_ZERO = "0 in the file, which the tool writes where it measured nothing"


def is_vllm(content: Mapping[str, Any]) -> bool:
    """Whether an object is a result of `vllm bench serve`."""
    return isinstance(content.get("request_throughput"), int | float) and (
        "total_token_throughput" in content or "num_prompts" in content
    )


def is_sglang(content: Mapping[str, Any]) -> bool:
    """Whether an object is a line of SGLang's bench_serving."""
    return "request_throughput" in content and (
        "random_range_ratio" in content or "mean_e2e_latency_ms" in content
    )


def is_inferencex(content: Mapping[str, Any]) -> bool:
    """Whether an object is an aggregate of InferenceX (InferenceMAX)."""
    return "tput_per_gpu" in content and "conc" in content


def read_vllm(content: Mapping[str, Any], load: Load | None) -> Imported:
    """One run of `vllm bench serve --save-result`, with its requests if saved in detail."""
    load = load or _load(content)
    completed = whole_of(content, "completed")
    sent = whole_of(content, "num_prompts")
    failed = whole_of(content, "failed")
    if failed is None and sent is not None and completed is not None:
        failed = sent - completed
    extra = {
        name: content[key]
        for name, key in (
            ("request_goodput", "request_goodput"),
            ("request_goodput", "request_goodput:"),  # some versions wrote the colon
            ("burstiness", "burstiness"),
            ("max_output_tokens_per_s", "max_output_tokens_per_s"),
        )
        if content.get(key) is not None
    }
    records = _vllm_records(content)
    if records:
        level = record_level(load, records, tool="vllm", extra=extra)
    else:
        latencies = {
            key: statistics(_values(content, name), n=completed if name != "itl" else None)
            for name, key in _KEYS.items()
        }
        line = summary_line(
            load,
            tool="vllm",
            requests=None if completed is None else completed + (failed or 0),
            errors=failed,
            input_tokens=number_of(content, "total_input_tokens"),
            output_tokens=number_of(content, "total_output_tokens"),
            wall_s=number_of(content, "duration"),
            throughput=number_of(content, "output_throughput"),
            total_throughput=number_of(content, "total_token_throughput"),
            request_throughput=number_of(content, "request_throughput"),
            latencies=latencies,
            extra=extra,
        )
        level = ImportedLevel(line)
    facts = {
        "model": content.get("model_id"),
        "back_end": content.get("backend") or content.get("endpoint_type"),
    }
    return Imported("vllm", (level,), facts=facts)


def read_sglang(content: Mapping[str, Any], load: Load | None) -> Imported:
    """One line of `sglang.bench_serving --output-file`."""
    load = load or _load(content)
    completed = whole_of(content, "completed")
    accepted = number_of(content, "accept_length")
    latencies: dict[str, Statistics] = {}
    for name, key in {**_KEYS, "e2e_latency": "e2e_ms"}.items():
        if name == "e2el":
            continue
        values = _values(content, name)
        if values.get("mean") == 0:
            latencies[key] = missing(_ZERO)
        elif name == "itl" and accepted is not None and accepted > 1:
            latencies[key] = missing(
                f"the file's ITL is divided by the accepted draft length {accepted:g}"
            )
        else:
            latencies[key] = statistics(values, n=completed if name != "itl" else None)
    line = summary_line(
        load,
        tool="sglang",
        requests=completed,
        errors=None,
        input_tokens=number_of(content, "total_input_tokens"),
        output_tokens=number_of(content, "total_output_tokens"),
        wall_s=number_of(content, "duration"),
        throughput=number_of(content, "output_throughput"),
        total_throughput=number_of(content, "total_throughput", "total_token_throughput"),
        request_throughput=number_of(content, "request_throughput"),
        latencies=latencies,
        extra={"measured_concurrency": number_of(content, "concurrency")},
    )
    workload = _fixed(
        content, "random_input_len", "random_output_len", number_of(content, "random_range_ratio")
    )
    notes = ("failed requests are not in the file",)
    facts = {"back_end": content.get("backend")}
    return Imported("sglang", (ImportedLevel(line),), facts=facts, workload=workload, notes=notes)


def read_inferencex(content: Mapping[str, Any], load: Load | None) -> Imported:
    """One `agg_*.json` of InferenceX; throughput is by GPU, so it is multiplied by the GPUs."""
    degrees = [whole_of(content, name) or 1 for name in ("tp", "pp")]
    gpus = degrees[0] * degrees[1]
    several_nodes = str(content.get("is_multinode")).lower() == "true"
    disaggregated = str(content.get("disagg")).lower() == "true"
    known = not several_nodes and not disaggregated

    def of_all(name: str) -> float | None:
        by_gpu = number_of(content, name)
        return by_gpu * gpus if by_gpu is not None and known else None

    latencies = {
        key: statistics(
            {
                ours: None if value is None else value * 1000
                for ours, theirs in _NAMES.items()
                for value in [number_of(content, f"{theirs}_{name}")]
            },
            n=None,
        )
        for name, key in _KEYS.items()
    }
    line = summary_line(
        load or stated_load(concurrency=whole_of(content, "conc")),
        tool="inferencex",
        requests=None,
        errors=None,
        throughput=of_all("output_tput_per_gpu"),
        total_throughput=of_all("tput_per_gpu"),
        latencies=latencies,
        extra={
            name: content[name]
            for name in ("tput_per_gpu", "output_tput_per_gpu", "joules_per_output_token")
            if name in content
        },
    )
    notes = () if known else ("GPUs of several nodes are not told apart: no throughput in total",)
    facts = {
        "model": content.get("model") or content.get("infmax_model_prefix"),
        "accelerator": content.get("hw"),
        "n_accelerators": gpus if known else None,
        "tensor_parallel": degrees[0],
        "dtype": content.get("precision"),
        "back_end": content.get("framework"),
    }
    workload = _fixed(content, "isl", "osl", 1.0)
    return Imported("inferencex", (ImportedLevel(line),), facts, workload, notes)


def _load(content: Mapping[str, Any]) -> Load:
    """A finite rate is an open loop; else the users, or all prompts at once."""
    rate = number_of(content, "request_rate")  # "inf" and Infinity are no finite number
    if rate is not None:
        return stated_load(rate_per_s=rate)
    return stated_load(concurrency=whole_of(content, "max_concurrency", "num_prompts", "completed"))


def _values(content: Mapping[str, Any], name: str) -> dict[str, float | None]:
    return {ours: number_of(content, f"{theirs}_{name}_ms") for ours, theirs in _NAMES.items()}


def _vllm_records(content: Mapping[str, Any]) -> list[RequestRecord]:
    """Requests of `--save-detailed`; none where the start times are missing."""
    names = ("start_times", "ttfts", "itls", "input_lens", "output_lens")
    columns: list[list[Any]] = [content.get(name) or [] for name in names]
    if not all(columns):
        return []
    errors = content.get("errors") or [""] * len(columns[0])
    records = []
    rows = zip(*columns, errors, strict=True)
    for number, (start, ttft, gaps, input_tokens, output_tokens, error) in enumerate(rows):
        if error or not output_tokens:
            reason = str(error) or "no output"
            records.append(
                failed_record(number, sent_s=start, error=reason, input_tokens=input_tokens)
            )
            continue
        times = tuple(start + at for at in accumulate(gaps, initial=ttft))
        records.append(
            RequestRecord(
                number,
                start,
                Exchange(start, times),
                input_tokens=input_tokens,
                output_tokens=output_tokens,
            )
        )
    return records


def _fixed(
    content: Mapping[str, Any], input_name: str, output_name: str, ratio: float | None
) -> dict[str, Any]:
    lengths = (whole_of(content, input_name), whole_of(content, output_name))
    if None in lengths or ratio != 1:
        return {}
    return {"input_tokens": lengths[0], "output_tokens": lengths[1]}
