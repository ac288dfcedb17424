"""Writes a run for other programs: CSV or Parquet tables, one JSON file, or llm-d reports.

Units are written with each metric (ms, ms/token, tokens/s, queries/s, count). Source: the schema
`schema_v0_2.py` of llm-d/llm-d-benchmark (2026-08). A statistic that was not measured is left out.
The schema requires an accelerator, so the stack is described only where it is known.

The level table begins with the columns of the published benchmark tables, so that measured and
published rows can be stacked; every further column has its unit in its name.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import pandas as pd
import yaml

from lmi_bench import __version__
from lmi_bench.analysis.results.latency import request_latency
from lmi_bench.catalog.instances import find_instance
from lmi_bench.core.errors import InputError
from lmi_bench.core.level import LATENCY_KEY, STATISTICS, Level, Metric, Statistics
from lmi_bench.core.run_store import Run
from lmi_bench.core.units import s_to_ms

PUBLISHED_COLUMNS = (
    *("model", "instance", "accelerator", "n_accelerators", "tp", "instance_count"),
    *("total_tokens", "input_tokens", "output_tokens", "concurrency"),
    *("throughput_tokens_per_s", "latency_ms_per_token", "table"),
)
_COPIED_FIELDS = (
    *("valid", "stopped_by", "requests", "errors", "wall_s"),
    *("total_throughput_tokens_per_s", "request_throughput_per_s"),
)
_METRICS: tuple[Metric, ...] = (
    "ttft", "ttft_from_sent", "dispatch_delay", "itl", "tpot", "e2e", "e2e_from_sent",
    "latency_per_token",
)  # fmt: skip


def level_table(run: Run) -> pd.DataFrame:
    """One row per level. A level that was cut short keeps its row, without throughput or latency.

    latency_ms_per_token  is the p90, as in the published tables; the other statistics follow
    """
    return pd.DataFrame([_level_row(run, line) for line in run.levels])


def request_table(run: Run) -> pd.DataFrame:
    """One row per sent request; times are seconds since its level's start."""
    rows = []
    for line, records in zip(run.levels, run.records, strict=True):
        open_loop = line.load.is_open
        for record in records:
            latency = request_latency(record, open_loop=open_loop) if record.ok else None
            times = record.token_times_s
            rows.append(
                {
                    "level": line.index,
                    "attempt": line.attempt,
                    "concurrency": line.load.concurrency,
                    "rate_per_s": line.load.rate_per_s,
                    "request_id": record.request_id,
                    "at_start": record.at_start,
                    "status": record.status,
                    "finish_reason": record.exchange.finish_reason,
                    "due_s": record.due_s,
                    "sent_s": record.sent_s,
                    "first_token_s": times[0] if len(times) else None,
                    "last_token_s": times[-1] if len(times) else None,
                    "ended_s": record.ended_s,
                    "input_tokens": record.input_tokens,
                    "output_tokens": record.output_tokens,
                    "ttft_ms": _ms(latency.ttft_s if latency else None),
                    "tpot_ms": _ms(latency.tpot_s if latency else None),
                    "e2e_ms": _ms(latency.e2e_s if latency else None),
                    "latency_ms_per_token": _ms(latency.latency_s_per_token if latency else None),
                    "error": record.error,
                }
            )
    return pd.DataFrame(rows)


def hardware(run: Run) -> dict[str, Any]:
    """The machine, from the run's manifest and the catalog; None for unknown facts."""
    facts = run.manifest.target
    instance, accelerator, number = facts.instance, facts.accelerator, facts.n_accelerators
    if instance is not None:
        try:
            known = find_instance(instance)
        except InputError:  # not in the catalog: only the run's own facts are known
            known = None
        if known is not None:
            accelerator = accelerator or known.accelerator.name
            number = number or known.num_accelerators
    return {
        "model": run.manifest.model or None,
        "instance": instance,
        "accelerator": accelerator,
        "n_accelerators": number,
        "tp": facts.tensor_parallel,
        "instance_count": None if instance is None else facts.instances or 1,
    }


def mean_lengths(line: Level) -> tuple[float | None, float | None]:
    """Mean prompt and output length of a level's completed requests, in tokens."""
    if line.completed <= 0:
        return None, None
    tokens = (line.input_tokens, line.output_tokens)
    mean = [None if total is None else total / line.completed for total in tokens]
    return mean[0], mean[1]


def _level_row(run: Run, line: Level) -> dict[str, Any]:
    input_tokens, output_tokens = mean_lengths(line)
    whole = not line.is_cut_short
    row: dict[str, Any] = {
        **hardware(run),
        "total_tokens": None
        if input_tokens is None or output_tokens is None
        else input_tokens + output_tokens,
        "input_tokens": input_tokens,
        "output_tokens": output_tokens,
        "concurrency": line.load.concurrency,
        "throughput_tokens_per_s": line.throughput_tokens_per_s if whole else None,
        "latency_ms_per_token": line.of("latency_per_token").p90 if whole else None,
        "table": run.manifest.imported_from or "lmi-bench",
        "run": run.path.name,
        "level": line.index,
        "attempt": line.attempt,
        "rate_per_s": line.load.rate_per_s,
        **{name: getattr(line, name) for name in _COPIED_FIELDS},
        "steady_throughput_tokens_per_s": line.steady.throughput_tokens_per_s,
        "mean_concurrency": line.mean_concurrency,
    }
    for metric in _METRICS:
        name, unit = LATENCY_KEY[metric].split("_ms", 1)
        for statistic in STATISTICS:
            row[f"{name}_{statistic}_ms{unit}"] = line.of(metric).value(statistic)
    return row


def _ms(value_s: float | None) -> float | None:
    return None if value_s is None else s_to_ms(value_s)


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
        "input_seq_len": _length(input_tokens, fixed=fixed),
    }
    if output_tokens is not None and output_tokens >= 1:
        standardized["output_seq_len"] = _length(output_tokens, fixed=fixed)
    if line.load.rate_per_s is not None:
        standardized["rate_qps"] = line.load.rate_per_s
    if line.load.concurrency is not None:
        standardized["concurrency"] = line.load.concurrency
    metadata = {"cfg_id": _digest(content), "description": scenario.name}
    native = {"config": content}
    return {"load": {"metadata": metadata, "standardized": standardized, "native": native}}


def _length(tokens: float, *, fixed: bool) -> dict[str, Any]:
    return {"distribution": "fixed" if fixed else "other", "value": tokens}


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


ExportFormat = Literal["csv", "parquet", "json", "llm-d"]
EXPORT_FORMATS: tuple[ExportFormat, ...] = get_args(ExportFormat)


def export_run(run: Run, export_format: ExportFormat, folder: Path) -> list[Path]:
    """Write a run into a folder, created if missing; returns the files.

    csv, parquet  two tables: levels and requests
    json          run.json: manifest, levels, knees and the result of a search
    llm-d         level-N.yaml: one benchmark report 0.2 per level
    Raises InputError where the run has no level, a file cannot be written or pyarrow is missing.
    """
    if not run.levels:
        raise InputError(f"{run.path} has no finished level: there is nothing to export")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        match export_format:
            case "json":
                return [_write_json(run, folder)]
            case "llm-d":
                return _write_llm_d(run, folder)
        return _write_tables(run, folder, export_format)
    except OSError as exc:
        raise InputError(f"cannot write into {folder}: {exc.strerror}") from exc


def _write_tables(run: Run, folder: Path, export_format: Literal["csv", "parquet"]) -> list[Path]:
    files = []
    for name, table in (("levels", level_table(run)), ("requests", request_table(run))):
        if table.empty:
            continue
        path = folder / f"{name}.{export_format}"
        try:
            if export_format == "csv":
                table.to_csv(path, index=False)
            else:
                table.to_parquet(path, index=False)
        except ImportError as exc:
            raise InputError(
                "Parquet needs pyarrow: pip install 'lmi-bench[parquet]', or use --format csv"
            ) from exc
        files.append(path)
    return files


def _write_json(run: Run, folder: Path) -> Path:
    content: dict[str, Any] = {
        "manifest": run.manifest.to_json(),
        "levels": [level.to_json() for level in run.levels],
        "knees": None if run.knees is None else [knee.to_json() for knee in run.knees],
        "slo_answer": None if run.slo_answer is None else run.slo_answer.to_json(),
    }
    path = folder / "run.json"
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return path


def _write_llm_d(run: Run, folder: Path) -> list[Path]:
    files = []
    for number, report in enumerate(llm_d_reports(run)):
        path = folder / f"level-{number}.yaml"
        path.write_text(yaml.safe_dump(report, sort_keys=False), encoding="utf-8")
        files.append(path)
    return files
