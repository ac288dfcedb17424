"""`lmi-bench recommend`: which instance, TP degree, replicas and price meet the SLOs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from lmi_bench.core.errors import InputError

if TYPE_CHECKING:
    from lmi_bench.analysis.fleet.attainment import Routing
    from lmi_bench.analysis.fleet.request import Objective
    from lmi_bench.catalog.prices import Platform

_LOAD, _LIMITS, _MACHINES = "Load", "Limits and objective", "Machines and prices"
_ENGINE = "Engine settings to choose from: values between commas, the best combination wins"


# What `--portfolio` takes beside its file; the rest stands in the file or is of one model.
_OF_A_PORTFOLIO = (
    "portfolio", "instance", "tensor_parallel", "profile", "prices", "platform", "region",
    "purchase", "commit_discount", "committed", "availability", "json_file",
)  # fmt: skip


def recommend(
    ctx: typer.Context,
    runs: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[RUN_DIR]...", help="Sweeps to calibrate on."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="A catalog name. (default: that of the run)"),
    ] = None,
    input_tokens: Annotated[
        int | None, typer.Option("--input-tokens", "--isl", help="Prompt length.")
    ] = None,
    output_tokens: Annotated[
        int | None, typer.Option("--output-tokens", "--osl", help="Tokens to generate.")
    ] = None,
    workload: Annotated[
        Path | None,
        typer.Option(
            metavar="S.yaml",
            help="A scenario, as `workload from` writes it: its lengths, rate and burstiness.",
            rich_help_panel=_LOAD,
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Of the weights: float16, bfloat16, float8, int8, int4, mxfp4. (default: the "
            "checkpoint's, at most 16 bits)",
            rich_help_panel=_ENGINE,
        ),
    ] = None,
    kv_dtype: Annotated[
        str | None,
        typer.Option(help="Of the KV cache: float16, float8, int8.", rich_help_panel=_ENGINE),
    ] = None,
    max_batch: Annotated[
        str | None,
        typer.Option(help="Sequences that run together.", rich_help_panel=_ENGINE),
    ] = None,
    prefill_tokens: Annotated[
        str | None,
        typer.Option(
            help="Prompt tokens of a step; the size of a chunk with --chunked on.",
            rich_help_panel=_ENGINE,
        ),
    ] = None,
    chunked: Annotated[
        str | None,
        typer.Option(help="Prompts split beside decoding: on, off.", rich_help_panel=_ENGINE),
    ] = None,
    memory_share: Annotated[
        str | None,
        typer.Option(help="Of a device that the engine takes, 0 to 1.", rich_help_panel=_ENGINE),
    ] = None,
    graphs: Annotated[
        str | None, typer.Option(help="CUDA graphs: on, off.", rich_help_panel=_ENGINE)
    ] = None,
    replicas: Annotated[
        str | None,
        typer.Option(
            help="Copies on a machine. (default: as many as fit)", rich_help_panel=_ENGINE
        ),
    ] = None,
    draft: Annotated[
        str | None,
        typer.Option(
            help="Speculation with ngram or a smaller model, beside none.", rich_help_panel=_ENGINE
        ),
    ] = None,
    draft_tokens: Annotated[
        int | None, typer.Option(help="Guessed a step. (default: 4)", rich_help_panel=_ENGINE)
    ] = None,
    draft_acceptance: Annotated[
        str | None,
        typer.Option(
            help="Chance that a guess holds, 0 to 1, or a run that measured it.",
            rich_help_panel=_ENGINE,
        ),
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
    vary: Annotated[
        str | None,
        typer.Option(
            metavar="rate=A..B",
            help="Also print the cheapest layout for every load from A to B req/s.",
            rich_help_panel=_LOAD,
        ),
    ] = None,
    routing: Annotated[
        str,
        typer.Option(
            help="Which copy answers: random, round-robin or least-outstanding.",
            rich_help_panel=_LOAD,
        ),
    ] = "random",
    objective: Annotated[
        str,
        typer.Option(
            help="cost (of a token at the load), cost-per-hour, cost-per-1m (at capacity), latency "
            "or throughput.",
            rich_help_panel=_LIMITS,
        ),
    ] = "cost",
    min_throughput: Annotated[
        float | None,
        typer.Option(
            help="Output tok/s that the fleet must be able to carry.", rich_help_panel=_LIMITS
        ),
    ] = None,
    max_usd_per_hour: Annotated[
        float | None, typer.Option(help="Of the fleet.", rich_help_panel=_LIMITS)
    ] = None,
    max_usd_per_month: Annotated[
        float | None, typer.Option(help="Of the fleet, 730 hours.", rich_help_panel=_LIMITS)
    ] = None,
    max_usd_per_1m: Annotated[
        float | None,
        typer.Option(help="Of 1M output tokens at the load.", rich_help_panel=_LIMITS),
    ] = None,
    availability: Annotated[
        str,
        typer.Option(
            help="none, n+1 (one machine may fail) or az:K (one of K zones).",
            rich_help_panel=_LIMITS,
        ),
    ] = "none",
    instance: Annotated[
        list[str] | None,
        typer.Option(
            help="Consider only this instance, or local; repeatable, or between commas. (default: "
            "all, or the run's)",
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
        list[str] | None,
        typer.Option(
            metavar="INSTANCE[:TP]",
            help="What the runs' endpoint ran on, where they do not say; once, or once a run.",
            rich_help_panel=_MACHINES,
        ),
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(
            help="A file of `calibrate`, or tgi-2023, vllm-0.12, vllm-0.19. (default: tgi-2023)",
            rich_help_panel=_MACHINES,
        ),
    ] = None,
    engine_version: Annotated[
        str | None,
        typer.Option(
            help="Of the engine that will serve; a profile of another version says so.",
            rich_help_panel=_MACHINES,
        ),
    ] = None,
    price_per_hour: Annotated[
        float | None,
        typer.Option(help="USD per hour of `local`.", rich_help_panel=_MACHINES),
    ] = None,
    prices: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.yaml",
            help="Your prices, over the catalog's: instance, usd_per_hour, region, date.",
            rich_help_panel=_MACHINES,
        ),
    ] = None,
    platform: Annotated[
        str,
        typer.Option(help="Whose prices: sagemaker or ec2.", rich_help_panel=_MACHINES),
    ] = "sagemaker",
    region: Annotated[
        list[str] | None,
        typer.Option(help="Only prices of this region; repeatable.", rich_help_panel=_MACHINES),
    ] = None,
    purchase: Annotated[
        str,
        typer.Option(help="on-demand, savings-plan, reserved or spot.", rich_help_panel=_MACHINES),
    ] = "on-demand",
    commit_discount: Annotated[
        float | None,
        typer.Option(
            help="Off the on-demand price, 0 to 1, where --prices has no rate.",
            rich_help_panel=_MACHINES,
        ),
    ] = None,
    committed: Annotated[
        int | None,
        typer.Option(
            help="Machines that are committed to, used or not. (default: as many as are needed)",
            rich_help_panel=_MACHINES,
        ),
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
    portfolio: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.yaml",
            help="Several models (models: [{model, rate_per_s, input_tokens, output_tokens, slo}]) "
            "on shared machines against an endpoint each.",
            rich_help_panel=_LOAD,
        ),
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Also print what would change the answer.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of the simulated load's draws.")] = 0,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the recommendation to this file.")
    ] = None,
) -> None:
    """Rank instances, TP degrees and replicas by cost, latency or throughput under SLOs.

    Without a load: one machine, as full as the limits allow. With a run, its levels calibrate
    the step-time model first.
    """
    from lmi_bench.jobs.basis import Question
    from lmi_bench.jobs.money import Money
    from lmi_bench.jobs.portfolio import run as run_portfolio
    from lmi_bench.jobs.recommend import run
    from lmi_bench.jobs.recommend_axes import AxisFlags

    if objective not in ("cost", "cost-per-hour", "cost-per-1m", "latency", "throughput"):
        raise InputError(
            f"--objective {objective}: use cost, cost-per-hour, cost-per-1m, latency or throughput"
        )
    if platform not in ("sagemaker", "ec2"):
        raise InputError(f"--platform {platform}: use sagemaker or ec2")
    money = Money(
        prices=prices,
        platform=cast("Platform", platform),
        regions=tuple(region or ()),
        purchase=purchase,
        commit_discount=commit_discount,
        committed=committed,
        availability=availability,
        min_throughput=min_throughput,
        max_usd_per_hour=max_usd_per_hour,
        max_usd_per_month=max_usd_per_month,
        max_usd_per_1m=max_usd_per_1m,
    )
    if portfolio is not None:
        if other := _given_beside(ctx, _OF_A_PORTFOLIO):
            raise InputError(
                f"--portfolio takes no {', '.join(other)}: models, loads, SLOs and number formats "
                "stand in its file, and the rest is planned for one model at a time"
            )
        run_portfolio(
            portfolio,
            instances=_listed(instance),
            degrees=tuple(tensor_parallel or ()),
            profile=profile,
            money=money,
            json_file=json_file,
        )
        return
    code = run(
        Question(
            runs=tuple(runs or ()),
            model=model,
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            workload=workload,
            engine=AxisFlags(
                dtype=dtype,
                kv_dtype=kv_dtype,
                draft=draft,
                draft_tokens=draft_tokens,
                draft_acceptance=draft_acceptance,
                max_batch=max_batch,
                prefill_tokens=prefill_tokens,
                chunked=chunked,
                memory_share=memory_share,
                graphs=graphs,
                replicas=replicas,
            ),
            rate_per_s=rate,
            users=users,
            think_time_s=think_time,
            slos=tuple(slo or ()),
            objective=cast("Objective", objective),
            instances=_listed(instance),
            degrees=tuple(tensor_parallel or ()),
            price_usd_per_hour=price_per_hour,
            blended_ratio=blended_ratio,
            discount=discount,
            seed=seed,
            measured_on=tuple(measured_on or ()),
            vary=vary,
            routing=cast("Routing", routing),
            explain=explain,
            money=money,
            profile=profile,
            engine_version=engine_version,
        ),
        json_file=json_file,
    )
    if code:
        raise typer.Exit(code)


def _listed(names: list[str] | None) -> tuple[str, ...]:
    """Names of a repeatable option, which may also stand between commas."""
    parts = (part.strip() for name in names or () for part in name.split(","))
    return tuple(part for part in parts if part)


def _given_beside(ctx: typer.Context, allowed: tuple[str, ...]) -> list[str]:
    """Options and arguments that stand on the command line and are none of these."""
    found = []
    for param in ctx.command.params:
        source = ctx.get_parameter_source(str(param.name))
        if param.name not in allowed and source is not None and source.name == "COMMANDLINE":
            named = param.opts[0].startswith("-")
            found.append(param.opts[0] if named else str(param.name).upper())
    return found
