"""What `calibrate` and `validate` are asked."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from lmi_bench.core.errors import InputError
from lmi_bench.core.option import Option, option
from lmi_bench.jobs.settings import planning
from lmi_bench.jobs.settings.planning import check_at_least_one

_INSTANCE = Option("Machine of the measured levels.", default="that of the source")
_DTYPE = replace(planning.DTYPE, default="that of the source", group=None)


@dataclass(frozen=True, slots=True)
class CalibrateSettings:
    """Measured levels to fit a profile to, and what their source does not say."""

    sources: tuple[Path, ...] = option(
        "Sweeps, tables of levels, results of vllm bench serve or AIPerf. Left out with "
        "--next, --model and --instance: what to measure first.",
        value=(),
        argument=True,
        metavar="[RUN_DIR|TABLE.csv|SUMMARY.json...]",
    )
    out: Path | None = option("JSON file for the profile.", "--out", "-o")
    profile: str | None = option(
        "Prior: a profile file, eager-prior, graph-prior ...", default="by the source"
    )
    model: Annotated[str | None, replace(planning.MODEL, default="that of the source")] = None
    instance: Annotated[str | None, _INSTANCE] = None
    tensor_parallel: int = option("Tensor-parallel degree of summary files.", "--tp", value=1)
    dtype: Annotated[str | None, _DTYPE] = None
    version: str | None = option("Version of the engine.")
    next_levels: int = option("Number of levels to name that are measured next.", "--next", value=0)

    def __post_init__(self) -> None:
        if self.next_levels < 0:
            raise InputError(f"--next must be 0 or more, got {self.next_levels}")
        if self.sources:
            return
        if not self.next_levels or self.model is None or self.instance is None:
            raise InputError(
                "name sweeps or tables to fit to; or, to learn what to measure first, give --next, "
                "--model and --instance"
            )
        if self.out is not None:
            raise InputError("--out needs measured levels: nothing was fitted")


@dataclass(frozen=True, slots=True)
class ValidateSettings:
    """Measured levels to predict, and what to predict them with."""

    sources: tuple[Path, ...] = option(
        "Table of measured levels, one a line, or sweeps (with --profile). Left out: every "
        "shipped profile is judged on its published tables.",
        value=(),
        argument=True,
        metavar="[TABLE.csv|RUN_DIR...]",
    )
    calibrate_cells: int | None = option(
        "Number of lines to choose and calibrate on, for each engine of the table apart."
    )
    calibrate_on: Path | None = option("Table whose lines to calibrate on.", metavar="CELLS.csv")
    profile: str | None = option("Profile to judge as it is: a file of `calibrate`, vllm-0.12 ...")
    instance: Annotated[str | None, _INSTANCE] = None
    dtype: Annotated[str | None, _DTYPE] = None
    slo: tuple[str, ...] = option(
        "Limit for the rates of open loops, such as ttft_mean<=500ms; repeatable.", value=()
    )
    seed: int = option(
        "Random seed of the calibration split (0: from all lines; other: from 70 %).", value=0
    )

    def __post_init__(self) -> None:
        check_at_least_one(calibrate_cells=self.calibrate_cells)
        ways = (self.calibrate_cells, self.calibrate_on, self.profile)
        if not self.sources and (any(ways) or self.instance or self.dtype or self.slo or self.seed):
            raise InputError(
                "name a table or sweeps to judge; without one, every shipped profile is judged "
                "as it is and only --json counts"
            )
        if sum(way is not None for way in ways) > 1:
            raise InputError("give one of --calibrate-cells, --calibrate-on and --profile")
