"""Settings of the commands before a first sweep: doctor."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lmi_bench.core.option import option
from lmi_bench.jobs.settings.sweep import API_KEY


@dataclass(frozen=True, slots=True)
class DoctorSettings:
    """What is examined beside this machine."""

    target: str | None = option(
        "URL of an endpoint to examine too; it gets a real request of two tokens."
    )
    api_key: str | None = option(API_KEY)
    header: tuple[str, ...] = option(
        "Header of every request, 'Name: value'; repeatable.", "--header", "-H", value=()
    )
    runs: Path = option("Folder in which run folders will be written.", value=Path("runs"))
