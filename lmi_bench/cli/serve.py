"""`lmi-bench serve`: the bundled engine, or its simulation, behind LMI and OpenAI routes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from lmi_bench.cli.engine_options import BatchingOptions, ModelOptions, stated_settings
from lmi_bench.cli.option_groups import spread_options
from lmi_bench.errors import InputError

_ENGINE = "Engine"
EXECUTORS = ("torch", "simulated")


@spread_options
def serve(
    *,
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
    model_options: ModelOptions,
    batching: BatchingOptions,
    step_trace: Annotated[
        Path | None,
        typer.Option(
            "--step-trace",
            help="Chrome trace of the engine's steps and requests.",
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
    from lmi_bench.cli.tgi_env import limits_from_environment
    from lmi_bench.scenario import parse_scenario

    if executor not in EXECUTORS:
        raise InputError(f"--executor {executor}: use one of {', '.join(EXECUTORS)}")
    if executor == "simulated" and instance is None:
        raise InputError("--executor simulated needs --instance, such as ml.g5.2xlarge")
    if executor == "torch" and instance is not None:
        raise InputError(f"--instance {instance} goes with --executor simulated")
    stated = stated_settings(model_options, batching)
    for setting, (variable, value) in limits_from_environment(os.environ).items():
        if setting not in stated:  # a flag wins
            stated[setting] = value
            note(f"{variable}={value} from the environment")
    settings = parse_scenario({"engine": stated}, source="serve").engine
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
