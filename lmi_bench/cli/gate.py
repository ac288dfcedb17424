"""`lmi-bench gate`: pass or fail a run by SLOs and by an earlier run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lmi_bench.core.errors import EXIT_SLO_MISSED


def gate(
    run: Annotated[Path, typer.Argument(help="Run folder written by `sweep` or `import`.")],
    slo: Annotated[
        list[str] | None,
        typer.Option(
            help="Such as ttft_p90<=1s; repeatable. (default: those of the run's scenario)"
        ),
    ] = None,
    at: Annotated[
        list[float] | None,
        typer.Option(
            help="Gate this load only (users or req/s); repeatable. (default: every level)"
        ),
    ] = None,
    failures: Annotated[
        str,
        typer.Option(help="exclude failed requests from the latencies, or count them as infinite."),
    ] = "exclude",
    baseline: Annotated[
        Path | None, typer.Option(help="An earlier run of the same workload.")
    ] = None,
    max_regression: Annotated[
        str | None,
        typer.Option(help="How much worse than the baseline a metric may be. (default: 5%)"),
    ] = None,
    junit: Annotated[Path | None, typer.Option(help="Write JUnit XML here.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write a Markdown summary here.")] = None,
) -> None:
    """Exit 0 if every level meets every SLO and none got slower than the baseline, else 99."""
    from lmi_bench.jobs.gate import run_gate

    passed = run_gate(
        run,
        slos=slo or (),
        loads=at or (),
        failures=failures,
        baseline=baseline,
        max_regression=max_regression,
        junit=junit,
        markdown=markdown,
    )
    if not passed:
        raise typer.Exit(EXIT_SLO_MISSED)
