"""What `gate` is asked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from lmi_bench.core.option import Option


@dataclass(frozen=True, slots=True)
class GateSettings:
    """A run, what it has to meet, and the files for the verdict."""

    run: Annotated[Path, Option("Run folder, written by `sweep` or `import`.", argument=True)]
    slo: Annotated[
        tuple[str, ...],
        Option("SLO such as ttft_p90<=1s; repeatable.", default="those of the run's scenario"),
    ] = ()
    at: Annotated[
        tuple[float, ...],
        Option("Load to judge, in users or req/s; repeatable.", default="every level"),
    ] = ()
    failures: Annotated[
        str, Option("Failed requests: exclude them from the latencies, or count them as infinite.")
    ] = "exclude"
    baseline: Annotated[Path | None, Option("Earlier run of the same workload.")] = None
    max_regression: Annotated[
        str | None,
        Option("Largest share by which a metric may be worse than the baseline's.", default="5%"),
    ] = None
    junit: Annotated[Path | None, Option("File for the verdict as JUnit XML.")] = None
    markdown: Annotated[Path | None, Option("File for the verdict as Markdown.")] = None
