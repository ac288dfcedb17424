"""What `deploy write` is asked."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from lmi_bench.core.errors import InputError
from lmi_bench.core.option import Option
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

    recommendation: Annotated[
        Path | None,
        Option("File written by `recommend --json`.", argument=True, metavar="[REC.json]"),
    ] = None
    out: Annotated[Path, Option("New folder.", ("--out", "-o"))] = Path("deployment")
    server: Annotated[str, Option("Server: lmi, tgi or vllm.", group=_SERVER)] = "lmi"
    model: Annotated[str | None, replace(planning.MODEL, group=_LAYOUT)] = None
    instance: Annotated[str | None, INSTANCE] = None
    machines: Annotated[
        int, Option("Number of machines.", old_names=("--instances",), group=_LAYOUT)
    ] = 1
    tensor_parallel: Annotated[
        int | None,
        replace(planning.TENSOR_PARALLEL, default="the smallest that fits", group=_LAYOUT),
    ] = None
    replicas: Annotated[
        int | None,
        Option(
            "Copies of the model on a machine.",
            old_names=("--copies",),
            default="all that fit",
            group=_LAYOUT,
        ),
    ] = None
    dtype: Annotated[
        str | None,
        replace(
            planning.DTYPE,
            help="Weight format: float16, bfloat16, float32, float8, or int4 (a quantized "
            "checkpoint).",
            group=_LAYOUT,
        ),
    ] = None
    max_model_len: Annotated[
        int | None,
        Option(
            "Limit on the tokens of a request, prompt and answer.",
            default="all positions",
            group=_LAYOUT,
        ),
    ] = None
    max_input_tokens: Annotated[
        int | None, Option("Limit on the prompt length in tokens.", group=_LAYOUT)
    ] = None
    max_batch: Annotated[
        int | None,
        Option(
            "Limit on sequences that run together.",
            old_names=("--max-rolling-batch-size",),
            default="from memory",
            group=_LAYOUT,
        ),
    ] = None
    goal: Annotated[
        str, Option("Goal: throughput, or latency, one request at a time.", group=_LAYOUT)
    ] = "throughput"
    draft: Annotated[
        str | None,
        Option(
            "Draft of speculative decoding: ngram, or Hub id, s3:// prefix or folder of a smaller "
            "model.",
            default="as recommended",
            group=_LAYOUT,
        ),
    ] = None
    profile: Annotated[str | None, replace(planning.PROFILE, group=_LAYOUT)] = None
    model_id: Annotated[
        str | None,
        Option(
            "Weights as a Hub id, s3:// prefix or folder.",
            default="the catalog's Hub id",
            group=_SERVER,
        ),
    ] = None
    model_data: Annotated[
        str | None,
        Option(
            "Weights as an s3:// prefix or model.tar.gz that SageMaker mounts at /opt/ml/model.",
            group=_SERVER,
        ),
    ] = None
    image: Annotated[
        str | None,
        Option("Image. LMI: a version (0.36.0, lmi28, a tag). TGI: the address.", group=_SERVER),
    ] = None
    trust_remote_code: Annotated[
        bool,
        Option(
            "Permission for the server to run code that comes with the weights.",
            ("--trust-remote-code",),
            group=_SERVER,
            rare=True,
        ),
    ] = False
    accept_eula: Annotated[
        bool,
        Option(
            "Statement that you have read the model's licence.", ("--accept-eula",), group=_SERVER
        ),
    ] = False
    name: Annotated[str, Option("Name of the endpoint.", group=_ENDPOINT)] = "lmi-bench"
    role_arn: Annotated[str, Option("ARN of SageMaker's role.", group=_ENDPOINT)] = (
        "arn:aws:iam::111122223333:role/replace-me"
    )
    region: Annotated[str, REGION] = "us-east-1"
    account: Annotated[str | None, ACCOUNT] = None
    startup_timeout: Annotated[
        int,
        Option(
            "Time limit to load and become healthy in s, 60 to 3600.", group=_ENDPOINT, rare=True
        ),
    ] = 1200
    max_instances: Annotated[
        int | None, Option("Limit of autoscaling in machines.", group=_ENDPOINT)
    ] = None
    target_concurrency: Annotated[
        float | None,
        Option("Target of autoscaling in requests at once of one copy.", group=_ENDPOINT),
    ] = None
    components: Annotated[
        bool,
        Option(
            "Inference component for each copy in any case.",
            ("--components",),
            group=_ENDPOINT,
            rare=True,
        ),
    ] = False

    def __post_init__(self) -> None:
        if self.goal not in ("throughput", "latency"):
            raise InputError(f"--goal {self.goal}: use throughput or latency")
        if self.recommendation is None and (self.model is None or self.instance is None):
            raise InputError("give a file of `recommend --json`, or --model and --instance")
        if self.recommendation is not None and (self.model or self.instance):
            raise InputError("give a recommendation, or --model and --instance, not both")
