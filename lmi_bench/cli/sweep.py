"""`lmi-bench sweep`: measure a target over concurrency or request rate."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Annotated, Any

import typer

from lmi_bench.cli.options.load import LoadOptions, SessionOptions, WorkloadOptions
from lmi_bench.cli.options.spread import spread_options
from lmi_bench.core.errors import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_SLO_MISSED,
    EXIT_TERMINATED,
    InputError,
)
from lmi_bench.jobs.settings.engine import BatchingOptions, ModelOptions, stated_settings

_TARGET, _LOAD, _CLIENT, _RUN = "Target", "Load", "Load generator", "Run"


@spread_options
def sweep(
    *,
    scenario: Annotated[
        str | None,
        typer.Argument(
            metavar="[SCENARIO.yaml|TARGET]",
            help="A scenario file, a URL, a SageMaker endpoint, or an instance to simulate.",
        ),
    ] = None,
    matrix: Annotated[
        Path | None,
        typer.Option(
            help="A file of targets and payloads: every payload on every target, one report.",
            rich_help_panel=_TARGET,
        ),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            "--target",
            "--base-url",
            help="engine (bundled, this machine), sim:INSTANCE (virtual time), a URL, or "
            "sagemaker:NAME.",
            rich_help_panel=_TARGET,
        ),
    ] = None,
    protocol: Annotated[
        str | None,
        typer.Option(
            help="Of an endpoint: openai, openai-chat, lmi or tgi. (default: found by asking)",
            rich_help_panel=_TARGET,
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            help="A catalog name, a folder, or the name that the endpoint knows.",
            rich_help_panel=_TARGET,
        ),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="LMI_BENCH_API_KEY",
            help="Sent as a bearer token; never written down.",
            rich_help_panel=_TARGET,
        ),
    ] = None,
    header: Annotated[
        list[str] | None,
        typer.Option("--header", "-H", help="'Name: value'; repeatable.", rich_help_panel=_TARGET),
    ] = None,
    stream: Annotated[
        bool | None,
        typer.Option(
            "--stream/--no-stream",
            help="Without streaming only the total time of an answer is known.",
            rich_help_panel=_TARGET,
        ),
    ] = None,
    sagemaker_endpoint_url: Annotated[
        str | None,
        typer.Option(help="SageMaker's runtime elsewhere than at AWS.", rich_help_panel=_TARGET),
    ] = None,
    inference_component: Annotated[
        str | None, typer.Option(help="Of a SageMaker endpoint.", rich_help_panel=_TARGET)
    ] = None,
    target_variant: Annotated[
        str | None, typer.Option(help="Of a SageMaker endpoint.", rich_help_panel=_TARGET)
    ] = None,
    workload: WorkloadOptions,
    sessions: SessionOptions,
    load: LoadOptions,
    timeout: Annotated[
        str | None,
        typer.Option(
            help="Seconds after which a request fails and the sweep ends, or none. "
            "[SageMaker: 480 streaming, 60 without; elsewhere none]",
            rich_help_panel=_LOAD,
        ),
    ] = None,
    first_token_timeout: Annotated[
        float | None,
        typer.Option(
            help="Seconds after which a request without a token fails and the sweep ends.",
            rich_help_panel=_LOAD,
        ),
    ] = None,
    model_options: ModelOptions,
    batching: BatchingOptions,
    workers: Annotated[
        str,
        typer.Option(
            help="Processes that send to an endpoint, or auto: more when a core is nearly full.",
            rich_help_panel=_CLIENT,
        ),
    ] = "auto",
    timestamps: Annotated[
        str | None,
        typer.Option(
            help="Whose receive time counts: kernel (default where there is one) or user.",
            rich_help_panel=_CLIENT,
        ),
    ] = None,
    receive: Annotated[
        str | None,
        typer.Option(
            help="Who reads the sockets: native (C, built at first use), python, or auto.",
            rich_help_panel=_CLIENT,
        ),
    ] = None,
    retries: Annotated[
        str | None,
        typer.Option(
            help="aws-standard: try transient failures again as AWS SDKs do. (default: none)",
            rich_help_panel=_CLIENT,
        ),
    ] = None,
    connections: Annotated[
        str | None,
        typer.Option(
            help="reuse: kept open, one for each request at once; per-request: a new one each; "
            "a number: at most so many. (default: reuse)",
            rich_help_panel=_CLIENT,
        ),
    ] = None,
    metrics_url: Annotated[
        list[str] | None,
        typer.Option(
            help="A replica's Prometheus page; repeatable. (default: the target's /metrics)",
            rich_help_panel=_CLIENT,
        ),
    ] = None,
    cloudwatch_wait: Annotated[
        float,
        typer.Option(
            help="SageMaker: seconds to wait for CloudWatch's last minutes when the sweep is over.",
            rich_help_panel=_CLIENT,
        ),
    ] = 120.0,
    name: Annotated[
        str | None, typer.Option(help="What the report calls this run.", rich_help_panel=_RUN)
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(help="Of lengths, prompts and arrivals. (default: 0)", rich_help_panel=_RUN),
    ] = None,
    slo: Annotated[
        list[str] | None,
        typer.Option(
            help="Such as ttft_p90<=1s; repeatable. Exit 99 if no level meets them all.",
            rich_help_panel=_RUN,
        ),
    ] = None,
    price_per_hour: Annotated[
        float | None,
        typer.Option(help="USD an hour of the whole target.", rich_help_panel=_RUN),
    ] = None,
    instance: Annotated[
        str | None,
        typer.Option(help="What a URL runs on: its price is the catalog's.", rich_help_panel=_RUN),
    ] = None,
    max_spend: Annotated[
        float | None,
        typer.Option(help="Stop before the sweep has cost more, in USD.", rich_help_panel=_RUN),
    ] = None,
    max_time: Annotated[
        str | None,
        typer.Option(
            help="Begin no level that would end later: 90s, 10m, or none. (default: 5m where "
            "levels are picked as the sweep goes, elsewhere none)",
            rich_help_panel=_RUN,
        ),
    ] = None,
    goodput: Annotated[
        list[str] | None,
        typer.Option(
            help="Limits of a single request in ms, as vLLM writes them: ttft:500 tpot:15. Without "
            "--slo exit 99 if no level has 90 % of its requests within them.",
            rich_help_panel=_RUN,
        ),
    ] = None,
    failures: Annotated[
        str,
        typer.Option(
            help="For SLOs: exclude failed requests, or count them as infinite.",
            rich_help_panel=_RUN,
        ),
    ] = "exclude",
    max_errors: Annotated[
        str,
        typer.Option(
            help="Share of failed requests beyond which a level ends, and a list of levels with "
            "it: 10%, or none.",
            rich_help_panel=_RUN,
        ),
    ] = "50%",
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Run folder.", rich_help_panel=_RUN)
    ] = None,
    step_trace: Annotated[
        Path | None,
        typer.Option(
            "--step-trace",
            help="Chrome trace of the engine's steps and requests.",
            rich_help_panel=_RUN,
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Go on where the run folder ends, if it exists.", rich_help_panel=_RUN
        ),
    ] = False,
) -> None:
    """Measure a target over concurrency or request rate: curves, knee, and a run folder.

    Flags win over the scenario file, which wins over the defaults.
    """
    from lmi_bench.cli.console import terminal
    from lmi_bench.cli.matrix_print import print_cell, print_matrix
    from lmi_bench.cli.sweep_print import print_sweep
    from lmi_bench.cli.termination import termination_as_interrupt
    from lmi_bench.jobs.matrix import MatrixResult, run_matrix
    from lmi_bench.jobs.sweep.limits import Budget
    from lmi_bench.jobs.sweep.result import SweepResult
    from lmi_bench.jobs.sweep.run import (
        SweepOptions,
        read_max_errors,
        read_slo_options,
        read_timeout,
    )
    from lmi_bench.jobs.sweep.run import sweep as run
    from lmi_bench.jobs.sweep.watch import Client, read_workers
    from lmi_bench.targets.access import Access, read_headers

    overrides: dict[str, Any] = {
        "name": name,
        "model": model,
        "target": target,
        "protocol": protocol,
        "stream": stream,
        "sagemaker.endpoint_url": sagemaker_endpoint_url,
        "sagemaker.inference_component": inference_component,
        "sagemaker.target_variant": target_variant,
        **workload.fields(),
        **load.fields(),
        **{name: value for name, value in sessions.fields().items() if value is not None},
        "client.timestamps": timestamps,
        "client.receive": receive,
        "client.first_token_timeout_s": first_token_timeout,
        "client.retries": retries,
        "client.connections": _connections(connections),
        "seed": seed,
        "slo": None if not slo else tuple(slo),
    }
    for setting, value in stated_settings(model_options, batching).items():
        overrides[f"engine.{setting}"] = value
    if timeout is not None:
        overrides["timeout_s"] = read_timeout(timeout)
    options = SweepOptions(
        access=Access(api_key, read_headers(header or ())),
        budget=Budget(price_per_hour, instance, max_spend),
        slo=read_slo_options(" ".join(goodput or ()), failures),
        client=Client(read_workers(workers), tuple(metrics_url or ())),
        trace=step_trace,
        cloudwatch_wait_s=cloudwatch_wait,
        max_time=max_time,
        max_error_share=read_max_errors(max_errors),
    )
    if matrix is not None and (scenario is not None or target is not None):
        raise InputError("--matrix names its targets: leave SCENARIO and --target out")
    outcome: SweepResult | MatrixResult
    with termination_as_interrupt() as is_terminated:
        try:
            with terminal() as listener:
                if matrix is None:
                    outcome = run(scenario, overrides, options, listener, out=out, resume=resume)
                else:
                    show = functools.partial(print_cell, listener)
                    outcome = run_matrix(
                        matrix, overrides, options, listener, show, out=out, resume=resume
                    )
            if isinstance(outcome, SweepResult):
                print_sweep(outcome)
            else:
                print_matrix(outcome)
        except KeyboardInterrupt:  # before the run had a folder
            if not is_terminated():
                raise
            raise typer.Exit(EXIT_TERMINATED) from None
    if outcome.interrupted:
        raise typer.Exit(EXIT_TERMINATED if is_terminated() else EXIT_INTERRUPTED)
    if outcome.failed:
        raise typer.Exit(EXIT_FAILED)
    if outcome.slo_missed:
        raise typer.Exit(EXIT_SLO_MISSED)


def _connections(text: str | None) -> int | str | None:
    """A number of connections, or how they are used."""
    return int(text) if text is not None and text.isdecimal() else text
