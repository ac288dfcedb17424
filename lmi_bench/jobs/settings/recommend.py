"""What `recommend` is asked."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, ClassVar

from lmi_bench.core.errors import InputError
from lmi_bench.core.option import option, stated
from lmi_bench.jobs.settings import planning
from lmi_bench.jobs.settings.money import LimitSettings, PurchaseSettings
from lmi_bench.jobs.settings.planning import (
    ENGINE,
    LIMITS,
    LOAD,
    MACHINES,
    PRICES,
    WORKLOAD,
    DraftSettings,
)

OBJECTIVES = ("cost", "cost-per-hour", "cost-per-1m", "latency", "throughput")

# What `--portfolio` takes beside its file; the rest stands in the file or is of one model.
_OF_A_PORTFOLIO = (
    "portfolio", "instance", "tensor_parallel", "profile", "prices", "platform", "region",
    "purchase", "commit_discount", "committed", "availability",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class AxisSettings:
    """Engine settings to choose from; every field but the draft's may be a comma list."""

    GROUP: ClassVar = ENGINE

    dtype: Annotated[str | None, planning.DTYPE] = None
    kv_dtype: Annotated[str | None, planning.KV_DTYPE] = None
    max_batch: str | None = option("Limit on sequences that run together.")
    prefill_tokens: str | None = option(
        "Limit on the prompt tokens of a step; the chunk size with --chunked-prefill on."
    )
    chunked_prefill: str | None = option(
        "Chunked prefill, beside decoding: on, off.", old_names=("--chunked",)
    )
    memory_share: str | None = option("Share of a device's memory that the engine takes, 0 to 1.")
    graphs: str | None = option("CUDA graphs: on, off.")
    replicas: str | None = option("Copies of the model on a machine.", default="as many as fit")
    speculation: DraftSettings = field(default_factory=DraftSettings)


@dataclass(frozen=True, slots=True)
class RecommendSettings:
    """A model or its measured runs, the load, the limits, and the machines to choose from."""

    runs: tuple[Path, ...] = option(
        "Sweeps to calibrate on.", value=(), argument=True, metavar="[RUN_DIR]..."
    )
    model: Annotated[str | None, replace(planning.MODEL, default="that of the run")] = None
    input_tokens: Annotated[int | None, planning.INPUT_TOKENS] = None
    output_tokens: Annotated[int | None, planning.OUTPUT_TOKENS] = None
    workload: Path | None = option(
        "Scenario, as `workload from` writes it: its lengths, rate and burstiness.",
        metavar="S.yaml",
        group=WORKLOAD,
    )
    portfolio: Path | None = option(
        "Portfolio of models (models: [{model, rate_per_s, input_tokens, output_tokens, slo}]) "
        "on shared machines against an endpoint each.",
        metavar="FILE.yaml",
        group=WORKLOAD,
    )
    axes: AxisSettings = field(default_factory=AxisSettings)
    rate: float | None = option("Load of the whole fleet in req/s.", group=LOAD)
    users: int | None = option("Users at once; needs --think-time.", group=LOAD)
    think_time: float | None = option(
        "Time between an answer and the user's next question in s.", group=LOAD
    )
    vary: str | None = option(
        "Range of loads in req/s for which the cheapest layout is printed, too.",
        metavar="rate=A..B",
        group=LOAD,
        rare=True,
    )
    router: Annotated[str, planning.ROUTER] = "random"
    slo: Annotated[
        tuple[str, ...], replace(planning.SLO, help=f"{planning.SLO.help} Exit 99 if out of reach.")
    ] = ()
    objective: str = option(
        "Objective: cost (of a token at the load), cost-per-hour, cost-per-1m (at capacity), "
        "latency or throughput.",
        value="cost",
        group=LIMITS,
    )
    limits: LimitSettings = field(default_factory=LimitSettings)
    instance: tuple[str, ...] = option(
        "Instance to consider, or local; repeatable, or between commas.",
        value=(),
        default="all, or the run's",
        group=MACHINES,
    )
    tensor_parallel: tuple[int, ...] = option(
        "Tensor-parallel degree to consider; repeatable.",
        "--tp",
        value=(),
        default="all",
        group=MACHINES,
    )
    measured_on: tuple[str, ...] = option(
        "Machine of the runs' endpoint, where they do not say; once, or once a run.",
        value=(),
        metavar="INSTANCE[:TP]",
        group=MACHINES,
    )
    profile: Annotated[str | None, planning.PROFILE] = None
    engine_version: Annotated[str | None, planning.ENGINE_VERSION] = None
    machine_price: Annotated[
        float | None,
        replace(planning.MACHINE_PRICE, help="Price of `local` in USD per hour.", rare=True),
    ] = None
    money: PurchaseSettings = field(default_factory=PurchaseSettings)
    blended_ratio: float = option(
        "Input tokens per output token of the blended price.", value=3.0, group=PRICES, rare=True
    )
    discount: float = option(
        "Discount on the blended price, 0 to 1.", value=0.0, group=PRICES, rare=True
    )
    explain: bool = option("Report of what would change the answer.", "--explain", value=False)
    seed: Annotated[int, planning.SEED] = 0

    def __post_init__(self) -> None:
        if self.objective not in OBJECTIVES:
            *most, last = OBJECTIVES
            raise InputError(f"--objective {self.objective}: use {', '.join(most)} or {last}")
        if self.portfolio is None:
            return
        other = [
            each.name.upper() if each.option.argument else each.option.name_of(each.name)
            for each in stated(self)
            if each.name not in _OF_A_PORTFOLIO
        ]
        if other:
            raise InputError(
                f"--portfolio takes no {', '.join(other)}: models, loads, SLOs and number formats "
                "stand in its file, and the rest is planned for one model at a time"
            )

    @property
    def instances(self) -> tuple[str, ...]:
        """Names of the machines to consider; () where none is named."""
        parts = (part.strip() for name in self.instance for part in name.split(","))
        return tuple(part for part in parts if part)
