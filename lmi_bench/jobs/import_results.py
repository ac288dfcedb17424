"""Results of other tools as a run folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lmi_bench.core.listener import SILENT, Listener
from lmi_bench.core.load import Load
from lmi_bench.interchange.imports.read import read_results
from lmi_bench.interchange.imports.run_folder import write_imported
from lmi_bench.jobs.settings.import_results import ImportSettings


@dataclass(frozen=True, slots=True)
class ImportedRun:
    """A run folder with the number of its levels and the tool that measured them."""

    folder: Path
    levels: int
    tool: str


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
