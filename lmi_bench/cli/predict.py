"""`lmi-bench predict`: throughput and latency of a machine that is not rented yet."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_WORKLOAD, _COPY, _SPECULATION = "Workload", "Copies", "Speculative decoding"


def predict(
    model: Annotated[str, typer.Option("--model", "-m", help="A catalog name or a folder.")],
    instance: Annotated[str, typer.Option(help="Such as ml.g5.12xlarge, or local: this machine.")],
    input_tokens: Annotated[
        int | None, typer.Option("--input-tokens", "--isl", help="Prompt length.")
    ] = None,
    output_tokens: Annotated[
        int | None, typer.Option("--output-tokens", "--osl", help="Tokens to generate.")
    ] = None,
    tensor_parallel: Annotated[int, typer.Option("--tp", help="Devices of one copy.")] = 1,
    replicas: Annotated[int, typer.Option(min=1, help="Copies that share the load.")] = 1,
    concurrency: Annotated[
        str | None, typer.Option(help="Users of a closed loop, such as 1,8,64.")
    ] = None,
    rate: Annotated[
        str | None, typer.Option(help="Requests per second of an open loop, such as 0.5,2.")
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype",
            "--weight-dtype",
            help="Of the weights: float32, float16, bfloat16, float8, int8, int4, mxfp4. (default: "
            "the checkpoint's, at most 16 bits)",
        ),
    ] = None,
    kv_dtype: Annotated[
        str | None,
        typer.Option(
            help="Of the KV cache: float32, float16, float8, int8. (default: as the weights)"
        ),
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(
            help="A file of `calibrate`, or tgi-2023, vllm-0.12, vllm-0.19. (default: tgi-2023)"
        ),
    ] = None,
    prefix_hit: Annotated[
        float,
        typer.Option(
            min=0,
            max=1,
            help="Share of each prompt that the prefix cache holds already.",
            rich_help_panel=_WORKLOAD,
        ),
    ] = 0.0,
    mix: Annotated[
        str | None,
        typer.Option(
            help="Several kinds of request, IN/OUT[:SHARE],...: simulated.",
            rich_help_panel=_WORKLOAD,
        ),
    ] = None,
    input_lengths: Annotated[
        str | None,
        typer.Option(
            help="Drawn: uniform(LOW,HIGH), normal(MEAN,STD), lognormal(MEAN,STD). Simulated.",
            rich_help_panel=_WORKLOAD,
        ),
    ] = None,
    output_lengths: Annotated[
        str | None, typer.Option(help="Likewise, of the answers.", rich_help_panel=_WORKLOAD)
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Recorded traffic, Azure's CSV or Mooncake's JSON lines: simulated.",
            rich_help_panel=_WORKLOAD,
        ),
    ] = None,
    speed: Annotated[
        str | None,
        typer.Option(help="Of a trace: 1 as recorded, 2 twice as fast.", rich_help_panel=_WORKLOAD),
    ] = None,
    shared_prefix: Annotated[
        int,
        typer.Option(
            min=0,
            help="Tokens with which all prompts begin, behind a prefix cache: simulated.",
            rich_help_panel=_WORKLOAD,
        ),
    ] = 0,
    seed: Annotated[
        int, typer.Option(help="Of drawn lengths and arrivals.", rich_help_panel=_WORKLOAD)
    ] = 0,
    router: Annotated[
        str | None,
        typer.Option(
            help="Of replicas: round-robin, least-outstanding or random. Simulated.",
            rich_help_panel=_COPY,
        ),
    ] = None,
    draft: Annotated[
        str | None,
        typer.Option(
            help="ngram, or a smaller model with the same vocabulary.", rich_help_panel=_SPECULATION
        ),
    ] = None,
    draft_tokens: Annotated[
        int | None,
        typer.Option(help="Drafted tokens that a step verifies. [4]", rich_help_panel=_SPECULATION),
    ] = None,
    draft_acceptance: Annotated[
        str | None,
        typer.Option(
            help="Chance (0 to 1) that a drafted token holds, or a run that measured it.",
            rich_help_panel=_SPECULATION,
        ),
    ] = None,
    engine_version: Annotated[
        str | None,
        typer.Option(help="Of the engine that will serve; a profile of another version says so."),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the predictions to this file.")
    ] = None,
) -> None:
    """Predict throughput and latency with 80 % intervals, and what binds.

    Beyond 80 % of the predicted capacity an open loop of equal requests gets its capacity and no
    latency. Unequal requests, traces and routers are simulated over the engine's own scheduler.
    """
    from lmi_bench.jobs.predict import Question, run

    run(
        Question(
            model=model,
            instance=instance,
            tensor_parallel=tensor_parallel,
            replicas=replicas,
            dtype=dtype,
            kv_dtype=kv_dtype,
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            concurrencies=concurrency,
            rates=rate,
            profile=profile,
            engine_version=engine_version,
            prefix_hit=prefix_hit,
            mix=mix,
            input_lengths=input_lengths,
            output_lengths=output_lengths,
            trace=trace,
            speed=speed,
            shared_prefix=shared_prefix,
            seed=seed,
            router=router,
            draft=draft,
            draft_tokens=draft_tokens,
            draft_acceptance=draft_acceptance,
        ),
        json_file=json_file,
    )
