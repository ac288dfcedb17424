"""The error of every shipped profile, recomputed on the published tables that are at hand."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lmi_bench.analysis.fit.accuracy import Accuracy, accuracy_of
from lmi_bench.analysis.fit.measured_tables import TableRow, read_table
from lmi_bench.analysis.fit.validation import FIGURES, Judged, validate_profile
from lmi_bench.analysis.model.profiles import EngineProfile
from lmi_bench.catalog.published import published_table
from lmi_bench.cli.console import note, print_table, progress, say
from lmi_bench.core.durable import write_text
from lmi_bench.targets.profiles import SHIPPED

_TABLES = "LMI_BENCH_TABLES"


@dataclass(frozen=True, slots=True)
class _Table:
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
        folder = os.environ.get(_TABLES)
        path = None if not folder else Path(folder) / self.file
        return path if path is not None and path.exists() else None


_ALL = (
    _Table("tgi-2023", "jumpstart_concurrency.csv", ("",), True),
    _Table("tgi-2023", "jumpstart_min_latency.csv", ("",), True),
    _Table("tgi-2023", "jumpstart_max_throughput.csv", ("",), True),
    _Table("vllm-0.12", "h100_vllm_closed_loop.csv", ("vllm 0.12.0", "vllm"), False),
    _Table("vllm-0.19", "h100_vllm_open_loop.csv", ("vllm",), False),
)


def validate_profiles(*, json_file: Path | None) -> None:
    """Judge each profile on its tables, lines of other models apart; print and save."""
    found: list[dict[str, Any]] = []
    absent: list[_Table] = []
    with progress() as report:
        for index, table in enumerate(_ALL):
            report("tables", index, len(_ALL))
            path = table.path()
            if path is None:
                absent.append(table)
                continue
            found += _errors(table, read_table(path))
    print_table(
        "Errors of the shipped profiles, and 80 % intervals",
        [{**entry, **_shown(entry)} for entry in found],
        left=("profile", "table", "lines of", "figure"),
    )
    say(
        "fitted models: the profile was fitted to models of such lines, so their errors say how "
        "well it describes what it has seen; other models: foretold"
    )
    for table in absent:
        note(
            f"{table.profile}: {table.file} does not ship; name its folder in {_TABLES} to judge it"
        )
    if json_file is not None:
        write_text(json_file, json.dumps(found, indent=1) + "\n")
        say(f"errors: {json_file}")


def _errors(table: _Table, rows: Sequence[TableRow]) -> Iterator[dict[str, Any]]:
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
                yield _entry(table, entry)


def _is_known(profile: EngineProfile, row: Judged) -> bool:
    return row.row.cell is not None and row.row.cell.shape.name in profile.models


def _entry(table: _Table, entry: Accuracy) -> dict[str, Any]:
    return {
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


def _shown(entry: dict[str, Any]) -> dict[str, str]:
    return {
        "median": f"{entry['median']:.1%}",
        "p90": f"{entry['p90']:.1%}",
        "covered": f"{entry['covered']:.0%}",
        "half-width": f"{entry['half-width']:.1%}",
    }
