"""Settings of `recommend`: the model, the load, the limits, the machines and their prices."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Final

from lmi_bench.core.errors import InputError
from lmi_bench.core.option import Settings, Stated, option, stated, values_of
from lmi_bench.jobs.settings import planning
from lmi_bench.jobs.settings.sweep import check_lengths

OBJECTIVES: Final = ("cost", "cost-per-hour", "cost-per-1m", "latency", "throughput")

# Options that `--portfolio` takes; its file states models, loads and SLOs.
_OF_A_PORTFOLIO: Final = """
    portfolio instance tensor_parallel profile prices platform region purchase commit_discount availability
"""


@dataclass(frozen=True, slots=True)
class AxisSettings:
    """Engine settings to choose from; every field but the draft's may be a comma list."""

    GROUP: ClassVar = planning.ENGINE

    dtype: str | None = option(planning.DTYPE)
    kv_dtype: str | None = option(planning.KV_DTYPE)
    max_batch: str | None = option("Maximum number of sequences in a batch.")
    prefill_tokens: str | None = option("Maximum prompt tokens of a step; the chunk size with --chunked-prefill on.")
    chunked_prefill: str | None = option("Chunked prefill, within decode steps: on, off.", old_names=("--chunked",))
    memory_share: str | None = option("Share of a device's memory that the engine takes, 0 to 1.")
    graphs: str | None = option("CUDA graphs: on, off.", rare=True)
    replicas: str | None = option("Copies of the model on a machine.", default="as many as fit")
    speculation: planning.DraftSettings = field(default_factory=planning.DraftSettings)
    ep: str | None = option("Expert parallelism: on, off.", default="both for mixtures, if the engine has it")
    dp_attention: str | None = option(
        "Data-parallel attention: on, off.", default="both for mixtures with latent attention"
    )
    pp: str | None = option("Pipeline stages of a copy.", default="1", rare=True)
    hosts: str | None = option("Machines that one copy spans.", default="1", rare=True)


@dataclass(frozen=True, slots=True)
class RecommendSettings(Settings):
    """A model or its measured runs, the load, the limits, and the machines to choose from.

    runs  Sweeps to calibrate on.
    workload  Scenario with lengths, rate and burstiness.
    portfolio  Models to share machines, as [{model, rate_per_s, input_tokens, output_tokens, slo}].
    disaggregate  Simulate the cheapest prefill and decode in separate pools, too.
    rate  Load of the whole fleet in req/s.
    users  Number of users; needs --think-time.
    think_time  Time between an answer and the next question of a user, or of --turns, in s.
    vary  Range of loads in req/s; also prints the cheapest layout of each load.
    slo  Service-level objective such as ttft_p90<=1s; repeatable. Exit 99 if no fleet meets it.
    objective  Objective: cost (of a token at the load), cost-per-hour, cost-per-1m (at capacity),
        latency or throughput.
    min_throughput  Minimum throughput of the fleet in output tok/s.
    max_usd_per_hour  Maximum price of the fleet in USD per hour.
    max_usd_per_month  Maximum price of the fleet in USD per month of 730 hours.
    max_usd_per_1m  Maximum price of 1M output tokens at the load in USD.
    instance  Instance to consider, or local; repeatable, or between commas.
    measured_on  Machine of the runs' endpoint if they do not state it; once, or once a run.
    region  Region whose prices count; repeatable.
    purchase  Purchase: on-demand, savings-plan, reserved or spot.
    committed  Committed machines, paid even if unused.
    availability  Availability: none, n+1 (one machine may fail) or az:K (one of K zones).
    blended_ratio  Input tokens per output token of the blended price.
    discount  Discount on the blended price, 0 to 1.
    explain  Reasons, prices, warnings, what else to measure, and what would change the answer.
    """

    runs: tuple[Path, ...] = option(value=(), argument=True, metavar="[RUN_DIR]...")
    model: str | None = option(planning.MODEL, default="that of the run")
    input_tokens: int | None = option(planning.INPUT_TOKENS)
    output_tokens: int | None = option(planning.OUTPUT_TOKENS)
    workload: Path | None = option(metavar="S.yaml", group=planning.WORKLOAD)
    prefix_hit: float = option(planning.PREFIX_HIT, value=0.0, rare=True)
    shared_prefix: int | None = option(planning.SHARED_PREFIX, rare=True)
    documents: str | None = option(planning.DOCUMENTS, rare=True)
    turns: str | None = option(planning.TURNS, rare=True)
    trace: Path | None = option(planning.TRACE, rare=True)
    portfolio: Path | None = option(metavar="FILE.yaml", group=planning.WORKLOAD)
    axes: AxisSettings = field(default_factory=AxisSettings)
    disaggregate: bool = option(value=False, group=planning.ENGINE, rare=True)
    network_gbps: float | None = option(planning.NETWORK_GBPS, must="above 0", rare=True)
    rate: float | None = option(group=planning.LOAD, must="above 0 req/s")
    users: int | None = option(group=planning.LOAD, must="at least 1")
    think_time: float | None = option(group=planning.LOAD, must="0 s or more")
    vary: str | None = option(metavar="rate=A..B", group=planning.LOAD, rare=True)
    router: str = option(planning.ROUTER, value="random")
    slo: tuple[str, ...] = option(value=(), group=planning.LIMITS)
    objective: str = option(value="cost", group=planning.LIMITS, one_of=OBJECTIVES)
    min_throughput: float | None = option(group=planning.LIMITS, must="above 0")
    max_usd_per_hour: float | None = option(group=planning.LIMITS, must="above 0")
    max_usd_per_month: float | None = option(group=planning.LIMITS, must="above 0")
    max_usd_per_1m: float | None = option(group=planning.LIMITS, must="above 0")
    instance: tuple[str, ...] = option(value=(), default="all, or the run's", group=planning.MACHINES)
    tensor_parallel: tuple[int, ...] = option(
        planning.TENSOR_PARALLEL, value=(), help="Tensor-parallel degree to consider; repeatable.", default="all"
    )
    measured_on: tuple[str, ...] = option(value=(), metavar="INSTANCE[:TP]", group=planning.MACHINES)
    profile: str | None = option(planning.PROFILE)
    kv_tokens: int | None = option(planning.KV_TOKENS)
    host_cache: Stated = planning.HOST_CACHE
    engine_version: str | None = option(planning.ENGINE_VERSION)
    machine_price: float | None = option(planning.MACHINE_PRICE, help="Price of `local` in USD per hour.", rare=True)
    price_list: planning.PriceSettings = field(default_factory=planning.PriceSettings)
    region: tuple[str, ...] = option(value=(), default="all", group=planning.PRICES, rare=True)
    purchase: str = option(value="on-demand", group=planning.PRICES)
    commit_discount: float | None = option(planning.COMMIT_DISCOUNT)
    committed: int | None = option(
        default="as many as are needed", group=planning.PRICES, rare=True, must="0 or more machines"
    )
    availability: str = option(value="none", group=planning.LIMITS)
    blended_ratio: float = option(value=3.0, must="at least 0", group=planning.PRICES, rare=True)
    discount: float = option(value=0.0, group=planning.PRICES, rare=True)
    explain: bool = option(value=False)
    seed: int = option(planning.SEED, value=0)

    def _check(self) -> None:
        check_lengths({name: value for name, value in values_of(self) if value is not None})
        if self.kv_tokens and (len(self.instances), len(self.tensor_parallel)) != (1, 1):
            raise InputError("--kv-tokens is of one layout: give one --instance and one --tp")
        if self.prefix_hit and (self.describes_prompts or self.workload is not None):
            raise InputError("--prefix-hit states what would be simulated: leave one of them out")
        if self.network_gbps is not None and not (self.axes.hosts or self.disaggregate):
            raise InputError("--network-gbps is between machines: add --hosts or --disaggregate")
        if self.portfolio is None:
            return
        other = [
            each.name.upper() if each.option.argument else each.option.name_of(each.name)
            for each in stated(self)
            if each.name not in _OF_A_PORTFOLIO.split()
        ]
        if other:
            raise InputError(
                f"--portfolio takes no {', '.join(other)}: its file states the models, loads, SLOs "
                "and number formats, and the rest is planned for one model at a time"
            )

    @property
    def describes_prompts(self) -> bool:
        """Whether options tell what the prompts have in common."""
        alike = self.shared_prefix or self.documents or self.turns or self.trace
        return bool(alike or self.host_cache.values)

    @property
    def instances(self) -> tuple[str, ...]:
        """Names of the machines to consider; () if none is named."""
        parts = (part.strip() for name in self.instance for part in name.split(","))
        return tuple(part for part in parts if part)
