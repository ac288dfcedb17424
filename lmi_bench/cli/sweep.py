"""`lmi-bench sweep`: measure a target over concurrency or request rate."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from lmi_bench.cli.engine_options import BatchingOptions, ModelOptions, stated_settings
from lmi_bench.cli.option_groups import spread_options
from lmi_bench.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_SLO_MISSED, InputError

_TARGET, _WORKLOAD, _LOAD, _CLIENT, _RUN = (
    "Target",
    "Workload",
    "Load",
    "Load generator",
    "Run",
)


@spread_options
def sweep(
    *,
    scenario: Annotated[
        str | None,
        typer.Argument(
            metavar="[SCENARIO.yaml|URL|sagemaker:NAME]",
            help="A scenario file, a URL, or a SageMaker endpoint to measure.",
        ),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
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
    input_tokens: Annotated[
        int | None,
        typer.Option("--input-tokens", "--isl", help="Prompt length.", rich_help_panel=_WORKLOAD),
    ] = None,
    output_tokens: Annotated[
        int | None,
        typer.Option(
            "--output-tokens", "--osl", help="Tokens to generate.", rich_help_panel=_WORKLOAD
        ),
    ] = None,
    mix: Annotated[
        str | None,
        typer.Option(
            help="Several kinds of request: IN/OUT[:SHARE],... such as 20/500,500/20.",
            rich_help_panel=_WORKLOAD,
        ),
    ] = None,
    dataset: Annotated[
        Path | None,
        typer.Option(
            help="JSON lines with `prompt` and, if wanted, `output_tokens`.",
            rich_help_panel=_WORKLOAD,
        ),
    ] = None,
    input_lengths: Annotated[
        str | None,
        typer.Option(
            help="Prompt lengths: uniform(LOW,HIGH), normal(MEAN,STD), lognormal(MEAN,STD).",
            rich_help_panel=_WORKLOAD,
        ),
    ] = None,
    output_lengths: Annotated[
        str | None,
        typer.Option(help="Likewise, of the answers.", rich_help_panel=_WORKLOAD),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Recorded traffic: Azure's CSV or Mooncake's JSON lines.",
            rich_help_panel=_WORKLOAD,
        ),
    ] = None,
    speed: Annotated[
        str | None,
        typer.Option(
            help="Of a trace, a level each: 1 as recorded, 2 twice as fast.",
            rich_help_panel=_LOAD,
        ),
    ] = None,
    ignore_eos: Annotated[
        bool | None,
        typer.Option(
            "--ignore-eos/--stop-at-eos",
            help="Generate the asked length whatever the model says.",
            rich_help_panel=_WORKLOAD,
        ),
    ] = None,
    reuse_prompts: Annotated[
        bool | None,
        typer.Option(
            "--reuse-prompts/--fresh-prompts",
            help="Send the same prompts in every run (flatters prefix caches).",
            rich_help_panel=_WORKLOAD,
        ),
    ] = None,
    concurrency: Annotated[
        str | None,
        typer.Option(
            "--concurrency",
            "--max-concurrency",
            help="Closed loop: users at once, a level each: 1,2,4,8; or auto (doubling until full, "
            "then finer round the knee).",
            rich_help_panel=_LOAD,
        ),
    ] = None,
    rate: Annotated[
        str | None,
        typer.Option(
            "--rate",
            "--request-rate",
            help="Open loop: requests per second, a level each: 0.5,1,2.",
            rich_help_panel=_LOAD,
        ),
    ] = None,
    search: Annotated[
        str | None,
        typer.Option(
            help="Find the highest concurrency or rate that meets every --slo, to 5 %.",
            rich_help_panel=_LOAD,
        ),
    ] = None,
    arrivals: Annotated[
        str | None,
        typer.Option(help="Of an open loop: poisson, constant or gamma.", rich_help_panel=_LOAD),
    ] = None,
    burstiness: Annotated[
        float | None,
        typer.Option(
            help="Of gamma arrivals: 1 is Poisson, less is burstier.", rich_help_panel=_LOAD
        ),
    ] = None,
    ramp: Annotated[
        float | None,
        typer.Option(
            "--ramp",
            help="Seconds over which an open loop's rate rises from 0.",
            rich_help_panel=_LOAD,
        ),
    ] = None,
    repeat: Annotated[
        int | None,
        typer.Option(help="Run every level this often, in rounds.", rich_help_panel=_LOAD),
    ] = None,
    until: Annotated[
        str | None,
        typer.Option(
            help="Repeat until a metric is known well enough: 'ttft_p90 +-5%'.",
            rich_help_panel=_LOAD,
        ),
    ] = None,
    requests_per_user: Annotated[
        int | None,
        typer.Option(help="Closed loop: a level sends this many a user.", rich_help_panel=_LOAD),
    ] = None,
    requests_per_level: Annotated[
        int | None,
        typer.Option(
            "--requests-per-level",
            "--num-prompts",
            help="Requests of every level.",
            rich_help_panel=_LOAD,
        ),
    ] = None,
    duration: Annotated[
        float | None,
        typer.Option("--duration", help="Seconds that a level sends for.", rich_help_panel=_LOAD),
    ] = None,
    warmup_requests: Annotated[
        int | None,
        typer.Option(help="Sent before each level and left out of it.", rich_help_panel=_LOAD),
    ] = None,
    timeout: Annotated[
        str | None,
        typer.Option(
            help="Seconds after which a request fails and the sweep ends, or none. "
            "[60; 480 for a stream from SageMaker]",
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
    retries: Annotated[
        str | None,
        typer.Option(
            help="aws-standard: try transient failures again as AWS SDKs do. (default: none)",
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
    name: Annotated[
        str | None, typer.Option(help="What the report calls this run.", rich_help_panel=_RUN)
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Of lengths, prompts and arrivals.", rich_help_panel=_RUN)
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
    goodput: Annotated[
        list[str] | None,
        typer.Option(
            help="Limits of a single request in ms, as vLLM writes them: ttft:500 tpot:15.",
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
    from lmi_bench.cli.access import Access, read_headers
    from lmi_bench.cli.client import Client, read_workers
    from lmi_bench.cli.spend import Budget
    from lmi_bench.cli.sweep_run import run

    overrides: dict[str, Any] = {
        "name": name,
        "model": model,
        "target": target,
        "protocol": protocol,
        "stream": stream,
        "sagemaker.endpoint_url": sagemaker_endpoint_url,
        "sagemaker.inference_component": inference_component,
        "sagemaker.target_variant": target_variant,
        "workload.input_tokens": input_tokens,
        "workload.output_tokens": output_tokens,
        "workload.mix": None if mix is None else parse_mix(mix),
        "workload.dataset": None if dataset is None else str(dataset),
        "workload.input_lengths": input_lengths,
        "workload.output_lengths": output_lengths,
        "workload.trace": None if trace is None else str(trace),
        "load.speed": None if speed is None else _numbers("--speed", speed),
        "workload.ignore_eos": ignore_eos,
        "workload.reuse_prompts": reuse_prompts,
        "load.concurrency": _concurrency(concurrency),
        "load.rate_per_s": None if rate is None else _numbers("--rate", rate),
        "load.search": search,
        "load.arrivals": "gamma" if arrivals is None and burstiness is not None else arrivals,
        "load.burstiness": burstiness,
        "load.ramp_s": ramp,
        "load.repeat": repeat,
        "load.until": until,
        "load.requests_per_user": requests_per_user,
        "load.requests_per_level": requests_per_level,
        "load.duration_s": duration,
        "load.warmup_requests": warmup_requests,
        "client.timestamps": timestamps,
        "client.retries": retries,
        "seed": seed,
        "slo": None if not slo else tuple(slo),
    }
    for setting, value in stated_settings(model_options, batching).items():
        overrides[f"engine.{setting}"] = value
    access = Access(api_key, read_headers(header or ()))
    budget = Budget(price_per_hour, instance, max_spend)
    outcome = run(
        scenario,
        overrides,
        timeout=timeout,
        out=out,
        resume=resume,
        access=access,
        budget=budget,
        goodput=" ".join(goodput or ()),
        failures=failures,
        trace=step_trace,
        client=Client(read_workers(workers), tuple(metrics_url or ())),
    )
    if outcome.interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)
    if outcome.nothing_answered:
        raise typer.Exit(EXIT_FAILED)
    if outcome.slo_missed:
        raise typer.Exit(EXIT_SLO_MISSED)


def _concurrency(text: str | None) -> list[float | int] | str | None:
    return text if text in (None, "auto") else _numbers("--concurrency", text)


def _numbers(flag: str, text: str) -> list[float | int]:
    """The numbers of a comma list; raises InputError that names the flag and the part."""
    numbers: list[float | int] = []
    for part in text.split(","):
        try:
            value = float(part)
        except ValueError:
            raise InputError(f"{flag}: {part!r} is not a number; write for example 1,2,4") from None
        numbers.append(int(value) if value.is_integer() else value)
    return numbers


def parse_mix(text: str) -> list[dict[str, float]]:
    """Kinds of request from IN/OUT[:SHARE],...; raises InputError where one is not understood.

    >>> parse_mix("20/500,500/20:3")[1]
    {'input_tokens': 500, 'output_tokens': 20, 'share': 3.0}
    """
    kinds: list[dict[str, float]] = []
    for part in text.split(","):
        lengths, _, share = part.partition(":")
        input_text, _, output_text = lengths.partition("/")
        try:
            kind = {"input_tokens": int(input_text), "output_tokens": int(output_text)}
            kinds.append({**kind, "share": float(share or 1)})
        except ValueError:
            raise InputError(
                f"--mix: {part!r} is not understood; write IN/OUT[:SHARE], such as 20/500:2"
            ) from None
    return kinds
