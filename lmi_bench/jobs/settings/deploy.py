"""What `deploy write` is asked."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from lmi_bench.core.errors import InputError
from lmi_bench.core.option import Option, option
from lmi_bench.jobs.settings import planning

_LAYOUT, _SERVER, _ENDPOINT = "Layout", "Server", "SageMaker endpoint"

INSTANCE = Option("Machine such as ml.g5.12xlarge.", group=_LAYOUT)
REGION = Option("AWS region.", group=_ENDPOINT)
ACCOUNT = Option(
    "Account of the region's image registry.",
    default="that of most regions",
    group=_ENDPOINT,
    rare=True,
)


@dataclass(frozen=True, slots=True)
class DeploySettings:
    """A recommended or a stated layout, the server that runs it, and its endpoint."""

    recommendation: Path | None = option(
        "File written by `recommend --json`.", argument=True, metavar="[REC.json]"
    )
    out: Path = option("New folder.", "--out", "-o", value=Path("deployment"))
    server: str = option("Server: lmi, tgi or vllm.", value="lmi", group=_SERVER)
    model: Annotated[str | None, replace(planning.MODEL, group=_LAYOUT)] = None
    instance: Annotated[str | None, INSTANCE] = None
    machines: int = option(
        "Number of machines.", value=1, old_names=("--instances",), group=_LAYOUT
    )
    tensor_parallel: Annotated[
        int | None,
        replace(planning.TENSOR_PARALLEL, default="the smallest that fits", group=_LAYOUT),
    ] = None
    replicas: int | None = option(
        "Copies of the model on a machine.",
        old_names=("--copies",),
        default="all that fit",
        group=_LAYOUT,
    )
    dtype: Annotated[
        str | None,
        replace(
            planning.DTYPE,
            help="Weight format: float16, bfloat16, float32, float8, or int4 (a quantized "
            "checkpoint).",
            group=_LAYOUT,
        ),
    ] = None
    max_model_len: int | None = option(
        "Limit on the tokens of a request, prompt and answer.",
        default="all positions",
        group=_LAYOUT,
    )
    max_input_tokens: int | None = option("Limit on the prompt length in tokens.", group=_LAYOUT)
    max_batch: int | None = option(
        "Limit on sequences that run together.",
        old_names=("--max-rolling-batch-size",),
        default="from memory",
        group=_LAYOUT,
    )
    goal: str = option(
        "Goal: throughput, or latency, one request at a time.", value="throughput", group=_LAYOUT
    )
    draft: str | None = option(
        "Draft of speculative decoding: ngram, or Hub id, s3:// prefix or folder of a smaller "
        "model.",
        default="as recommended",
        group=_LAYOUT,
    )
    profile: Annotated[str | None, replace(planning.PROFILE, group=_LAYOUT)] = None
    model_id: str | None = option(
        "Weights as a Hub id, s3:// prefix or folder.",
        default="the catalog's Hub id",
        group=_SERVER,
    )
    model_data: str | None = option(
        "Weights as an s3:// prefix or model.tar.gz that SageMaker mounts at /opt/ml/model.",
        group=_SERVER,
    )
    image: str | None = option(
        "Image. LMI: a version (0.36.0, lmi28, a tag). TGI: the address.", group=_SERVER
    )
    trust_remote_code: bool = option(
        "Permission for the server to run code that comes with the weights.",
        "--trust-remote-code",
        value=False,
        group=_SERVER,
        rare=True,
    )
    accept_eula: bool = option(
        "Statement that you have read the model's licence.",
        "--accept-eula",
        value=False,
        group=_SERVER,
    )
    name: str = option("Name of the endpoint.", value="lmi-bench", group=_ENDPOINT)
    role_arn: str = option(
        "ARN of SageMaker's role.",
        value="arn:aws:iam::111122223333:role/replace-me",
        group=_ENDPOINT,
    )
    region: Annotated[str, REGION] = "us-east-1"
    account: Annotated[str | None, ACCOUNT] = None
    startup_timeout: int = option(
        "Time limit to load and become healthy in s, 60 to 3600.",
        value=1200,
        group=_ENDPOINT,
        rare=True,
    )
    max_instances: int | None = option("Limit of autoscaling in machines.", group=_ENDPOINT)
    target_concurrency: float | None = option(
        "Target of autoscaling in requests at once of one copy.", group=_ENDPOINT
    )
    components: bool = option(
        "Inference component for each copy in any case.",
        "--components",
        value=False,
        group=_ENDPOINT,
        rare=True,
    )

    def __post_init__(self) -> None:
        if self.goal not in ("throughput", "latency"):
            raise InputError(f"--goal {self.goal}: use throughput or latency")
        if self.recommendation is None and (self.model is None or self.instance is None):
            raise InputError("give a file of `recommend --json`, or --model and --instance")
        if self.recommendation is not None and (self.model or self.instance):
            raise InputError("give a recommendation, or --model and --instance, not both")
