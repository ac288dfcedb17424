"""`lmi-bench recommend`: which instance, TP degree, replicas and price meet the SLOs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from lmi_bench.errors import InputError

if TYPE_CHECKING:
    from lmi_bench.analysis.recommend_request import Objective

_LOAD, _LIMITS, _MACHINES = "Load", "Limits and objective", "Machines and prices"


def recommend(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[RUN_DIR]...", help="Sweeps to calibrate on."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="A catalog name. [that of the run]"),
    ] = None,
    input_tokens: Annotated[
        int | None, typer.Option("--input-tokens", "--isl", help="Prompt length.")
    ] = None,
    output_tokens: Annotated[
        int | None, typer.Option("--output-tokens", "--osl", help="Tokens to generate.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Of the weights: float16, bfloat16, float8, int8, int4.")
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(help="Requests per second of the whole fleet.", rich_help_panel=_LOAD),
    ] = None,
    users: Annotated[
        int | None, typer.Option(help="People at once; needs --think-time.", rich_help_panel=_LOAD)
    ] = None,
    think_time: Annotated[
        float | None,
        typer.Option(
            "--think-time",
            help="Seconds between an answer and the next question.",
            rich_help_panel=_LOAD,
        ),
    ] = None,
    slo: Annotated[
        list[str] | None,
        typer.Option(
            help="Such as ttft_p90<=1s; repeatable. Exit 99 if out of reach.",
            rich_help_panel=_LIMITS,
        ),
    ] = None,
    objective: Annotated[
        str, typer.Option(help="cost, latency or throughput.", rich_help_panel=_LIMITS)
    ] = "cost",
    instance: Annotated[
        list[str] | None,
        typer.Option(
            help="Consider only this instance, or local; repeatable. [catalog, or the run's]",
            rich_help_panel=_MACHINES,
        ),
    ] = None,
    tensor_parallel: Annotated[
        list[int] | None,
        typer.Option(
            "--tp", help="Consider only this degree; repeatable.", rich_help_panel=_MACHINES
        ),
    ] = None,
    measured_on: Annotated[
        str | None,
        typer.Option(
            help="Instance that the runs' endpoint ran on, where the run does not say.",
            rich_help_panel=_MACHINES,
        ),
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(
            help="A file of `calibrate`, or tgi-2023, vllm-0.12, vllm-0.19. [tgi-2023]",
            rich_help_panel=_MACHINES,
        ),
    ] = None,
    price_per_hour: Annotated[
        float | None,
        typer.Option(help="USD per hour of `local`.", rich_help_panel=_MACHINES),
    ] = None,
    blended_ratio: Annotated[
        float,
        typer.Option(
            help="Input tokens per output token of the blended price.", rich_help_panel=_MACHINES
        ),
    ] = 3.0,
    discount: Annotated[
        float,
        typer.Option(help="Of the blended price, 0 to 1.", rich_help_panel=_MACHINES),
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the simulated load's draws.")] = 0,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the recommendation to this file.")
    ] = None,
) -> None:
    """Rank instances, TP degrees and replicas by cost, latency or throughput under SLOs.

    Without a load: one machine, as full as the limits allow. With a run, its levels calibrate
    the step-time model first.
    """
    from lmi_bench.cli.recommend_run import Question, run

    if objective not in ("cost", "latency", "throughput"):
        raise InputError(f"--objective {objective}: use cost, latency or throughput")
    code = run(
        Question(
            runs=tuple(runs or ()),
            model=model,
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            dtype=dtype,
            rate_per_s=rate,
            users=users,
            think_time_s=think_time,
            slos=tuple(slo or ()),
            objective=cast("Objective", objective),
            instances=tuple(instance or ()),
            degrees=tuple(tensor_parallel or ()),
            price_usd_per_hour=price_per_hour,
            blended_ratio=blended_ratio,
            discount=discount,
            seed=seed,
            measured_on=measured_on,
            profile=profile,
        ),
        json_file=json_file,
    )
    if code:
        raise typer.Exit(code)
