"""`lmi-bench profile`: what parts of this machine cost, measured by themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

profile = typer.Typer(
    name="profile", help="Measure parts of this machine by themselves.", no_args_is_help=True
)


@profile.callback()
def _group() -> None:
    """Keeps `collectives` a command of its own while it is the only one."""


@profile.command()
def collectives(
    ranks: Annotated[int, typer.Option(help="Processes that add their arrays.")] = 2,
    transport: Annotated[
        list[str] | None,
        typer.Option(help="shared-memory or gloo; repeatable. (default: both)"),
    ] = None,
    rounds: Annotated[int, typer.Option(help="Rounds of each size; the median counts.")] = 5,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Write times and fit to this JSON file.")
    ] = None,
) -> None:
    """Time the all-reduce of tensor parallelism by size, and fit latency + bytes / rate."""
    from lmi_bench.cli.profile_run import run_collectives

    run_collectives(ranks, transport or [], rounds, out)
