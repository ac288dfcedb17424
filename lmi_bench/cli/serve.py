"""`lmi-bench serve`: the bundled engine, or its simulation, behind LMI, OpenAI and TGI routes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from lmi_bench.cli.options.spread import spread_options
from lmi_bench.core.errors import InputError
from lmi_bench.core.option import Option
from lmi_bench.jobs.settings.engine import BatchingOptions, ModelOptions, stated_settings

_ENGINE = "Engine"
EXECUTORS = ("torch", "simulated")


@spread_options
def serve(
    *,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            help="torch: a demo model or a Hugging Face folder; simulated: a catalog name too. "
            "(default: that of the serving.properties, or demo-15m)",
        ),
    ] = None,
    executor: Annotated[
        str, typer.Option(help="torch computes; simulated takes the predicted time of each step.")
    ] = "torch",
    instance: Annotated[
        str | None, typer.Option(help="simulated: the instance, such as ml.g5.2xlarge.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8080,
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
    serving_properties: Annotated[
        Path | None,
        typer.Option(
            "--serving-properties",
            metavar="PATH",
            help="Settings of an LMI container: the file, its folder, or a model.tar.gz.",
        ),
    ] = None,
    djl_version: Annotated[
        str,
        typer.Option(
            help="Version of djl-serving that --serving-properties was written for, as 0.26.0."
        ),
    ] = "0.36.0",
    model_py: Annotated[
        Path | None,
        typer.Option(
            "--model-py",
            help="Program with @input_formatter and @output_formatter for the LMI routes; it is "
            "run only if named here.",
        ),
    ] = None,
    model_loading_timeout: Annotated[
        int | None,
        typer.Option(help="Seconds after which loading is given up. (default: none)"),
    ] = None,
    model_options: ModelOptions,
    batching: BatchingOptions,
    step_trace: Annotated[
        Path | None,
        Option(
            "File for a Chrome trace of the engine's steps and requests.",
            old_names=("--trace",),
            group=_ENGINE,
        ),
    ] = None,
) -> None:
    """Serve a model over HTTP: LMI, OpenAI, TGI and SageMaker's runtime paths, until Ctrl-C.

    With --executor simulated --instance ml.g5.2xlarge --model llama-2-7b it answers with the
    predicted timing of that instance and needs no GPU. TGI's limits are read from the
    environment where no flag states them: MAX_CONCURRENT_REQUESTS, MAX_TOTAL_TOKENS,
    MAX_INPUT_TOKENS (or MAX_INPUT_LENGTH), MAX_BATCH_PREFILL_TOKENS, MAX_BATCH_TOTAL_TOKENS.
    With --serving-properties, or where OPTION_ variables are set, the settings are read as an LMI
    container reads them instead: a flag first, then the file, then the environment.
    """
    from lmi_bench.cli.console import note
    from lmi_bench.core.scenario import DEFAULT_MODEL, parse_scenario
    from lmi_bench.jobs.serve import run
    from lmi_bench.jobs.serving_file import is_lmi_environment, model_py_of, read_serving_file
    from lmi_bench.targets.tgi_env import limits_from_environment

    if executor not in EXECUTORS:
        raise InputError(f"--executor {executor}: use one of {', '.join(EXECUTORS)}")
    if executor == "simulated" and instance is None:
        raise InputError("--executor simulated needs --instance, such as ml.g5.2xlarge")
    if executor == "torch" and instance is not None:
        raise InputError(f"--instance {instance} goes with --executor simulated")
    stated = stated_settings(model_options, batching)
    if serving_properties is not None or is_lmi_environment(os.environ):
        found = read_serving_file(
            serving_properties,
            os.environ,
            simulated=executor == "simulated",
            note=note,
            djl_version=djl_version,
        )
        stated = {**found.engine, **stated}  # a flag wins
        model = model or found.model
        if model_py is None and (beside := model_py_of(serving_properties)) is not None:
            note(f"{beside} is not run: --model-py {beside} uses its formatters")
        model_loading_timeout = model_loading_timeout or found.loading_timeout_s
    else:
        for setting, (variable, value) in limits_from_environment(os.environ).items():
            if setting not in stated:
                stated[setting] = value
                note(f"{variable}={value} from the environment")
    settings = parse_scenario({"engine": stated}, source="serve").engine
    run(
        model or DEFAULT_MODEL,
        settings,
        instance=instance,
        host=host,
        port=port,
        lmi_replies=lmi_replies,
        require_signature=require_signature,
        loading_timeout_s=model_loading_timeout,
        trace=step_trace,
        model_py=model_py,
    )
