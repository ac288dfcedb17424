"""What `serve` is asked."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from lmi_bench.core.errors import InputError
from lmi_bench.core.option import option
from lmi_bench.jobs.settings.engine import BatchingOptions, ModelOptions

EXECUTORS: Final = ("torch", "simulated")


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """A model, where and how it is served, and the engine behind it."""

    model: str | None = option(
        "Demo model or Hugging Face folder. Simulated: a catalog name too.",
        "--model",
        "-m",
        default="the model of the serving.properties, or demo-15m",
    )
    executor: str = option(
        "Executor: torch computes; simulated waits for the predicted time of each step.",
        value="torch",
    )
    instance: str | None = option("Instance to simulate, such as ml.g5.2xlarge.")
    host: str = option("Address to listen on.", value="127.0.0.1")
    port: int = option("Port to listen on; 0 takes a free one.", value=8080)
    lmi_replies: str = option(
        "Replies of the LMI routes, as djl-serving's: rolling (to 0.34) or async (0.35 on).",
        value="rolling",
    )
    require_signature: bool = option(
        "SageMaker's paths require requests signed with this AWS_ACCESS_KEY_ID and "
        "AWS_SECRET_ACCESS_KEY.",
        "--require-signature",
        value=False,
    )
    serving_properties: Path | None = option(
        "Settings of an LMI container: a serving.properties, its folder, or a model.tar.gz.",
        metavar="PATH",
    )
    djl_version: str = option(
        "Version of djl-serving that --serving-properties is written for, such as 0.26.0.",
        value="0.36.0",
    )
    model_py: Path | None = option(
        "Program with @input_formatter and @output_formatter for the LMI routes; it runs only "
        "if named here."
    )
    model_loading_timeout: int | None = option(
        "Longest time in seconds that loading may take.", default="no limit"
    )
    model_options: ModelOptions = field(default_factory=ModelOptions)
    batching: BatchingOptions = field(default_factory=BatchingOptions)
    step_trace: Path | None = option(
        "File for a Chrome trace of the engine's steps and requests.",
        old_names=("--trace",),
        group="Engine",
    )

    def __post_init__(self) -> None:
        if self.executor not in EXECUTORS:
            raise InputError(f"--executor {self.executor}: use one of {', '.join(EXECUTORS)}")
        if self.executor == "simulated" and self.instance is None:
            raise InputError("--executor simulated needs --instance, such as ml.g5.2xlarge")
        if self.executor == "torch" and self.instance is not None:
            raise InputError(f"--instance {self.instance} goes with --executor simulated")
