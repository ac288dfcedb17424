"""One validation: read the table, judge every line, print, save."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmi_bench.analysis.fit.accuracy import accuracies, rates_under
from lmi_bench.analysis.fit.measured_tables import TableRow, read_table
from lmi_bench.analysis.fit.validation import Judged, problems_of, validate_profile
from lmi_bench.analysis.fit.validation import validate as judge
from lmi_bench.analysis.level.cells import Cell
from lmi_bench.analysis.model.profiles import EngineProfile
from lmi_bench.cli.console import note, print_table, say, warn
from lmi_bench.core.durable import write_text
from lmi_bench.core.errors import InputError
from lmi_bench.core.slo import parse_slo
from lmi_bench.jobs.run_cells import cells_of_run_folder
from lmi_bench.targets.profiles import find_profile

_SHOWN_WARNINGS = 5
_TTFT_LIMIT_MS, _TPOT_LIMIT_MS = 500.0, 50.0


@dataclass(frozen=True, slots=True)
class Order:
    """The command's flags; None, 0 and () are what was left out."""

    sources: tuple[Path, ...]
    calibrate_cells: int
    calibrate_on: Path | None
    profile: str | None
    instance: str | None
    dtype: str | None
    slos: tuple[str, ...]
    seed: int


def run(order: Order, *, json_file: Path | None) -> None:
    """Judge the levels. Raises InputError where a file or a limit cannot be used."""
    limits = _limits(order.slos)
    profile = None if order.profile is None else find_profile(order.profile)
    rows = _rows(order, profile)
    warnings: list[str] = []
    if profile is not None:
        judged = validate_profile(profile, rows)
        engines = sorted({row.engine for row in rows})
        warnings = [text for text in map(profile.warning_for_engine, engines) if text]
        warnings += problems_of(judged)
    else:
        judged, warnings = judge(
            rows,
            calibrate_cells=order.calibrate_cells,
            calibrate_on=None if order.calibrate_on is None else read_table(order.calibrate_on),
            seed=order.seed,
        )
    if json_file is not None:
        content = [row.to_json() for row in judged]
        write_text(json_file, json.dumps(content, indent=1) + "\n")
    chosen = [row for row in judged if row.calibrated]
    if chosen:
        print_table(
            f"Calibrated on {_count(len(chosen), 'line')}",
            [_line(row) for row in chosen],
            left=("engine", "model", "machine"),
        )
    found = accuracies(judged)
    if not found:
        note("no measured line is left to judge: every one was calibrated on, or cannot be used")
    print_table(
        "Errors on lines that were not calibrated on, and 80 % intervals",
        [
            {
                "slice": entry.slice_name,
                "figure": entry.figure,
                "lines": entry.rows,
                "silent": entry.silent or None,
                "median": f"{entry.median:.1%}",
                "p90": f"{entry.p90:.1%}",
                "covered": f"{entry.coverage:.0%}",
                "half-width": f"{entry.half_width:.1%}",
            }
            for entry in found
        ],
        left=("slice", "figure"),
    )
    for figure, limit_ms in limits:
        print_table(
            "Highest rate of the table under a limit, req/s",
            [
                {
                    "engine": entry.engine,
                    "model": entry.model,
                    "TP": entry.tensor_parallel,
                    "limit": entry.limit,
                    "measured": _rate(entry.measured_per_s),
                    "predicted": _rate(entry.predicted_per_s),
                }
                for entry in rates_under(judged, figure, limit_ms)
            ],
            left=("engine", "model", "limit"),
        )
    for text in warnings[:_SHOWN_WARNINGS]:
        warn(text)
    if len(warnings) > _SHOWN_WARNINGS:
        warn(f"and {len(warnings) - _SHOWN_WARNINGS} more such warnings")
    if json_file is not None:
        say(f"predictions: {json_file}")


def _rows(order: Order, profile: EngineProfile | None) -> list[TableRow]:
    """The lines of a table, or the levels of sweeps."""
    folders = [source for source in order.sources if source.is_dir()]
    if not folders and len(order.sources) == 1:
        rows = read_table(order.sources[0])
        note(f"{_count(len(rows), 'line')} of {order.sources[0].name}")
        return rows
    if len(folders) < len(order.sources):
        raise InputError("give one table, or sweeps alone: lines of several sources do not mix")
    if profile is None:
        raise InputError(
            "levels of sweeps are judged by a profile: make one with `lmi-bench calibrate RUN_DIR "
            "-o profile.json` on other sweeps and add --profile profile.json"
        )
    cells: list[Cell] = []
    for folder in folders:
        found = cells_of_run_folder(
            folder, instance=order.instance, dtype=order.dtype, machine=profile.machine
        )
        cells += found.cells
    note(f"{_count(len(cells), 'level')} of {_count(len(folders), 'sweep')}")
    return [TableRow(number, "", cell) for number, cell in enumerate(cells)]


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _limits(slos: tuple[str, ...]) -> list[tuple[str, float]]:
    if not slos:
        return [("ttft_ms", _TTFT_LIMIT_MS), ("tpot_ms", _TPOT_LIMIT_MS)]
    limits = []
    for text in slos:
        slo = parse_slo(text)
        if slo.metric not in ("ttft", "tpot") or slo.statistic != "mean":
            raise InputError(f"--slo {text}: tables state means, so use ttft_mean or tpot_mean")
        limits.append((f"{slo.metric}_ms", slo.limit_ms))
    return limits


def _rate(value: float | None) -> str:
    return "none" if value is None else f"{value:g}"


def _line(row: Judged) -> dict[str, Any]:
    cell = row.row.cell
    assert cell is not None
    load = f"{cell.rate_per_s:g}/s" if cell.rate_per_s is not None else str(cell.concurrency)
    return {
        "line": row.row.number + 2,
        "engine": row.row.engine,
        "model": cell.shape.name,
        "machine": cell.instance.instance_type,
        "TP": cell.tensor_parallel,
        "in / out": f"{cell.input_tokens} / {cell.output_tokens}",
        "load": load,
    }
