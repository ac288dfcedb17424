"""`lmi-bench verify`: the planned load replayed on a target, predicted against measured."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def verify(
    recommendation: Annotated[
        Path, typer.Argument(metavar="REC.json", help="Written by `recommend --json`.")
    ],
    target: Annotated[
        str,
        typer.Option(help="What to measure: a URL, sagemaker:NAME, engine, or sim:INSTANCE."),
    ],
    share: Annotated[
        float | None,
        typer.Option(
            help="Part of the planned load on the target. (default: 1; one copy's of sim:)"
        ),
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(help="To send. (default: enough for every SLO's quantile, at least 300)"),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="As the target knows it. (default: the plan's)"),
    ] = None,
    api_key: Annotated[str | None, typer.Option(help="Of a URL that wants one.")] = None,
    seed: Annotated[int, typer.Option(help="Of arrivals and prompts.")] = 0,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Run folder.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write to this file.")] = None,
    update_profile: Annotated[
        Path | None,
        typer.Option(
            metavar="P.json",
            help="Fit the plan's profile to this measurement too, and write it here; a profile "
            "that is there already is fitted further.",
        ),
    ] = None,
) -> None:
    """Replay a recommendation's load and say which figures lie inside their intervals.

    Exit 99 if a measured SLO is missed.
    """
    from lmi_bench.jobs.verify import Replay, run

    code = run(
        Replay(
            recommendation=recommendation,
            target=target,
            share=share,
            requests=requests,
            model=model,
            api_key=api_key,
            seed=seed,
            out=out,
            update_profile=update_profile,
        ),
        json_file=json_file,
    )
    if code:
        raise typer.Exit(code)
