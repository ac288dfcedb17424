"""A run written for spreadsheets, data frames and other tools."""

from __future__ import annotations

from pathlib import Path

from lmi_bench.core.errors import InputError
from lmi_bench.core.run_store import load_run
from lmi_bench.interchange.export import EXPORT_FORMATS, export_run
from lmi_bench.jobs.settings.export import ExportSettings


def export(settings: ExportSettings) -> list[Path]:
    """Write the run and return the files; raises InputError for a format that does not exist."""
    wanted, run = settings.export_format, settings.run
    if wanted not in EXPORT_FORMATS:
        raise InputError(f"--format {wanted!r} is not known; write {', '.join(EXPORT_FORMATS)}")
    folder = settings.out or run.with_name(f"{run.resolve().name}-export")
    return export_run(load_run(run), wanted, folder)
