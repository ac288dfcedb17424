"""What `plan-day` is asked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from lmi_bench.core.errors import InputError
from lmi_bench.core.option import Option
from lmi_bench.jobs.settings import planning


@dataclass(frozen=True, slots=True)
class DaySettings:
    """A day's load, the start-up time of a machine, and what a machine carries and costs."""

    recommendation: Annotated[
        Path | None,
        Option("File written by `recommend --json`.", argument=True, metavar="[REC.json]"),
    ] = None
    load: Annotated[
        Path | None, Option("Load of the day: columns hour, rate_per_s.", metavar="FILE.csv")
    ] = None
    shape: Annotated[
        str | None, Option("Shape of a day without a file: flat, office or sine.", default="office")
    ] = None
    peak: Annotated[
        float | None,
        Option("Highest load of the day in req/s.", default="the file's, or REC's rate"),
    ] = None
    least_share: Annotated[float, Option("Lowest load of a shape as a share of its peak.")] = 0.2
    start_up: Annotated[
        str,
        Option(
            "Start-up time of a machine in seconds: 460, or detection=60,provisioning=180,"
            "image=120,weights=60,compile=30,warm_up=10."
        ),
    ] = ""
    capacity: Annotated[
        float | None,
        Option("Load of one machine within the SLOs in req/s.", default="REC's lower bound"),
    ] = None
    machine_price: Annotated[float | None, planning.MACHINE_PRICE] = None
    commit_discount: Annotated[float | None, planning.COMMIT_DISCOUNT] = None
    least_slo_share: Annotated[
        float, Option("Share of the day's requests that must meet the SLOs, ramps included.")
    ] = 0.99

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
