"""What `predict` is asked."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

from lmi_bench.core.errors import InputError
from lmi_bench.core.option import REQUIRED, option
from lmi_bench.jobs.settings import planning
from lmi_bench.jobs.settings.planning import LOAD, WORKLOAD, DraftSettings, check_at_least_one


@dataclass(frozen=True, slots=True)
class PredictSettings:
    """A model on a machine, its requests, and the loads to predict for."""

    model: Annotated[str, planning.MODEL]
    instance: str = option(
        "Machine such as ml.g5.12xlarge, or local: this machine.", value=REQUIRED
    )
    input_tokens: Annotated[int | None, planning.INPUT_TOKENS] = None
    output_tokens: Annotated[int | None, planning.OUTPUT_TOKENS] = None
    tensor_parallel: Annotated[int, replace(planning.TENSOR_PARALLEL, group=None)] = 1
    replicas: int = option("Copies of the model that share the load.", value=1)
    concurrency: str | None = option("Users of a closed loop, such as 1,8,64.", group=LOAD)
    rate: str | None = option("Load of an open loop in req/s, such as 0.5,2.", group=LOAD)
    dtype: Annotated[str | None, planning.DTYPE] = None
    kv_dtype: Annotated[str | None, planning.KV_DTYPE] = None
    profile: Annotated[str | None, planning.PROFILE] = None
    prefix_hit: float = option(
        "Share of each prompt that the prefix cache holds already, 0 to 1.",
        value=0.0,
        group=WORKLOAD,
    )
    mix: str | None = option("Mix of requests, IN/OUT[:SHARE],...: simulated.", group=WORKLOAD)
    input_lengths: str | None = option(
        "Prompt length distribution: uniform(LOW,HIGH), normal(MEAN,STD), "
        "lognormal(MEAN,STD): simulated.",
        group=WORKLOAD,
    )
    output_lengths: str | None = option(
        "Output length distribution; same forms as --input-lengths.", group=WORKLOAD
    )
    trace: Path | None = option(
        "Recorded traffic, Azure's CSV or Mooncake's JSON lines: simulated.", group=WORKLOAD
    )
    speed: str | None = option(
        "Speed of recorded traffic: 1 as recorded, 2 twice as fast.", group=WORKLOAD
    )
    shared_prefix: int = option(
        "Tokens with which all prompts begin, behind a prefix cache: simulated.",
        value=0,
        group=WORKLOAD,
    )
    seed: Annotated[int, planning.SEED] = 0
    router: Annotated[str | None, planning.ROUTER] = None
    speculation: DraftSettings = field(default_factory=DraftSettings)
    engine_version: Annotated[str | None, planning.ENGINE_VERSION] = None

    def __post_init__(self) -> None:
        check_at_least_one(
            input_tokens=self.input_tokens,
            output_tokens=self.output_tokens,
            tensor_parallel=self.tensor_parallel,
            replicas=self.replicas,
        )
        if not 0 <= self.prefix_hit <= 1:
            raise InputError(f"--prefix-hit must be 0 to 1, got {self.prefix_hit:g}")
        if self.shared_prefix < 0:
            raise InputError(f"--shared-prefix must be 0 or more, got {self.shared_prefix}")
        if self.speed is not None and self.trace is None:
            raise InputError("--speed is that of recorded traffic: add --trace FILE")
        if self.trace is None and (self.concurrency is None) == (self.rate is None):
            raise InputError("give either --concurrency or --rate: the load to predict for")
        if self.is_simulated:
            self._check_simulated()
        elif self.input_tokens is None or self.output_tokens is None:
            raise InputError(
                "give --input-tokens and --output-tokens, or --mix, --input-lengths or --trace"
            )

    def _check_simulated(self) -> None:
        if self.prefix_hit:
            raise InputError(
                "--prefix-hit is for requests of one length; for others say --shared-prefix TOKENS"
            )
        if self.input_tokens is not None and self.shared_prefix >= self.input_tokens:
            raise InputError(
                f"--shared-prefix {self.shared_prefix}: prompts of {self.input_tokens} tokens "
                "share fewer, since the last one is always computed"
            )

    @property
    def is_simulated(self) -> bool:
        """Whether its requests differ in ways that closed forms do not follow."""
        drawn = self.mix or self.input_lengths or self.output_lengths or self.trace
        return bool(drawn or self.shared_prefix or self.router)
