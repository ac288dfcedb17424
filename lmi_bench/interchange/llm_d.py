"""Levels as benchmark reports of llm-d, schema version 0.2, one for each level.

Units are written with each metric (ms, ms/token, tokens/s, queries/s, count). Source: the schema
`schema_v0_2.py` of llm-d/llm-d-benchmark (2026-08). A statistic that was not measured is left out.
The schema requires an accelerator, so the stack is described only where it is known.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

from lmi_bench import __version__
from lmi_bench.core.level import Level, Metric, Statistics
from lmi_bench.core.run_store import Run
from lmi_bench.interchange.tables import hardware, mean_lengths

REPORT_VERSION = "0.2"
_STATISTICS = {"mean": "mean", "std": "stddev", "min": "min", "p50": "p50", "p90": "p90",
               "p95": "p95", "p99": "p99", "max": "max"}  # fmt: skip
_LATENCIES: Mapping[str, tuple[Metric, str]] = {
    "time_to_first_token": ("ttft", "ms"),
    "normalized_time_per_output_token": ("latency_per_token", "ms/token"),
    "time_per_output_token": ("tpot", "ms/token"),
    "inter_token_latency": ("itl", "ms/token"),
    "request_latency": ("e2e", "ms"),
}


def llm_d_reports(run: Run) -> list[dict[str, Any]]:
    """A report for each level, in the order in which they ran."""
    return [_report(run, line, stage) for stage, line in enumerate(run.levels)]


def _report(run: Run, line: Level, stage: int) -> dict[str, Any]:
    experiment = _digest({"hash": run.manifest.scenario_hash, "folder": run.path.name})
    stack = _stack(run)
    return {
        "version": REPORT_VERSION,
        "run": {
            "uid": _digest([experiment, line.index, line.attempt]),
            "eid": experiment,
            "time": {"duration": f"PT{(line.wall_s or 0.0):.6f}S"},
        },
        "scenario": {**({"stack": stack} if stack else {}), **_load(run, line, stage)},
        "results": {"request_performance": {"aggregate": _aggregate(line)}},
    }


def _stack(run: Run) -> list[dict[str, Any]]:
    facts = hardware(run)
    if facts["accelerator"] is None or facts["n_accelerators"] is None or facts["model"] is None:
        return []
    target = run.manifest.target.to_json()
    return [
        {
            "metadata": {"label": "engine-0", "cfg_id": _digest(target)},
            "standardized": {
                "kind": "inference_engine",
                "tool": run.manifest.target.kind or "unknown",
                "tool_version": __version__,
                "role": "replica",
                "replicas": int(facts["instance_count"] or 1),
                "model": {"name": str(facts["model"])},
                "accelerator": {
                    "model": str(facts["accelerator"]),
                    "count": int(facts["n_accelerators"]),
                    "parallelism": {"dp": 1, "ep": 1, "pp": 1, "tp": int(facts["tp"] or 1)},
                },
            },
            "native": {"config": target},
        }
    ]


def _load(run: Run, line: Level, stage: int) -> dict[str, Any]:
    """The load section; empty if the prompt length, which the schema requires, is unknown."""
    scenario, content = run.manifest.scenario, run.manifest.scenario.to_json()
    input_tokens, output_tokens = mean_lengths(line)
    fixed = not scenario.workload.mix and not scenario.workload.dataset
    if input_tokens is None or input_tokens < 1:
        return {}
    standardized: dict[str, Any] = {
        "tool": run.manifest.imported_from or "lmi-bench",
        "tool_version": __version__,
        "source": "sampled" if scenario.workload.dataset else "random",
        "stage": stage,
    }
    for side, tokens in (("input", input_tokens), ("output", output_tokens)):
        if tokens is not None and tokens >= 1:
            length = {"distribution": "fixed" if fixed else "other", "value": tokens}
            standardized[f"{side}_seq_len"] = length
    loads = {"rate_qps": line.load.rate_per_s, "concurrency": line.load.concurrency}
    standardized |= {name: value for name, value in loads.items() if value is not None}
    metadata = {"cfg_id": _digest(content), "description": scenario.name}
    native = {"config": content}
    return {"load": {"metadata": metadata, "standardized": standardized, "native": native}}


def _aggregate(line: Level) -> dict[str, Any]:
    requests: dict[str, Any] = {"total": line.sent}
    if line.errors is not None:
        requests["failures"] = line.errors
    for name, mean in zip(("input_length", "output_length"), mean_lengths(line), strict=True):
        if mean is not None:
            requests[name] = {"units": "count", "mean": mean}
    latency = {
        name: found
        for name, (metric, units) in _LATENCIES.items()
        if (found := _statistics(line.of(metric), units)) is not None
    }
    total, output = (line.total_throughput_tokens_per_s, line.throughput_tokens_per_s)
    rates = {
        "input_token_rate": None if total is None or output is None else total - output,
        "output_token_rate": output,
        "total_token_rate": total,
        "request_rate": line.request_throughput_per_s,
    }
    throughput = {
        name: {"units": "queries/s" if name == "request_rate" else "tokens/s", "mean": value}
        for name, value in rates.items()
        if value is not None
    }
    return {"requests": requests, "latency": latency, "throughput": throughput}


def _statistics(found: Statistics, units: str) -> dict[str, Any] | None:
    """The schema requires a mean: None for a metric without one."""
    if found.mean is None:
        return None
    kept = {
        theirs: float(value)
        for ours, theirs in _STATISTICS.items()
        if (value := found.value(ours)) is not None and math.isfinite(value)
    }
    return {"units": units, **kept}


def _digest(content: Any) -> str:
    text = json.dumps(content, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]
