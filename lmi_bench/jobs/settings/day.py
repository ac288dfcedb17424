"""What `plan-day` is asked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from lmi_bench.core.errors import InputError
from lmi_bench.core.option import option
from lmi_bench.jobs.settings import planning


@dataclass(frozen=True, slots=True)
class DaySettings:
    """A day's load, the start-up time of a machine, and what a machine carries and costs."""

    recommendation: Path | None = option(
        "File written by `recommend --json`.", argument=True, metavar="[REC.json]"
    )
    load: Path | None = option("Load of the day: columns hour, rate_per_s.", metavar="FILE.csv")
    shape: str | None = option(
        "Shape of a day without a file: flat, office or sine.", default="office"
    )
    peak: float | None = option(
        "Highest load of the day in req/s.", default="the file's, or REC's rate"
    )
    least_share: float = option("Lowest load of a shape as a share of its peak.", value=0.2)
    start_up: str = option(
        "Start-up time of a machine in seconds: 460, or detection=60,provisioning=180,"
        "image=120,weights=60,compile=30,warm_up=10.",
        value="",
    )
    capacity: float | None = option(
        "Load of one machine within the SLOs in req/s.", default="REC's lower bound"
    )
    machine_price: Annotated[float | None, planning.MACHINE_PRICE] = None
    commit_discount: Annotated[float | None, planning.COMMIT_DISCOUNT] = None
    least_slo_share: float = option(
        "Share of the day's requests that must meet the SLOs, ramps included.", value=0.99
    )

    def __post_init__(self) -> None:
        if self.load is not None and self.shape is not None:
            raise InputError("give either --load FILE.csv or --shape, not both")
        if not self.start_up:
            raise InputError(
                "--start-up is missing: the seconds from a load that grows to a machine that "
                "serves, as a whole (460) or by part; measure it, it decides whether scaling works"
            )
        if self.commit_discount is not None and not 0 <= self.commit_discount < 1:
            raise InputError("--commit-discount must be at least 0 and below 1")
        if self.machine_price is not None and self.machine_price < 0:
            price = f"{self.machine_price:g}"
            raise InputError(f"--machine-price-per-hour must be 0 USD or more, got {price}")
