"""`lmi-bench profile`: what parts of this machine cost, measured by themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

profile = typer.Typer(
    name="profile", help="Measure parts of this machine by themselves.", no_args_is_help=True
)


@profile.command()
def collectives(
    ranks: Annotated[int, typer.Option(help="Processes that add their arrays.")] = 2,
    transport: Annotated[
        list[str] | None,
        typer.Option(
            help="shared-memory, gloo, or nccl between GPUs; repeatable. (default: the first two)"
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(help="Rounds of each size; the median counts.")] = 5,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Write times and fit to this JSON file.")
    ] = None,
) -> None:
    """Time the all-reduce of tensor parallelism by size, and fit latency + bytes / rate."""
    from lmi_bench.jobs.profile import run_collectives

    run_collectives(ranks, transport or [], rounds, out)


@profile.command()
def attention(
    tokens: Annotated[
        list[int] | None,
        typer.Option(help="Prompt tokens; repeatable. (default: 256, 1,024 and 4,096)"),
    ] = None,
    heads: Annotated[int, typer.Option(help="Query heads.")] = 12,
    head_dim: Annotated[int, typer.Option(help="Values of a head.")] = 64,
    rounds: Annotated[int, typer.Option(help="Rounds of each way; the median counts.")] = 5,
) -> None:
    """Time a prompt's attention with its whole score matrix and in tiles, and count the bytes."""
    from lmi_bench.jobs.profile_attention import run_attention

    run_attention(tokens or (256, 1024, 4096), heads, head_dim, rounds)
