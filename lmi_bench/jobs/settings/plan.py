"""Settings of predict, explain, calibrate, validate, verify, plan-day and compare-accelerators."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from lmi_bench.core.errors import InputError
from lmi_bench.core.option import REQUIRED, Option, Settings, Stated, flag_of, option, values_of
from lmi_bench.jobs.settings import planning
from lmi_bench.jobs.settings.sweep import API_KEY, HEADER, check_lengths

_MEASURED_ON: Final = Option("Machine of the measured levels.", default="that of the source")
_CAPTURE: Final = "Capture of an endpoint"
_MEASURED_DTYPE: Final = replace(planning.DTYPE, default="that of the source", group=None)


@dataclass(frozen=True, slots=True)
class PredictSettings(Settings):
    """A model on a machine, its requests, and the loads to predict for.

    instance  Machine such as ml.g5.12xlarge, or local: this machine.
    replicas  Copies of the model that share the load.
    concurrency  Users of a closed loop, such as 1,8,64.
    rate  Load of an open loop in req/s, such as 0.5,2.
    mix  Mix of requests, IN/OUT[:SHARE],...: simulated.
    input_lengths  Prompt lengths: uniform(LOW,HIGH), normal(MEAN,STD), lognormal(MEAN,STD):
        simulated.
    output_lengths  Output lengths; same forms as --input-lengths.
    speed  Speed of recorded traffic: 1 as recorded, 2 twice as fast.
    think_time  Seconds between an answer and the next turn: a number or a distribution.
    prefix_cache  Prefix cache of the engine, where prompts begin alike.
    ep  Expert parallelism: whole experts on each device of a copy.
    dp_attention  Data-parallel attention: each device has its own sequences and their cache.
    pp  Pipeline stages, of --tp devices each.
    hosts  Machines that one copy spans.
    disaggregate  Workers that compute prompts, and workers that decode, such as 1:3.
    prefill_tp  Tensor-parallel degree of the workers that compute prompts.
    """

    model: str = option(planning.MODEL, value=REQUIRED)
    instance: str = option(value=REQUIRED)
    input_tokens: int | None = option(planning.INPUT_TOKENS)
    output_tokens: int | None = option(planning.OUTPUT_TOKENS)
    tensor_parallel: int | None = option(planning.TENSOR_PARALLEL, default="the smallest that fits", group=None)
    replicas: int = option(value=1, must="at least 1")
    concurrency: str | None = option(group=planning.LOAD)
    rate: str | None = option(group=planning.LOAD)
    dtype: str | None = option(planning.DTYPE)
    kv_dtype: str | None = option(planning.KV_DTYPE)
    profile: str | None = option(planning.PROFILE)
    prefix_hit: float = option(planning.PREFIX_HIT, value=0.0)
    mix: str | None = option(group=planning.WORKLOAD)
    input_lengths: str | None = option(group=planning.WORKLOAD)
    output_lengths: str | None = option(group=planning.WORKLOAD)
    trace: Path | None = option(planning.TRACE)
    speed: str | None = option(group=planning.WORKLOAD)
    shared_prefix: int = option(planning.SHARED_PREFIX, value=0)
    documents: str | None = option(planning.DOCUMENTS)
    turns: str | None = option(planning.TURNS)
    think_time: str | None = option(group=planning.WORKLOAD)
    prefix_cache: bool = option("--prefix-cache/--no-prefix-cache", value=True, group=planning.WORKLOAD)
    seed: int = option(planning.SEED, value=0)
    router: str | None = option(planning.ROUTER)
    speculation: planning.DraftSettings = field(default_factory=planning.DraftSettings)
    ep: bool = option(value=False, group=planning.ENGINE)
    dp_attention: bool = option(value=False, group=planning.ENGINE)
    pp: int = option(value=1, must="at least 1", group=planning.ENGINE)
    hosts: int = option(value=1, must="at least 1", group=planning.ENGINE)
    network_gbps: float | None = option(planning.NETWORK_GBPS, must="above 0")
    disaggregate: str | None = option(metavar="P:D", group=planning.ENGINE)
    prefill_tp: int | None = option(default="--tp", must="at least 1", group=planning.ENGINE)
    kv_tokens: int | None = option(planning.KV_TOKENS)
    host_cache: Stated = planning.HOST_CACHE
    engine_version: str | None = option(planning.ENGINE_VERSION)

    def _check(self) -> None:
        check_lengths({name: value for name, value in values_of(self) if value is not None})
        if self.prefix_hit and not self.prefix_cache:
            raise InputError("--prefix-hit needs a prefix cache: leave --no-prefix-cache out")
        if self.network_gbps is not None and self.hosts == 1 and self.disaggregate is None:
            raise InputError("--network-gbps is between machines: add --hosts or --disaggregate")
        if self.prefill_tp is not None and self.disaggregate is None:
            raise InputError("--prefill-tp is of a prefill pool: add --disaggregate P:D")
        if self.workers is not None and (self.router is not None or self.replicas > 1):
            raise InputError(
                "--disaggregate states its own workers, and each request goes to the one with the "
                "fewest: leave --router and --replicas out"
            )
        if self.speed is not None and self.trace is None:
            raise InputError("--speed applies to recorded traffic: add --trace FILE")
        if self.trace is None and (self.concurrency is None) == (self.rate is None):
            raise InputError("give either --concurrency or --rate: the load to predict for")
        if self.turns is not None and self.rate is None:
            raise InputError(
                "--turns needs --rate, the conversations that start each second; for users that "
                "talk one conversation after the other use `sweep --target sim:INSTANCE --turns`"
            )
        if self.think_time is not None and self.turns is None:
            raise InputError(
                "--think-time is between the --turns of a conversation; users who pause between "
                "requests are planned by `recommend --users N --think-time S`"
            )
        if self.is_simulated:
            if self.prefix_hit:
                raise InputError("--prefix-hit needs equal requests: use --shared-prefix TOKENS")
            if self.input_tokens is not None and self.shared_prefix >= self.input_tokens:
                raise InputError(
                    f"--shared-prefix {self.shared_prefix} must be shorter than the prompts of "
                    f"{self.input_tokens} tokens: the last token is always computed"
                )
        elif self.input_tokens is None or self.output_tokens is None:
            raise InputError("give --input-tokens and --output-tokens, or --mix, --input-lengths or --trace")

    @property
    def workers(self) -> tuple[int, int] | None:
        """Workers of the prefill and of the decode pool; None without pools."""
        if self.disaggregate is None:
            return None
        parts = self.disaggregate.split(":")
        if len(parts) != 2 or not all(part.isdecimal() and int(part) for part in parts):
            raise InputError(f"--disaggregate {self.disaggregate}: write the workers of both pools, such as 1:3")
        return int(parts[0]), int(parts[1])

    @property
    def is_simulated(self) -> bool:
        """Whether the requests differ in ways that closed forms do not cover."""
        drawn = self.mix or self.input_lengths or self.output_lengths or self.trace
        alike = self.shared_prefix or self.documents or self.turns or self.host_cache.values
        return bool(drawn or alike or self.router)


def _of_tables(sources: Sequence[Path], **given: object) -> None:
    """Raises InputError for what each line of a table states itself."""
    stated = [f"--{name}" for name, value in given.items() if value is not None]
    if stated and sources and all(source.suffix == ".csv" for source in sources):
        raise InputError(f"{', '.join(stated)}: each line of {sources[0].name} states its own")


@dataclass(frozen=True, slots=True)
class CalibrateSettings(Settings):
    """Measured levels to fit a profile to, and what their source does not state.

    sources  Sweeps, tables of levels, result files of other tools; none with --next or --on.
    out  JSON file for the profile.
    profile  Prior: a profile file, eager-prior, graph-prior ...
    tensor_parallel  Tensor-parallel degree of the measured copy.
    version  Version of the engine.
    next_levels  Number of levels to propose for measurement.
    on  Target to measure six levels of, in at most 10 minutes: a URL, sagemaker:NAME, sim:INSTANCE,
        engine, or a scenario file with more of its settings.
    run_dir  Folder of the six runs; an interrupted capture goes on in it.
    keep  Name under which `profiles list` and --profile find the profile.
    engine  Engine and version, such as 'sglang 0.5.2'.
    """

    sources: tuple[Path, ...] = option(value=(), argument=True, metavar="[RUN_DIR|TABLE.csv|SUMMARY.json...]")
    out: Path | None = option("--out", "-o", default="none; --on: profile.json in its folder")
    profile: str | None = option(default="by the source")
    model: str | None = option(planning.MODEL, default="that of the source")
    instance: str | None = option(_MEASURED_ON)
    tensor_parallel: int | None = option("--tp", default="that of the source, else 1", must="at least 1")
    dtype: str | None = option(_MEASURED_DTYPE)
    version: str | None = option()
    next_levels: int = option("--next", value=0, must="0 or more")
    on: str | None = option(group=_CAPTURE, metavar="TARGET")
    run_dir: Path | None = option(default="below runs/", group=_CAPTURE)
    keep: str | None = option(group=_CAPTURE)
    engine: str | None = option(default="as the server says", group=_CAPTURE)
    api_key: str | None = option(API_KEY, group=_CAPTURE)
    header: tuple[str, ...] = option(HEADER, value=(), group=_CAPTURE)

    def _check(self) -> None:
        if self.on is not None:
            if self.sources:
                raise InputError(
                    f"--on {self.on} measures its own levels: leave {self.sources[0]} out, or fit "
                    "all runs together afterwards"
                )
            if "://" in self.on and self.instance is None:
                raise InputError(
                    f"--on {self.on} does not say which machine answers: add --instance, such as "
                    "--instance ml.g5.2xlarge, or --instance local for this one"
                )
            return
        given = {"model": self.model, "instance": self.instance, "dtype": self.dtype}
        _of_tables(self.sources, **given, tp=self.tensor_parallel)
        for flag in ("run_dir", "keep", "engine", "header"):
            if getattr(self, flag):
                raise InputError(f"{flag_of(flag)} is of a capture: add --on URL")
        if self.sources:
            return
        if not self.next_levels or self.model is None or self.instance is None:
            raise InputError(
                "name sweeps or tables to fit to, or a server to measure with --on; or, to learn "
                "what to measure first, give --next, --model and --instance"
            )
        if self.out is not None:
            raise InputError("--out needs measured levels: nothing was fitted")


@dataclass(frozen=True, slots=True)
class ValidateSettings(Settings):
    """Measured levels to predict, and what to predict them with.

    sources  Table of measured levels, one a line, or sweeps (with --profile). Without one, every
        shipped profile is judged on its published tables.
    calibrate_cells  Number of lines to calibrate on, chosen among the table's engines; 0 predicts
        blindly.
    calibrate_on  Table of levels to calibrate on.
    profile  Profile to judge unchanged: a file of `calibrate`, vllm-0.12 ...
    slo  Limit of a set-up's highest rate or users, such as 'tpot<=50ms'; repeatable.
    seed  Random seed of the calibration split (0: from all lines; other: from 70 %).
    """

    sources: tuple[Path, ...] = option(value=(), argument=True, metavar="[TABLE.csv|RUN_DIR...]")
    calibrate_cells: int | None = option(must="0 or more")
    calibrate_on: Path | None = option(metavar="CELLS.csv")
    profile: str | None = option()
    instance: str | None = option(_MEASURED_ON)
    dtype: str | None = option(_MEASURED_DTYPE)
    slo: tuple[str, ...] = option(value=())
    seed: int = option(value=0)

    def _check(self) -> None:
        ways = (self.calibrate_cells, self.calibrate_on, self.profile)
        given = any(way is not None for way in ways)
        if not self.sources and (given or self.instance or self.dtype or self.slo or self.seed):
            raise InputError(
                "name a table or sweeps to judge; without one, the shipped profiles are judged "
                "unchanged and only --json applies"
            )
        _of_tables(self.sources, instance=self.instance, dtype=self.dtype)
        if sum(way is not None for way in ways) > 1:
            raise InputError("give one of --calibrate-cells, --calibrate-on and --profile")
        if self.seed and not self.calibrate_cells:
            raise InputError("--seed is of the split that --calibrate-cells makes: leave it out")


@dataclass(frozen=True, slots=True)
class VerifySettings(Settings):
    """A recommendation, and the target on which its load is replayed.

    target  Target to measure: a URL, sagemaker:NAME, engine, or sim:INSTANCE.
    share  Share of the planned load to send, 0 to 1.
    requests  Number of requests to send.
    model  Model name that the target knows.
    seed  Random seed of arrivals and prompts.
    out  Run folder.
    update_profile  Profile file to write, or to refine with this measurement.
    """

    recommendation: Path = option(planning.RECOMMENDATION, value=REQUIRED, metavar="REC.json")
    target: str = option(value=REQUIRED)
    share: float | None = option(default="1; sim: that of one replica", must="above 0 and at most 1")
    requests: int | None = option(default="enough for every SLO's quantile, at least 300")
    model: str | None = option("--model", "-m", default="the plan's")
    api_key: str | None = option(API_KEY)
    seed: int = option(value=0)
    out: Path | None = option("--out", "-o", default="runs/verify-NAME")
    update_profile: Path | None = option(metavar="P.json")


_PLAYED: Final = ("router", "answer_time", "wait_limit", "seed")  # by a policy alone


@dataclass(frozen=True, slots=True)
class DaySettings(Settings):
    """A day's load, the start-up time of a machine, and what a machine carries and costs.

    load  Load of the day: columns hour, rate_per_s.
    shape  Shape of a day without a file: flat, office or sine.
    peak  Highest load of the day in req/s.
    least_share  Lowest load of a shape as a share of its peak.
    start_up  Start-up time of a machine in seconds: 460, or
        detection=60,provisioning=180,image=120,weights=60,compile=30,warm_up=10.
    capacity  Load of one machine within the SLOs in req/s.
    least_slo_share  Share of the day's requests that must meet the SLOs, ramps included.
    policy  Autoscaler to play request by request: target-tracking or hpa, with settings such as
        hpa:target=2.5,stabilization_s=300,max_machines=8; repeatable.
    trace  Recorded traffic, repeated over the day: Azure's CSV, Mooncake's or Bailian's JSON lines.
    answer_time  Mean time of an answer at a machine's capacity in s.
    wait_limit  Longest wait in a queue within the SLOs in s.
    """

    recommendation: Path | None = option(planning.RECOMMENDATION)
    load: Path | None = option(metavar="FILE.csv")
    shape: str | None = option(default="office")
    peak: float | None = option(default="the file's, or REC's rate", must="above 0")
    least_share: float = option(value=0.2)
    start_up: str | None = option(default="estimated for REC")
    capacity: float | None = option(default="REC's lower bound")
    machine_price: float | None = option(planning.MACHINE_PRICE)
    commit_discount: float | None = option(planning.COMMIT_DISCOUNT)
    least_slo_share: float = option(value=0.99)
    policy: tuple[str, ...] = option(value=())
    trace: Path | None = option()
    router: str = option(planning.ROUTER, value="least-outstanding", help="Router of the machines.", group=None)
    answer_time: float | None = option(default="REC's, else 10", must="above 0 s")
    wait_limit: float = option(value=1.0)
    seed: int = option(planning.SEED, value=0, group=None)

    def _check(self) -> None:
        if self.load is not None and self.shape is not None:
            raise InputError("give either --load FILE.csv or --shape, not both")
        if self.trace is not None and (self.load is not None or self.shape is not None):
            raise InputError("--trace is the load of the day: leave --load and --shape out")
        for name, idle, needs in (
            *((each, not self.policy, "a policy that is played: add --policy") for each in _PLAYED),
            ("least_share", self.load or self.trace, "a shape: leave --load and --trace out"),
        ):
            if idle and getattr(self, name) != type(self).__dataclass_fields__[name].default:
                raise InputError(f"{flag_of(name)} is for {needs}")


@dataclass(frozen=True, slots=True)
class AcceleratorSettings(Settings):
    """A model and the lengths of its requests, for every machine of the catalog."""

    model: str = option(planning.MODEL, value=REQUIRED)
    input_tokens: int = option(planning.INPUT_TOKENS, value=256)
    output_tokens: int = option(planning.OUTPUT_TOKENS, value=256)
    dtype: str | None = option(planning.DTYPE)
    profile: str | None = option(planning.PROFILE)
    price_list: planning.PriceSettings = field(default_factory=planning.PriceSettings)


_DTYPE = "Weight format: float32, float16, bfloat16, float8, int8, int4, mxfp4 or nvfp4."


@dataclass(frozen=True, slots=True)
class MemorySettings(Settings):
    """A batch of equal sequences on one copy."""

    model: str = option(planning.MODEL, value=REQUIRED)
    dtype: str = option(_DTYPE, value="float16")
    kv_dtype: str | None = option(planning.KV_DTYPE)
    batch: int = option("Sequences at once.", value=1, must="at least 1")
    tokens: int = option("Tokens of each sequence, input and output.", value=4096, must="at least 1")
    tensor_parallel: int = option("Devices of one copy.", "--tp", value=1, must="at least 1")
    accelerator: str | None = option("Accelerator, such as A10G, for the shares of its memory.")
    memory_gb: float | None = option("Memory of a device in GB.", default="the accelerator's", must="above 0")
    overhead_gb: float = option("Memory that the framework takes, in GB.", value=0.0, must="at least 0")
    parameters_b: float | None = option("Parameters in 1e9, instead of the model's own number.", must="above 0")


@dataclass(frozen=True, slots=True)
class BatchSettings(Settings):
    """A model on a device."""

    model: str = option(planning.MODEL, value=REQUIRED)
    accelerator: str = option("Accelerator, such as A10G.", value=REQUIRED)
    dtype: str = option(_DTYPE, value="float16")
    tokens: int = option("Cached tokens of each sequence; length of the prompt.", value=4096, must="at least 1")


@dataclass(frozen=True, slots=True)
class BlendedSettings(Settings):
    """A machine with its price and throughput."""

    instance: str | None = option("Instance type, for its price.")
    price: float | None = option("Price in USD per hour.", default="the catalog's", must="above 0")
    throughput: float | None = option("Throughput in output tokens per second.", must="above 0")
    concurrency: float | None = option("Concurrent requests, with --itl instead of a throughput.", must="above 0")
    itl: float | None = option("Median inter-token latency in ms.", must="above 0")
    ratio: float = option("Input tokens for each output token.", value=3.0, must="above 0")
    discount: float = option("Discount on the price, 0 to 1.", value=0.0, must="at least 0 and below 1")

    def _check(self) -> None:
        if self.throughput is not None and (self.concurrency is not None or self.itl is not None):
            raise InputError("--throughput stands for --concurrency and --itl: leave those out")
        if self.price is not None and self.instance is not None:
            raise InputError(f"--price and --instance {self.instance} both state the price: leave one out")


@dataclass(frozen=True, slots=True)
class SavingsSettings(Settings):
    """Two machines."""

    cheap: str = option("Cheaper instance type.", argument=True, value=REQUIRED, metavar="CHEAP")
    dear: str = option("Dearer instance type.", argument=True, value=REQUIRED, metavar="DEAR")
    cheap_price: float | None = option("Price of CHEAP in USD/h.", default="the catalog's", must="above 0")
    dear_price: float | None = option("Price of DEAR in USD/h.", default="the catalog's", must="above 0")
