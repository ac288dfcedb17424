"""What `gate` is asked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lmi_bench.core.option import REQUIRED, option


@dataclass(frozen=True, slots=True)
class GateSettings:
    """A run, what it has to meet, and the files for the verdict."""

    run: Path = option("Run folder, written by `sweep` or `import`.", value=REQUIRED, argument=True)
    slo: tuple[str, ...] = option(
        "SLO such as ttft_p90<=1s; repeatable.", value=(), default="those of the run's scenario"
    )
    at: tuple[float, ...] = option(
        "Load to judge, in users or req/s; repeatable.", value=(), default="every level"
    )
    failures: str = option(
        "Failed requests: exclude them from the latencies, or count them as infinite.",
        value="exclude",
    )
    baseline: Path | None = option("Earlier run of the same workload.")
    max_regression: str | None = option(
        "Largest share by which a metric may be worse than the baseline's.", default="5%"
    )
    junit: Path | None = option("File for the verdict as JUnit XML.")
    markdown: Path | None = option("File for the verdict as Markdown.")
