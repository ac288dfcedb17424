"""Writes a run for other programs: CSV or Parquet tables, one JSON file, or llm-d reports."""

import json
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

from lmi_bench.core.errors import InputError
from lmi_bench.core.run_store import Run
from lmi_bench.interchange.llm_d import llm_d_reports
from lmi_bench.interchange.tables import level_table, request_table

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
                path.write_text(json.dumps(_content(run), indent=2) + "\n", encoding="utf-8")
                return [path]
            case "llm-d":
                files = []
                for number, report in enumerate(llm_d_reports(run)):
                    files.append(folder / f"level-{number}.yaml")
                    files[-1].write_text(yaml.safe_dump(report, sort_keys=False), encoding="utf-8")
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


def _content(run: Run) -> dict[str, Any]:
    return {
        "manifest": run.manifest.to_json(),
        "levels": [level.to_json() for level in run.levels],
        "knees": None if run.knees is None else [knee.to_json() for knee in run.knees],
        "slo_answer": None if run.slo_answer is None else run.slo_answer.to_json(),
    }
