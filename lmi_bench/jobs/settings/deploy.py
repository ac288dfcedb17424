"""Settings of `deploy write` and `deploy limits`."""

from dataclasses import dataclass, field
from pathlib import Path

from lmi_bench.core.errors import InputError
from lmi_bench.core.option import REQUIRED, Option, Settings, option
from lmi_bench.deploy.settings import LAYOUT, NOTHING, PROMETHEUS, EndpointSettings, Server, Stated
from lmi_bench.jobs.settings import planning

INSTANCE = Option("Machine such as ml.g5.12xlarge.")


@dataclass(frozen=True, slots=True)
class DeploySettings(Settings):
    """A recommended or a stated layout, the server that runs it, and its endpoint.

    model, instance, stated  a model on machines, as stated instead of recommended
    """

    recommendation: Path | None = option(planning.RECOMMENDATION)
    out: Path = option("New folder.", "--out", "-o", value=Path("deployment"))
    model: str | None = option(planning.MODEL, group=LAYOUT)
    instance: str | None = option(INSTANCE, group=LAYOUT)
    stated: Stated = NOTHING
    profile: str | None = option(planning.PROFILE, default="the one nearest to the server's version", group=LAYOUT)
    server: Server = field(default_factory=Server)
    endpoint: EndpointSettings = field(default_factory=EndpointSettings)

    def _check(self) -> None:
        if self.recommendation is None and (self.model is None or self.instance is None):
            raise InputError("give a file of `recommend --json`, or --model and --instance")
        if self.recommendation is not None and (self.model or self.instance):
            raise InputError("give a recommendation, or --model and --instance, not both")
        server, endpoint = self.server, self.endpoint
        given = {  # which have no effect on Kubernetes
            "--components": endpoint.components,
            "--role-arn": endpoint.role_arn != EndpointSettings().role_arn,
            "--region": server.region != Server().region,
            "--set": endpoint.parameters,
        }
        names = [name for name, is_given in given.items() if is_given]
        if server.is_kubernetes and names:
            raise InputError(f"SageMaker's options have no effect here: leave out {', '.join(names)}")
        if server.prometheus != PROMETHEUS and not (server.is_kubernetes and endpoint.max_instances):
            raise InputError("--prometheus is for --platform kubernetes with --max-instances")
        if self.recommendation is not None and self.stated.typical_tokens is not None:
            raise InputError("--typical-tokens: a recommendation has its workload's; leave it out")


@dataclass(frozen=True, slots=True)
class LimitsSettings(Settings):
    """A model on a machine, to count the sequences that fit at once."""

    model: str = option(planning.MODEL, value=REQUIRED)
    instance: str = option(INSTANCE, value=REQUIRED)
    tensor_parallel: int | None = option(planning.TENSOR_PARALLEL, default="all possible", group=None)
    dtype: str | None = option(planning.DTYPE, group=None)
    rope_factor: float = option(
        "Factor by which RoPE scaling extends the trained positions.", value=1.0, must="1 or more"
    )
    profile: str | None = option(planning.PROFILE, group=None)
    kv_tokens: int | None = option(planning.KV_TOKENS, group=None)
