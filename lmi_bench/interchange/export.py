"""Writes a run for other programs: CSV or Parquet tables, one JSON file, or llm-d reports.

The table of levels begins with the columns of the published benchmark tables, so that measured and
published rows can be stacked; every further column has its unit in its name.

A level's benchmark report of llm-d, schema version 0.2, is in data/llm_d.yaml; this module has its
values. A statistic that was not measured is left out. The schema requires an accelerator and a
prompt length, so the stack and the load are described only where these are known.
"""

import hashlib
import json
import math
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import pandas as pd
import yaml

from lmi_bench import __version__
from lmi_bench.analysis.results.columns import columns_of
from lmi_bench.catalog.instances import find_instance
from lmi_bench.catalog.templates import filled, read_template
from lmi_bench.core.durable import write_inside
from lmi_bench.core.errors import InputError
from lmi_bench.core.level import LATENCY_KEY, QUANTILES, STATISTICS, Level, Metric, Statistics
from lmi_bench.core.level import METRICS as ALL_METRICS
from lmi_bench.core.run_store import Run
from lmi_bench.core.units import s_to_ms

_FILE = "interchange/llm_d.yaml"
_LLM_D_STATISTICS = ("mean", "std", "min", *QUANTILES, "max")
_COPIED_FIELDS = (
    *("valid", "stopped_by", "requests", "errors", "wall_s"),
    *("total_throughput_tokens_per_s", "request_throughput_per_s"),
)
_OF_SOME_REQUESTS: tuple[Metric, ...] = ("ttft_answer", "connect", "tls")
METRICS: tuple[Metric, ...] = tuple(each for each in ALL_METRICS if each not in _OF_SOME_REQUESTS)
_OF_A_REQUEST: tuple[Metric, ...] = ("ttft", "tpot", "e2e", "latency_per_token")


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
    match export_format:
        case "json":
            answer = run.slo_answer
            content = {
                "manifest": run.manifest.to_json(),
                "levels": [level.to_json() for level in run.levels],
                "knees": None if run.knees is None else [each.to_json() for each in run.knees],
                "slo_answer": None if answer is None else answer.to_json(),
            }
            files = {"run.json": json.dumps(content, indent=2) + "\n"}
        case "llm-d":
            reports = [_report(run, line, stage) for stage, line in enumerate(run.levels)]
            texts = [yaml.safe_dump(report, sort_keys=False) for report in reports]
            files = {f"level-{stage}.yaml": text for stage, text in enumerate(texts)}
        case _:
            files = _tables(run, export_format)
    for name, written in files.items():
        write_inside(folder / name, written)
    return [folder / name for name in files]


def _tables(run: Run, export_format: Literal["csv", "parquet"]) -> dict[str, Any]:
    tables = {"levels": level_table(run), "requests": request_table(run)}
    try:
        return {
            f"{name}.{export_format}": getattr(table, f"to_{export_format}")(index=False)
            for name, table in tables.items()
            if not table.empty
        }
    except ImportError as exc:
        raise InputError("Parquet needs pyarrow: pip install 'lmi-bench[parquet]', or use --format csv") from exc


def level_table(run: Run) -> pd.DataFrame:
    """One row per level. A level that was cut short keeps its row, without throughput or latency.

    latency_ms_per_token  is the p90, as in the published tables; the other statistics follow
    """
    return pd.DataFrame([_level_row(run, line) for line in run.levels])


def request_table(run: Run) -> pd.DataFrame:
    """One row per sent request; times are seconds since its level's start."""
    rows = []
    for line, records in zip(run.levels, run.records, strict=True):
        each_s = columns_of(records).each_s(open_loop=line.load.is_open)
        for row, record in enumerate(records):
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
                    **{LATENCY_KEY[each]: _ms(each_s[each][row]) for each in _OF_A_REQUEST},
                    "error": record.error,
                }
            )
    return pd.DataFrame(rows)


def hardware(run: Run) -> dict[str, Any]:
    """The machine, from the run's manifest and the catalog; None for unknown facts."""
    facts = run.manifest.target
    instance, accelerator, number = facts.instance, facts.accelerator, facts.n_accelerators
    if instance is not None:
        with suppress(InputError):  # not in the catalog: only the run's own facts are known
            known = find_instance(instance)
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
    asked, told = mean_lengths(line)
    whole = not line.is_cut_short
    row: dict[str, Any] = {
        **hardware(run),
        "total_tokens": None if asked is None or told is None else asked + told,
        "input_tokens": asked,
        "output_tokens": told,
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
    for metric in METRICS:
        name, unit = LATENCY_KEY[metric].split("_ms", 1)
        for statistic in STATISTICS:
            row[f"{name}_{statistic}_ms{unit}"] = line.of(metric).value(statistic)
    return row


def _ms(value_s: float) -> float | None:
    return None if np.isnan(value_s) else s_to_ms(float(value_s))


def _report(run: Run, line: Level, stage: int) -> dict[str, Any]:
    """The report of a level, the `stage`-th of the run."""
    facts, target = hardware(run), run.manifest.target.to_json()
    experiment = _digest({"hash": run.manifest.scenario_hash, "folder": run.path.name})
    values = _load_values(run, line) | _result_values(line)
    values |= {
        "target": target,
        "target_id": _digest(target),
        "engine": run.manifest.target.kind or "unknown",
        "copies": facts["instance_count"] or 1,
        "model": facts["model"],
        "accelerator": facts["accelerator"],
        "devices": facts["n_accelerators"],
        "degree": facts["tp"] or 1,
        "version": __version__,
        "stage": stage,
        "experiment": experiment,
        "uid": _digest([experiment, line.index, line.attempt]),
        "duration": f"PT{(line.wall_s or 0.0):.6f}S",
    }
    required = {"stack": ("model", "accelerator", "devices"), "load": ("input_tokens",)}
    known = [name for name, keys in required.items() if all(values[key] for key in keys)]
    parts = dict.fromkeys(required) | filled(_FILE, known, values)
    report: dict[str, Any] = filled(_FILE, ["report"], values | parts)["report"]
    return report


def _load_values(run: Run, line: Level) -> dict[str, Any]:
    stated, scenario = run.manifest.scenario, run.manifest.scenario.to_json()
    fixed = not stated.workload.mix and not stated.workload.dataset
    distribution = "fixed" if fixed else "other"
    asked, told = (mean if mean and mean >= 1 else None for mean in mean_lengths(line))
    return {
        "scenario": scenario,
        "scenario_id": _digest(scenario),
        "scenario_name": stated.name,
        "tool": run.manifest.imported_from or "lmi-bench",
        "source": "sampled" if stated.workload.dataset else "random",
        "distribution": distribution,
        "input_tokens": asked,
        "output_seq_len": told and {"distribution": distribution, "value": told},
        "rate_per_s": line.load.rate_per_s,
        "users": line.load.concurrency,
    }


def _result_values(line: Level) -> dict[str, Any]:
    total, output = line.total_throughput_tokens_per_s, line.throughput_tokens_per_s
    asked, told = mean_lengths(line)
    means = (
        ("input_length", "count", asked),
        ("output_length", "count", told),
        ("input_rate", "tokens/s", None if total is None or output is None else total - output),
        ("output_rate", "tokens/s", output),
        ("total_rate", "tokens/s", total),
        ("request_rate", "queries/s", line.request_throughput_per_s),
    )
    latencies = {
        name: _statistics(line.of(metric), units)
        for name, (metric, units) in read_template(_FILE)["latencies"].items()
        if line.of(metric).mean is not None  # which the schema requires
    }
    return {
        "sent": line.sent,
        "failures": line.errors,
        "latency": latencies,
        **{n: None if mean is None else {"units": u, "mean": mean} for n, u, mean in means},
    }


def _statistics(found: Statistics, units: str) -> dict[str, Any]:
    values = {"stddev" if name == "std" else name: found.value(name) for name in _LLM_D_STATISTICS}
    kept = {name: value for name, value in values.items() if value is not None and math.isfinite(value)}
    return {"units": units, **kept}


def _digest(content: Any) -> str:
    text = json.dumps(content, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]
