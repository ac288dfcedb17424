"""Runs written for other tools, and results of other tools as run folders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lmi_bench.core.errors import InputError
from lmi_bench.core.listener import SILENT, Listener
from lmi_bench.core.load import Load
from lmi_bench.core.run_store import load_run
from lmi_bench.interchange.export import EXPORT_FORMATS, export_run
from lmi_bench.interchange.imports.read import read_results
from lmi_bench.interchange.imports.run_folder import write_imported
from lmi_bench.jobs.settings.interchange import ExportSettings, ImportSettings


@dataclass(frozen=True, slots=True)
class ImportedRun:
    """A run folder with the number of its levels and the tool that measured them."""

    folder: Path
    levels: int
    tool: str


def export(settings: ExportSettings) -> list[Path]:
    """Write the run and return the files; raises InputError for a format that does not exist."""
    wanted, run = settings.export_format, settings.run
    if wanted not in EXPORT_FORMATS:
        raise InputError(f"--format {wanted!r} is not known; write {', '.join(EXPORT_FORMATS)}")
    folder = settings.out or run.with_name(f"{run.resolve().name}-export")
    return export_run(load_run(run), wanted, folder)


def import_results(
    settings: ImportSettings, listener: Listener = SILENT, *, command: Sequence[str] = ()
) -> ImportedRun:
    """Make the run folder; raises InputError for a file that cannot be read.

    command  how the program was called, for the run's manifest
    """
    is_stated = settings.concurrency is not None or settings.rate is not None
    load = Load(settings.concurrency, settings.rate) if is_stated else None
    parts = [read_results(path, load) for path in settings.files]
    for text in sorted({text for part in parts for text in part.notes}):
        listener.note(text)
    levels = write_imported(parts, settings.out, command=command)
    return ImportedRun(settings.out, levels, parts[0].tool)
