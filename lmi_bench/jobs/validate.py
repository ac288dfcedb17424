"""Measured levels predicted, and how far off: those of a table, or of the shipped profiles."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lmi_bench.analysis.fit.measured_files import TableRow, read_table
from lmi_bench.analysis.fit.validation import (
    FIGURES,
    Accuracy,
    Judged,
    accuracy_of,
    problems_of,
    validate_profile,
)
from lmi_bench.analysis.fit.validation import validate as judge
from lmi_bench.analysis.level.cells import MeasuredLevel
from lmi_bench.analysis.model.profiles import EngineProfile
from lmi_bench.catalog.published import published_table
from lmi_bench.core.errors import InputError
from lmi_bench.core.listener import SILENT, Listener
from lmi_bench.core.slo import parse_slo
from lmi_bench.core.units import plural
from lmi_bench.jobs.calibrate import cells_of_run_folder
from lmi_bench.jobs.settings.calibrate import ValidateSettings
from lmi_bench.targets.profiles import SHIPPED, find_profile

_TTFT_LIMIT_MS, _TPOT_LIMIT_MS = 500.0, 50.0
TABLES_VARIABLE = "LMI_BENCH_TABLES"


@dataclass(frozen=True, slots=True)
class Validation:
    """Every level as measured and as predicted.

    limits  figures and their limits in ms, for the highest rates of open loops
    """

    judged: list[Judged]
    limits: list[tuple[str, float]]
    warnings: list[str]

    def to_json(self) -> list[dict[str, Any]]:
        """As `validate --json` writes it."""
        return [row.to_json() for row in self.judged]


@dataclass(frozen=True, slots=True)
class PublishedTable:
    """A published table, and which of its lines a profile speaks for.

    ships  with the program; others are looked for in the folder that LMI_BENCH_TABLES names
    """

    profile: str
    file: str
    engines: tuple[str, ...]
    ships: bool

    def path(self) -> Path | None:
        """Where it lies; None where it is not at hand."""
        if self.ships:
            return published_table(self.file)
        folder = os.environ.get(TABLES_VARIABLE)
        path = None if not folder else Path(folder) / self.file
        return path if path is not None and path.exists() else None


_TABLES = (
    PublishedTable("tgi-2023", "jumpstart_concurrency.csv", ("",), True),
    PublishedTable("tgi-2023", "jumpstart_min_latency.csv", ("",), True),
    PublishedTable("tgi-2023", "jumpstart_max_throughput.csv", ("",), True),
    PublishedTable("vllm-0.12", "h100_vllm_closed_loop.csv", ("vllm 0.12.0", "vllm"), False),
    PublishedTable("vllm-0.19", "h100_vllm_open_loop.csv", ("vllm",), False),
)


@dataclass(frozen=True, slots=True)
class ShippedErrors:
    """The errors of the shipped profiles, each with its profile and table.

    absent  tables that are not at hand
    """

    errors: list[tuple[PublishedTable, Accuracy]]
    absent: list[PublishedTable]

    def to_json(self) -> list[dict[str, Any]]:
        """As `validate --json` writes it where no table is named."""
        return [
            {
                "profile": table.profile,
                "table": table.file,
                "lines of": entry.slice_name,
                "figure": entry.figure,
                "lines": entry.rows,
                "silent": entry.silent or None,
                "median": entry.median,
                "p90": entry.p90,
                "covered": entry.coverage,
                "half-width": entry.half_width,
            }
            for table, entry in self.errors
        ]


def validate(settings: ValidateSettings, listener: Listener = SILENT) -> Validation:
    """Judge the levels. Raises InputError where a file or a limit cannot be used."""
    limits = _limits(settings.slo)
    profile = None if settings.profile is None else find_profile(settings.profile)
    rows = _rows(settings, profile, listener)
    if profile is None:
        on = settings.calibrate_on
        judged, warnings = judge(
            rows,
            calibrate_cells=settings.calibrate_cells or 0,
            calibrate_on=None if on is None else read_table(on),
            seed=settings.seed,
        )
    else:
        judged = validate_profile(profile, rows)
        engines = sorted({row.engine for row in rows})
        warnings = [text for text in map(profile.warning_for_engine, engines) if text]
        warnings += problems_of(judged)
    return Validation(judged, limits, warnings)


def validate_shipped(listener: Listener = SILENT) -> ShippedErrors:
    """Judge each shipped profile on its tables, lines of other models apart."""
    found: list[tuple[PublishedTable, Accuracy]] = []
    absent: list[PublishedTable] = []
    for index, table in enumerate(_TABLES):
        listener.progress("tables", index, len(_TABLES))
        path = table.path()
        if path is None:
            absent.append(table)
        else:
            found += [(table, entry) for entry in _errors(table, read_table(path))]
    return ShippedErrors(found, absent)


def _rows(
    settings: ValidateSettings, profile: EngineProfile | None, listener: Listener
) -> list[TableRow]:
    """The lines of a table, or the levels of sweeps."""
    folders = [source for source in settings.sources if source.is_dir()]
    if not folders and len(settings.sources) == 1:
        rows = read_table(settings.sources[0])
        listener.note(f"{plural(len(rows), 'line')} of {settings.sources[0].name}")
        return rows
    if len(folders) < len(settings.sources):
        raise InputError("give one table, or sweeps alone: lines of several sources do not mix")
    if profile is None:
        raise InputError(
            "levels of sweeps are judged by a profile: make one with `lmi-bench calibrate RUN_DIR "
            "-o profile.json` on other sweeps and add --profile profile.json"
        )
    cells: list[MeasuredLevel] = []
    for folder in folders:
        found = cells_of_run_folder(
            folder, instance=settings.instance, dtype=settings.dtype, machine=profile.machine
        )
        cells += found.cells
    listener.note(f"{plural(len(cells), 'level')} of {plural(len(folders), 'sweep')}")
    return [TableRow(number, "", cell) for number, cell in enumerate(cells)]


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


def _errors(table: PublishedTable, rows: Sequence[TableRow]) -> Iterator[Accuracy]:
    profile = SHIPPED[table.profile]
    own = [row for row in rows if row.engine in table.engines]
    judged = [replace(row, calibrated=False) for row in validate_profile(profile, own)]
    parts: tuple[tuple[str, Callable[[Judged], bool]], ...] = (
        ("fitted models", lambda row: _is_known(profile, row)),
        ("other models", lambda row: not _is_known(profile, row)),
    )
    for name, belongs in parts:
        part = [row for row in judged if row.row.cell is not None and belongs(row)]
        for figure in FIGURES:
            entry = accuracy_of(name, figure, part)
            if entry is not None:
                yield entry


def _is_known(profile: EngineProfile, row: Judged) -> bool:
    return row.row.cell is not None and row.row.cell.setup.shape.name in profile.models
