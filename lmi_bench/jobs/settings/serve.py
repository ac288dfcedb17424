"""What `serve` is asked."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Final

from lmi_bench.core.errors import InputError
from lmi_bench.core.option import Option
from lmi_bench.jobs.settings.engine import BatchingOptions, ModelOptions

EXECUTORS: Final = ("torch", "simulated")


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """A model, where and how it is served, and the engine behind it."""

    model: Annotated[
        str | None,
        Option(
            "Demo model or Hugging Face folder. Simulated: a catalog name too.",
            ("--model", "-m"),
            default="the model of the serving.properties, or demo-15m",
        ),
    ] = None
    executor: Annotated[
        str,
        Option("Executor: torch computes; simulated waits for the predicted time of each step."),
    ] = "torch"
    instance: Annotated[str | None, Option("Instance to simulate, such as ml.g5.2xlarge.")] = None
    host: Annotated[str, Option("Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, Option("Port to listen on; 0 takes a free one.")] = 8080
    lmi_replies: Annotated[
        str,
        Option(
            "Replies of the LMI routes, as djl-serving's: rolling (to 0.34) or async (0.35 on)."
        ),
    ] = "rolling"
    require_signature: Annotated[
        bool,
        Option(
            "SageMaker's paths require requests signed with this AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY.",
            ("--require-signature",),
        ),
    ] = False
    serving_properties: Annotated[
        Path | None,
        Option(
            "Settings of an LMI container: a serving.properties, its folder, or a model.tar.gz.",
            metavar="PATH",
        ),
    ] = None
    djl_version: Annotated[
        str,
        Option("Version of djl-serving that --serving-properties is written for, such as 0.26.0."),
    ] = "0.36.0"
    model_py: Annotated[
        Path | None,
        Option(
            "Program with @input_formatter and @output_formatter for the LMI routes; it runs only "
            "if named here."
        ),
    ] = None
    model_loading_timeout: Annotated[
        int | None, Option("Longest time in seconds that loading may take.", default="no limit")
    ] = None
    model_options: ModelOptions = field(default_factory=ModelOptions)
    batching: BatchingOptions = field(default_factory=BatchingOptions)
    step_trace: Annotated[
        Path | None,
        Option(
            "File for a Chrome trace of the engine's steps and requests.",
            old_names=("--trace",),
            group="Engine",
        ),
    ] = None

    def __post_init__(self) -> None:
        if self.executor not in EXECUTORS:
            raise InputError(f"--executor {self.executor}: use one of {', '.join(EXECUTORS)}")
        if self.executor == "simulated" and self.instance is None:
            raise InputError("--executor simulated needs --instance, such as ml.g5.2xlarge")
        if self.executor == "torch" and self.instance is not None:
            raise InputError(f"--instance {self.instance} goes with --executor simulated")
