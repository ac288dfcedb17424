"""`lmi-bench plan-day`: whether to scale over the day, and what the day costs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def plan_day(
    recommendation: Annotated[
        Path | None,
        typer.Argument(metavar="[REC.json]", help="Written by `recommend --json`."),
    ] = None,
    load: Annotated[
        Path | None,
        typer.Option(metavar="FILE.csv", help="The day's load: columns hour, rate_per_s."),
    ] = None,
    shape: Annotated[
        str | None, typer.Option(help="Of the day without a file: flat, office or sine.")
    ] = None,
    peak: Annotated[
        float | None,
        typer.Option(help="Highest load of the day, req/s. (default: the file's, or REC's rate)"),
    ] = None,
    least_share: Annotated[
        float, typer.Option(help="Lowest load of a shape, as a share of its peak.")
    ] = 0.2,
    start_up: Annotated[
        str,
        typer.Option(
            help="Seconds until a machine serves: 460, or detection=60,provisioning=180,image=120,"
            "weights=60,compile=30,warm_up=10.",
        ),
    ] = "",
    capacity: Annotated[
        float | None,
        typer.Option(help="req/s of one machine within the SLOs. [REC's lower bound]"),
    ] = None,
    price_per_hour: Annotated[
        float | None, typer.Option(help="USD per machine and hour. [REC's]")
    ] = None,
    commit_discount: Annotated[
        float | None,
        typer.Option(help="Off the price of committed machines: also print how many to commit to."),
    ] = None,
    least_slo_share: Annotated[
        float, typer.Option(help="Of the day's requests that must meet the SLOs, ramps included.")
    ] = 0.99,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write to this file.")] = None,
) -> None:
    """Play 24 hours of load: scaling with its start-up time against a flat fleet.

    A machine costs from its launch and serves only after its start-up. Where scaling cannot keep
    the SLOs over the ramps, the flat fleet wins.
    """
    from lmi_bench.jobs.day import DayQuestion, run

    run(
        DayQuestion(
            recommendation=recommendation,
            load=load,
            shape=shape,
            peak_per_s=peak,
            least_share=least_share,
            start_up=start_up,
            capacity_per_s=capacity,
            price_usd_per_hour=price_per_hour,
            commit_discount=commit_discount,
            least_slo_share=least_slo_share,
        ),
        json_file=json_file,
    )
