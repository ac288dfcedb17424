"""Writes a run for other programs: CSV or Parquet tables, one JSON file, or llm-d reports.

A level's benchmark report of llm-d, schema version 0.2, is in data/llm_d.yaml; this module has its
values. A statistic that was not measured is left out. The schema requires an accelerator and a
prompt length, so the stack and the load are described only where these are known.
"""

import hashlib
import json
import math
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

from lmi_bench import __version__
from lmi_bench.catalog.templates import filled, read_template
from lmi_bench.core.errors import InputError
from lmi_bench.core.level import Level, Statistics
from lmi_bench.core.run_store import Run
from lmi_bench.interchange.tables import hardware, level_table, mean_lengths, request_table

_FILE = "interchange/llm_d.yaml"
_STATISTICS = {"mean": "mean", "std": "stddev", "min": "min", "p50": "p50", "p90": "p90",
               "p95": "p95", "p99": "p99", "max": "max"}  # fmt: skip


def _report(run: Run, line: Level, stage: int) -> dict[str, Any]:
    """The report of a level, the `stage`-th of the run."""
    values = _stack_values(run) | _load_values(run, line) | _result_values(line)
    experiment = _digest({"hash": run.manifest.scenario_hash, "folder": run.path.name})
    values |= {
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


def _stack_values(run: Run) -> dict[str, Any]:
    facts, target = hardware(run), run.manifest.target.to_json()
    return {
        "target": target,
        "target_id": _digest(target),
        "engine": run.manifest.target.kind or "unknown",
        "copies": facts["instance_count"] or 1,
        "model": facts["model"],
        "accelerator": facts["accelerator"],
        "devices": facts["n_accelerators"],
        "degree": facts["tp"] or 1,
    }


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
    values = ((theirs, found.value(ours)) for ours, theirs in _STATISTICS.items())
    kept = {name: value for name, value in values if value is not None and math.isfinite(value)}
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
                path = folder / "run.json"
                answer = run.slo_answer
                content = {
                    "manifest": run.manifest.to_json(),
                    "levels": [level.to_json() for level in run.levels],
                    "knees": None if run.knees is None else [each.to_json() for each in run.knees],
                    "slo_answer": None if answer is None else answer.to_json(),
                }
                path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
                return [path]
            case "llm-d":
                files = []
                for stage, line in enumerate(run.levels):
                    report = yaml.safe_dump(_report(run, line, stage), sort_keys=False)
                    files.append(folder / f"level-{stage}.yaml")
                    files[-1].write_text(report, encoding="utf-8")
                return files
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
            getattr(table, f"to_{export_format}")(path, index=False)
        except ImportError as exc:
            raise InputError(
                "Parquet needs pyarrow: pip install 'lmi-bench[parquet]', or use --format csv"
            ) from exc
        files.append(path)
    return files
