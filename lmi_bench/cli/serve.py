"""`lmi-bench serve`: the bundled engine, or its simulation, behind LMI and OpenAI routes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from lmi_bench.errors import InputError

_ENGINE = "Engine"
EXECUTORS = ("torch", "simulated")


def serve(
    model: Annotated[
        str,
        typer.Option(
            "--model",
            "-m",
            help="torch: a demo model or a Hugging Face folder; simulated: a catalog name too.",
        ),
    ] = "demo-15m",
    executor: Annotated[
        str, typer.Option(help="torch computes; simulated takes the predicted time of each step.")
    ] = "torch",
    instance: Annotated[
        str | None, typer.Option(help="simulated: the instance, such as ml.g5.2xlarge.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one.")] = 8080,
    lmi_replies: Annotated[
        str,
        typer.Option(
            help="LMI routes reply as djl-serving does: rolling (to 0.34) or async (since 0.35)."
        ),
    ] = "rolling",
    require_signature: Annotated[
        bool,
        typer.Option(
            "--require-signature",
            help="SageMaker's paths want requests signed with this AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY.",
        ),
    ] = False,
    tensor_parallel: Annotated[
        str,
        typer.Option(
            "--tp",
            help="Tensor-parallel degree, or max: all devices or cores.",
            rich_help_panel=_ENGINE,
        ),
    ] = "1",
    replicas: Annotated[
        int, typer.Option(help="Copies of the model behind one router.", rich_help_panel=_ENGINE)
    ] = 1,
    router: Annotated[
        str,
        typer.Option(
            help="Of replicas: round-robin, least-outstanding or random.", rich_help_panel=_ENGINE
        ),
    ] = "round-robin",
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16.", rich_help_panel=_ENGINE)
    ] = None,
    kv_dtype: Annotated[
        str | None,
        typer.Option(
            help="KV cache of the bundled engine: float32 or bfloat16. [as the weights]",
            rich_help_panel=_ENGINE,
        ),
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(help="Batching: rolling, dynamic or none.", rich_help_panel=_ENGINE),
    ] = None,
    kv_layout: Annotated[
        str | None, typer.Option(help="KV cache: paged or contiguous.", rich_help_panel=_ENGINE)
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Of dynamic batching.", rich_help_panel=_ENGINE)
    ] = None,
    max_batch_delay_ms: Annotated[
        float | None, typer.Option(help="Of dynamic batching.", rich_help_panel=_ENGINE)
    ] = None,
    max_rolling_batch_size: Annotated[
        int | None,
        typer.Option(help="Most sequences in the rolling batch.", rich_help_panel=_ENGINE),
    ] = None,
    max_rolling_batch_prefill_tokens: Annotated[
        int | None, typer.Option(help="Most prompt tokens of a step.", rich_help_panel=_ENGINE)
    ] = None,
    chunked_prefill: Annotated[
        bool | None,
        typer.Option(
            "--chunked-prefill/--whole-prefill",
            help="Mix prompt chunks with decoding instead of pausing it.",
            rich_help_panel=_ENGINE,
        ),
    ] = None,
    max_concurrent_requests: Annotated[
        int | None,
        typer.Option(help="Requests beyond it are refused at once.", rich_help_panel=_ENGINE),
    ] = None,
    max_model_len: Annotated[
        int | None,
        typer.Option(help="Most tokens of a request, both ways.", rich_help_panel=_ENGINE),
    ] = None,
    num_blocks: Annotated[
        int | None, typer.Option(help="KV-cache blocks. [from memory]", rich_help_panel=_ENGINE)
    ] = None,
    block_size: Annotated[
        int | None, typer.Option(help="Tokens of a KV-cache block.", rich_help_panel=_ENGINE)
    ] = None,
    memory_share: Annotated[
        float | None,
        typer.Option(help="Share of the free memory for the KV cache.", rich_help_panel=_ENGINE),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(help="CPU threads of the engine.", rich_help_panel=_ENGINE)
    ] = None,
    step_trace: Annotated[
        Path | None,
        typer.Option(
            "--step-trace",
            help="Chrome trace of the engine's steps and requests.",
            rich_help_panel=_ENGINE,
        ),
    ] = None,
    max_input_tokens: Annotated[
        int | None, typer.Option(help="Longest prompt.", rich_help_panel=_ENGINE)
    ] = None,
    max_batch_total_tokens: Annotated[
        int | None,
        typer.Option(help="Tokens that the KV cache may hold.", rich_help_panel=_ENGINE),
    ] = None,
    prefix_caching: Annotated[
        bool | None,
        typer.Option(
            "--prefix-caching/--no-prefix-caching",
            help="Share computed blocks between prompts that begin alike.",
            rich_help_panel=_ENGINE,
        ),
    ] = None,
    draft: Annotated[
        str | None,
        typer.Option(
            help="Speculative decoding: ngram, or a smaller model with the same vocabulary.",
            rich_help_panel=_ENGINE,
        ),
    ] = None,
    draft_tokens: Annotated[
        int | None,
        typer.Option(help="Drafted tokens that a step verifies. [4]", rich_help_panel=_ENGINE),
    ] = None,
    draft_acceptance: Annotated[
        float | None,
        typer.Option(
            help="Simulated: the chance (0 to 1) that a drafted token holds.",
            rich_help_panel=_ENGINE,
        ),
    ] = None,
) -> None:
    """Serve a model over HTTP: LMI, OpenAI and SageMaker's runtime paths, until Ctrl-C.

    With --executor simulated --instance ml.g5.2xlarge --model llama-2-7b it answers with the
    predicted timing of that instance and needs no GPU. TGI's limits are read from the
    environment where no flag states them: MAX_CONCURRENT_REQUESTS, MAX_TOTAL_TOKENS,
    MAX_INPUT_TOKENS (or MAX_INPUT_LENGTH), MAX_BATCH_PREFILL_TOKENS, MAX_BATCH_TOTAL_TOKENS.
    """
    from lmi_bench.cli.console import note
    from lmi_bench.cli.serve_run import run
    from lmi_bench.cli.sweep import parse_degree
    from lmi_bench.cli.tgi_env import limits_from_environment
    from lmi_bench.scenario import parse_scenario

    if executor not in EXECUTORS:
        raise InputError(f"--executor {executor}: use one of {', '.join(EXECUTORS)}")
    if executor == "simulated" and instance is None:
        raise InputError("--executor simulated needs --instance, such as ml.g5.2xlarge")
    if executor == "torch" and instance is not None:
        raise InputError(f"--instance {instance} goes with --executor simulated")
    stated = {
        "policy": policy,
        "kv_layout": kv_layout,
        "batch_size": batch_size,
        "max_batch_delay_ms": max_batch_delay_ms,
        "max_rolling_batch_size": max_rolling_batch_size,
        "max_rolling_batch_prefill_tokens": max_rolling_batch_prefill_tokens,
        "chunked_prefill": chunked_prefill,
        "max_concurrent_requests": max_concurrent_requests,
        "dtype": dtype,
        "kv_dtype": kv_dtype,
        "tensor_parallel": parse_degree(tensor_parallel),
        "replicas": replicas,
        "router": router.replace("-", "_"),
        "num_blocks": num_blocks,
        "block_size": block_size,
        "max_model_len": max_model_len,
        "memory_share": memory_share,
        "threads": threads,
        "max_input_tokens": max_input_tokens,
        "max_batch_total_tokens": max_batch_total_tokens,
        "prefix_caching": prefix_caching,
        "draft": draft,
        "draft_tokens": draft_tokens,
        "draft_acceptance": draft_acceptance,
    }
    for setting, (variable, value) in limits_from_environment(os.environ).items():
        if stated[setting] is None:  # a flag wins
            stated[setting] = value
            note(f"{variable}={value} from the environment")
    settings = parse_scenario(
        {"engine": {key: value for key, value in stated.items() if value is not None}},
        source="serve",
    ).engine
    run(
        model,
        settings,
        instance=instance,
        host=host,
        port=port,
        lmi_replies=lmi_replies,
        require_signature=require_signature,
        trace=step_trace,
    )
