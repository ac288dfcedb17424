"""What the user states of a deployment: its layout, the server, the SageMaker endpoint."""

import re
from dataclasses import dataclass
from typing import ClassVar, Final

from lmi_bench.core.errors import InputError
from lmi_bench.core.option import Option, Settings, option, stated
from lmi_bench.core.redaction import redact_text

REGION: Final = Option("AWS region.")
ACCOUNT: Final = Option("Account of the region's image registry.", default="AWS's in that region")
SECRET: Final = "lmi-bench-secrets"  # noqa: S105 - the name of a Secret
PROMETHEUS: Final = "http://prometheus-server.monitoring.svc:80"
_ENDPOINT: Final = "SageMaker endpoint"
LAYOUT: Final = "Layout"
_KUBERNETES: Final = "kubernetes"
_ON_KUBERNETES: Final = ("vllm", "sglang")
SHORTEST_WAIT_S, LONGEST_WAIT_S = 60, 3600  # of SageMaker's health checks at the start
_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SECRET_NAME: Final = re.compile(r"(TOKEN|SECRET|PASSWORD|_KEY)$", re.IGNORECASE)
_NAME: Final = re.compile(r"[a-zA-Z0-9](-*[a-zA-Z0-9]){0,48}")


@dataclass(frozen=True, slots=True)
class Server(Settings):
    """The server that will run a bundle, and where it finds the weights.

    kind  Server: lmi, tgi, vllm or sglang.
    platform  Platform: sagemaker or kubernetes.
    model_id  Weights as a Hub id, s3:// prefix or folder.
    model_data_uri  Weights as an s3:// prefix or model.tar.gz that SageMaker mounts at
        /opt/ml/model.
    image  Image: a version (0.33.0, lmi28; TGI: 3.3.6), a tag, or an address.
    trust_remote_code  Permission for the server to run code that comes with the weights.
    env  Variable of the container as NAME=VALUE, or a secret as NAME alone, whose value is read at
        deployment; repeatable.
    prometheus  Address of the Prometheus that has the servers' metrics, for scaling on Kubernetes.
    """

    GROUP: ClassVar = "Server"

    kind: str = option("--server", value="", default="lmi; Kubernetes: vllm")
    platform: str = option(value="sagemaker", one_of=("sagemaker", _KUBERNETES))
    model_id: str | None = option(default="the catalog's Hub id")
    model_data_uri: str | None = option("--model-data")
    image: str | None = option(default="the newest that runs on the machine")
    trust_remote_code: bool = option(value=False, rare=True)
    env: tuple[str, ...] = option(value=())
    region: str = option(REGION, value="us-east-1", group=_ENDPOINT)
    account: str | None = option(ACCOUNT, rare=True, group=_ENDPOINT)
    prometheus: str = option(value=PROMETHEUS, rare=True)

    @property
    def is_kubernetes(self) -> bool:
        """True for Kubernetes, False for SageMaker."""
        return self.platform == _KUBERNETES

    def _check(self) -> None:
        usual = "vllm" if self.is_kubernetes else "lmi"
        object.__setattr__(self, "kind", self.kind or usual)
        if self.is_kubernetes:
            if self.kind not in _ON_KUBERNETES:
                allowed = " or ".join(_ON_KUBERNETES)
                raise InputError(f"--server {self.kind}: on Kubernetes use {allowed}")
            if self.model_data_uri is not None:
                raise InputError(
                    "--model-data is mounted by SageMaker only: on Kubernetes give --model-id, a "
                    "Hub id or an s3:// prefix"
                )
            if self.account is not None:
                raise InputError("--account is of SageMaker's images: on Kubernetes give --image")
        elif self.kind != "lmi" and (self.model_id or "").startswith("s3://"):
            raise InputError(
                f"--model-id {self.model_id}: only LMI downloads from S3; with --model-data "
                f"SageMaker does it for {self.kind}"
            )
        if self.model_id is not None and self.model_data_uri is not None:
            raise InputError("--model-id and --model-data both state the weights: leave one out")
        if len(self.variables) < len(self.env):
            raise InputError("--env states a variable twice: keep one of its values")
        for text in self.env:
            name, _, value = text.partition("=")
            if not _VARIABLE.fullmatch(name):
                raise InputError(f"--env {text}: write NAME=VALUE, or NAME alone for a secret")
            if value and (_SECRET_NAME.search(name) or redact_text(value) != value):
                raise InputError(
                    f"--env {name}=...: a secret is not written into files; give --env {name}, and "
                    "its value at deployment"
                )

    @property
    def variables(self) -> dict[str, str | None]:
        """The variables of `env`; None for a secret."""
        parts = (text.partition("=") for text in self.env)
        return {name: value if sign else None for name, sign, value in parts}


@dataclass(frozen=True, slots=True)
class Stated(Settings):
    """What the user states of a deployment; None: as recommended, or as the memory allows.

    machines  Number of machines.
    tensor_parallel  Tensor-parallel degree: devices of one copy.
    replicas  Copies of the model on a machine.
    dtype  Weight format: float16, bfloat16, float32, float8, or of a quantized checkpoint int4,
        int8, mxfp4 or nvfp4.
    max_model_len  Maximum length of a request and its answer in tokens.
    typical_tokens  Expected length of a request and its answer in tokens, for the number of
        sequences.
    max_input_tokens  Maximum prompt length in tokens (TGI and TensorRT-LLM).
    max_batch  Maximum sequences in a batch.
    goal  Goal: throughput, or latency of one request at a time.
    draft  Speculative decoding: ngram, or a smaller model's Hub id, s3:// prefix or folder.
    """

    GROUP: ClassVar = LAYOUT

    machines: int | None = option(old_names=("--instances",), default="as recommended, else 1", must="at least 1")
    tensor_parallel: int | None = option("--tp", default="as recommended, else by --goal", must="at least 1")
    replicas: int | None = option(
        old_names=("--copies",), default="as recommended, else all that fit", must="at least 1"
    )
    dtype: str | None = option(old_names=("--weight-dtype",), default="the checkpoint's, at most 16 bits")
    max_model_len: int | None = option(
        default="what memory holds for the workload, else at most 32,768", must="at least 1"
    )
    typical_tokens: int | None = option(default="the workload's, else 2,048", must="at least 1")
    max_input_tokens: int | None = option(must="at least 1")
    max_batch: int | None = option(old_names=("--max-rolling-batch-size",), default="from memory", must="at least 1")
    goal: str = option(value="throughput", one_of=("throughput", "latency"))
    draft: str | None = option(default="as recommended")

    def _check(self) -> None:
        if self.goal == "latency":
            if self.max_batch not in (None, 1):
                raise InputError(f"--goal latency is one request at a time, not {self.max_batch}")
            object.__setattr__(self, "max_batch", 1)

    def added_to(self, basis: str) -> str:
        """The basis of a plan, with the options that the user states."""
        given = (each for each in stated(self) if each.name != "goal")
        flags = ", ".join(f"{each.option.name_of(each.name)} {getattr(self, each.name)}" for each in given)
        return f"{basis}; stated: {flags}" if flags else basis


NOTHING: Final = Stated()


@dataclass(frozen=True, slots=True)
class EndpointSettings(Settings):
    """The SageMaker endpoint.

    Its name is the prefix of those of model and component. The time limit is None until a plan's
    weights are known.

    name  Name of the endpoint.
    role_arn  ARN of SageMaker's role.
    startup_s  Time limit to load and become healthy in s; SageMaker's is 60 to 3600.
    max_instances  Maximum number of machines of autoscaling.
    target_per_copy  Target of autoscaling in concurrent requests per copy.
    components  Inference component for each copy, even if not needed.
    jobs_output_uri  S3 prefix for results of SageMaker's own benchmark and recommendation jobs;
        writes their requests.
    parameters  Parameter of a request as OPERATION.PATH=VALUE (YAML), such as
        create_model.EnableNetworkIsolation=true or
        create_endpoint_config.AsyncInferenceConfig={...}; repeatable.
    accept_eula  Statement that you have read the model's licence.
    """

    GROUP: ClassVar = _ENDPOINT

    name: str | None = option(default="the model's and the date")
    role_arn: str = option(value="arn:aws:iam::111122223333:role/replace-me")
    startup_s: int | None = option(
        "--startup-timeout", default="from the weights' bytes, copies and compilation", rare=True
    )
    max_instances: int | None = option(default="no autoscaling")
    target_per_copy: float | None = option("--target-concurrency", default="80 % of the plan's at its capacity")
    components: bool = option(value=False, rare=True)
    jobs_output_uri: str | None = option("--aws-jobs", metavar="s3://BUCKET/PREFIX/", rare=True)
    parameters: tuple[str, ...] = option("--set", value=(), rare=True)
    accept_eula: bool = option(value=False, group="Server")

    def _check(self) -> None:
        if self.target_per_copy is not None and self.max_instances is None:
            raise InputError("--target-concurrency needs autoscaling: add --max-instances")
        if self.jobs_output_uri is not None and not self.jobs_output_uri.startswith("s3://"):
            raise InputError(f"--aws-jobs {self.jobs_output_uri}: give an s3:// prefix")
        if self.name is not None and not _NAME.fullmatch(self.name):
            raise InputError(f"endpoint name {self.name!r}: use letters, digits and single hyphens, at most 50")
        if self.startup_s is not None and self.startup_s < SHORTEST_WAIT_S:
            raise InputError(f"--startup-timeout {self.startup_s}: give at least {SHORTEST_WAIT_S} s")
