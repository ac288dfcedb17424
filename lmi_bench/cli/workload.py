"""`lmi-bench workload from`: recorded traffic as a scenario to sweep and to plan with."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

workload = typer.Typer(
    name="workload", help="Workloads from what is seen in production.", no_args_is_help=True
)


@workload.callback()
def _workload() -> None:
    """Workloads from what is seen in production."""


@workload.command("from")
def from_source(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="A log (JSON lines), a trace (Azure's CSV, Mooncake's JSON lines), or "
            "prometheus:URL of a Prometheus server or of an engine's /metrics page.",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Scenario file to write (YAML).")],
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="To name in the scenario.")
    ] = None,
    hours: Annotated[
        float, typer.Option(min=0.1, help="Before now, of a Prometheus server.")
    ] = 24.0,
    speed: Annotated[
        float, typer.Option(min=1e-6, help="Growth to plan for: the peak rate times this.")
    ] = 1.0,
) -> None:
    """Write joint lengths, peak five-minute rate, burstiness and shared prefix as a scenario.

    A daily curve, where the source has one, is written beside it for `plan-day --load`. What the
    source cannot tell is listed.
    """
    from lmi_bench.jobs.workload import run

    run(source, out, model=model, hours=hours, growth=speed)
