"""What `workload from` is asked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lmi_bench.core.errors import InputError
from lmi_bench.core.option import REQUIRED, option


@dataclass(frozen=True, slots=True)
class WorkloadFromSettings:
    """A source of traffic and the scenario to write."""

    source: str = option(
        "Log (JSON lines), trace (Azure's CSV, Mooncake's JSON lines), or prometheus:URL of a "
        "Prometheus server or of an engine's /metrics page.",
        value=REQUIRED,
        argument=True,
        metavar="SOURCE",
    )
    out: Path = option("Scenario file to write (YAML).", "--out", "-o", value=REQUIRED)
    model: str | None = option("Model for the scenario.", "--model", "-m")
    hours: float = option(
        "Length in hours, up to now, of what a Prometheus server is asked for.", value=24.0
    )
    speed: float = option(
        "Growth to plan for: the scenario's rate is the peak rate times this.", value=1.0
    )

    def __post_init__(self) -> None:
        if self.hours < 0.1:
            raise InputError(f"--hours {self.hours:g}: give at least 0.1")
        if self.speed < 1e-6:
            raise InputError(f"--speed {self.speed:g}: give a number above 0")
