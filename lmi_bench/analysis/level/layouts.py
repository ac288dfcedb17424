"""Layouts of a catalog, the workload on them, and one copy as the engine would run it."""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, cycle, islice
from random import Random
from statistics import fmean
from typing import Any

from lmi_bench.analysis.level.prefix_hits import CachedLengths, PrefixTraffic
from lmi_bench.analysis.level.queueing import QueueRun, follow
from lmi_bench.analysis.level.simulator import simulate_level
from lmi_bench.analysis.level.steady_state import LATENCY_LOAD_LIMIT, SteadyState
from lmi_bench.analysis.model import capacity
from lmi_bench.analysis.model.engine_setting import AS_STATED, EngineSetting
from lmi_bench.analysis.model.profiles import EngineProfile, as_set
from lmi_bench.analysis.model.setup import Setup, Speculation
from lmi_bench.catalog.accelerators import NO_LINK, Link
from lmi_bench.catalog.instances import Instance, joined
from lmi_bench.core.errors import InputError
from lmi_bench.core.json_value import JsonValue, key_of
from lmi_bench.core.load import Load
from lmi_bench.core.records import LevelRun
from lmi_bench.core.workload import LevelSpec, PlannedRequest, arrival_times_s
from lmi_bench.engine.scheduling.config import KvLayout, SchedulerConfig
from lmi_bench.models.shape import ModelShape, tensor_parallel_problem

CopyKey = tuple[str, Link, int, EngineSetting]
"""Accelerator, link, tensor-parallel degree, setting: they determine the speed of a lone copy."""
EngineKey = tuple[CopyKey, int]
"""And the copies on its host, which slow each other down."""

_DEGREES = (1, 2, 4, 8, 16)
_ROUNDS = 3
_SALT = 7_919  # so that a level's lengths and its arrivals are different draws


@dataclass(frozen=True, slots=True)
class Layout:
    """How a machine is used: `copies` of the model on `tensor_parallel` devices each."""

    instance: Instance
    tensor_parallel: int
    setting: EngineSetting = AS_STATED

    @property
    def copies(self) -> int:
        """Copies on one machine: stated by the setting, else as many as it holds."""
        return self.setting.copies or self.instance.num_accelerators // self.devices

    @property
    def devices(self) -> int:
        """Devices of one copy."""
        return self.tensor_parallel * (self.setting.pipeline or 1)

    @property
    def fits(self) -> bool:
        """Whether the machine has the devices for all copies."""
        return 1 <= self.copies * self.devices <= self.instance.num_accelerators

    @property
    def engine_key(self) -> EngineKey:
        """Layouts with equal keys have equally fast copies and are simulated once."""
        return self.copy_key, self.copies

    @property
    def copy_key(self) -> CopyKey:
        """Layouts with equal keys would have equally fast copies on hosts of their own."""
        link = self.instance.link if self.tensor_parallel > 1 else NO_LINK
        device = self.instance.accelerator.name
        if self.setting.hosts:  # a copy that spans machines depends on their network
            device += f" on {self.instance.instance_type}"
        return device, link, self.tensor_parallel, self.setting.of_a_copy

    def setup(self, workload: "Workload") -> Setup:
        """One copy. workload: as this layout's setting serves it."""
        return Setup(
            workload.shape,
            self.instance,
            self.tensor_parallel,
            workload.dtype,
            workload.kv_dtype,
            workload.speculation,
            self.setting.parallelism(self.instance, self.tensor_parallel),
            max(1, self.copies),
        )

    def rejected(self, reason: str) -> "Rejection":
        """This layout as one that is out."""
        name, setting = self.instance.instance_type, self.setting.describe() or None
        return Rejection(name, self.tensor_parallel, self.copies, reason, setting=setting)


@dataclass(frozen=True, slots=True)
class Rejection(JsonValue):
    """A layout that is out, with the reason; `tensor_parallel` None: at every degree.

    setting  differences of the engine from the question, for display; None without any
    """

    instance_type: str = field(metadata=key_of("instance"))
    tensor_parallel: int | None
    copies: int | None = field(metadata=key_of("replicas"))
    setting: str | None = field(default=None, kw_only=True)
    reason: str


@dataclass(frozen=True, slots=True)
class RequestKind(JsonValue):
    """Requests of one pair of lengths; share: relative to the other kinds."""

    input_tokens: int
    output_tokens: int
    share: float


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests of a model in a number format, all equal or of several kinds.

    input_tokens, output_tokens   of each request; with kinds their means, for closed forms
    kinds         of requests, for simulations; empty: equal requests
    burstiness    of random arrivals: 1 is Poisson, below 1 they come in bursts
    dtype, kv_dtype, speculation   as in `Setup`
    cached_tokens  mean tokens of a prompt that the prefix cache holds
    traffic       requests that tell what they have in common, for the prefix cache; None: nothing
    """

    shape: ModelShape
    dtype: str
    input_tokens: int
    output_tokens: int
    kv_dtype: str | None = None
    speculation: Speculation | None = None
    kinds: tuple[RequestKind, ...] = ()
    burstiness: float = 1.0
    cached_tokens: int = 0
    traffic: PrefixTraffic | None = None

    def __post_init__(self) -> None:
        if self.input_tokens < 1 or self.output_tokens < 1:
            raise InputError(
                "--input-tokens and --output-tokens must be at least 1, got "
                f"{self.input_tokens} and {self.output_tokens}"
            )

    @property
    def total_tokens(self) -> int:
        """Tokens of one request, input and output."""
        return self.input_tokens + self.output_tokens

    @property
    def most_tokens(self) -> int:
        """Tokens of the longest request."""
        sizes = (kind.input_tokens + kind.output_tokens for kind in self.kinds)
        return max(sizes, default=self.total_tokens)

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt."""
        return max((kind.input_tokens for kind in self.kinds), default=self.input_tokens)

    @classmethod
    def mixed(cls, shape: ModelShape, dtype: str, kinds: Sequence[RequestKind], **more: Any) -> "Workload":
        """Requests of several kinds; raises InputError without any."""
        whole = sum(kind.share for kind in kinds)
        if not whole > 0 or any(kind.share < 0 for kind in kinds):
            raise InputError("a mix needs at least one kind of request with a share above 0")
        prompt = sum(kind.share * kind.input_tokens for kind in kinds) / whole
        answer = sum(kind.share * kind.output_tokens for kind in kinds) / whole
        means = max(1, round(prompt)), max(1, round(answer))
        return cls(shape, dtype, *means, kinds=tuple(kinds), **more)

    def under(self, setting: EngineSetting) -> "Workload":
        """The workload as an engine with that setting serves it."""
        return replace(
            self,
            dtype=setting.dtype or self.dtype,
            kv_dtype=setting.kv_dtype or self.kv_dtype,
            speculation=setting.speculation or self.speculation,
        )

    def requests(self, seed: int) -> Callable[[int], PlannedRequest]:
        """The request of a number: equal ones, or kinds drawn by their shares."""
        if not self.kinds:
            shared = range(self.cached_tokens)  # of each prompt, whose other text is its own
            lengths = self.input_tokens, self.output_tokens
            return lambda number: PlannedRequest(number, 0.0, *lengths, prompt_token_ids=shared)
        ends = list(accumulate(kind.share for kind in self.kinds))

        def drawn(number: int) -> PlannedRequest:
            at = Random(seed * _SALT + number).random() * ends[-1]
            kind = self.kinds[min(bisect_right(ends, at), len(ends) - 1)]
            return PlannedRequest(number, 0.0, kind.input_tokens, kind.output_tokens)

        return drawn


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """One copy of the model as the engine would run it, and its workload.

    copies   of the fleet that share prefix traffic, as far as it is known when planning
    lengths  of that traffic's requests, with what the copy's cache holds of each
    shared_tokens  that running sequences have in common
    """

    config: SchedulerConfig
    steady: SteadyState
    workload: Workload
    copies: int = 1
    lengths: tuple[CachedLengths, ...] = ()
    shared_tokens: int = 0

    def simulate(self, spec: LevelSpec, *, seed: int = 0, copies: int | None = None, **options: Any) -> LevelRun:
        """One level of the copy, or of several behind a router, under the workload's requests.

        spec     arrivals of an open loop get the workload's burstiness
        copies   of the fleet for each simulated one
        options  of `simulate_level`
        """
        workload, request = self.workload, self.workload.requests(seed)
        if workload.traffic is not None and spec.rate_per_s is not None:
            replicas = options.get("replicas", 1)
            copies = max(1, self.copies // replicas) if copies is None else copies
            request = workload.traffic.of_copy(spec.rate_per_s, copies, seed)
            spec = replace(spec, load=replace(spec.load, arrivals="trace"))
        elif spec.rate_per_s is not None and workload.burstiness < 1:
            bursts = replace(spec.load, arrivals="gamma", burstiness=workload.burstiness)
            spec = replace(spec, load=bursts)
        return simulate_level(
            spec,
            request,
            self.config,
            self.steady.model,
            seed=seed,
            speculation=workload.speculation,
            overhead_s=self.steady.overhead_s,
            **options,
        )

    @property
    def can_follow(self) -> bool:
        """Whether `follow` has its rules: hits in a cache are not its own, and speculation's steps
        have no fixed number of tokens."""
        workload = self.workload
        plain = workload.traffic is None and workload.speculation is None
        return plain and not self.config.prefix_caching

    def follow(self, rate_per_s: float, number: int, *, seed: int = 0, users: int = 0) -> QueueRun:
        """`simulate` without its records, and many times faster: of an open loop, or of users who
        begin at this rate."""
        burstiness, draw = self.workload.burstiness, self.workload.requests(seed)
        load = Load(rate_per_s=rate_per_s, arrivals="poisson" if burstiness >= 1 else "gamma", burstiness=burstiness)
        requests = list(islice(cycle(self.lengths), number))
        if not requests:
            planned = map(draw, range(number)) if self.workload.kinds else [draw(0)] * number
            cached = self.workload.cached_tokens
            requests = [(each.input_tokens, each.output_tokens, min(cached, each.input_tokens - 1)) for each in planned]
        steady = self.steady
        return follow(
            steady.model,
            self.config,
            users or list(arrival_times_s(load, seed=seed, num_requests=number)),
            requests,
            overhead_s=steady.overhead_s,
            shared_tokens=self.shared_tokens,
            spacing_s=1 / rate_per_s,
        )


def with_prefix_hits(plan: CopyPlan) -> CopyPlan:
    """The plan with the hits of its prefix traffic; they and the fleet's copies take rounds."""
    traffic, config = plan.workload.traffic, replace(plan.config, prefix_caching=True)
    if traffic is None:
        return plan
    copied = replace(plan.steady.prompt_shape(), copied_tokens=plan.steady.new_tokens)
    copy_share = plan.steady.model.step_time_s(copied) / plan.steady.prompt_step_s - 1
    held_tokens = config.cache_tokens + config.host_blocks * config.block_size
    for _ in range(_ROUNDS):
        busy_per_s = LATENCY_LOAD_LIMIT * plan.steady.saturated_rate_per_s
        fleet_per_s = traffic.rate_per_s or busy_per_s
        copies = max(1, math.ceil(fleet_per_s / busy_per_s))
        rate_per_s = fleet_per_s / copies
        lengths = traffic.lengths(rate_per_s, copies, held_tokens)
        if config.host_blocks:  # what is only there counts as found but for the time of its copy
            near = traffic.lengths(rate_per_s, copies, config.cache_tokens)
            lengths = [
                (prompt, output, round(found - copy_share * (found - here)))
                for (prompt, output, found), (_, _, here) in zip(lengths, near, strict=True)
            ]
        shared = traffic.shared_tokens(rate_per_s, copies)
        prompt, output, cached = (round(fmean(each)) for each in zip(*lengths, strict=True))
        prompt, output = max(1, prompt), max(1, output)
        workload = replace(plan.workload, input_tokens=prompt, output_tokens=output, cached_tokens=cached)
        steady = replace(
            plan.steady,
            input_tokens=prompt,
            output_tokens=output,
            cached_tokens=min(cached, prompt - 1),
            slots=slots_of(config, max(1, prompt - shared), output),
        )
        plan = CopyPlan(config, steady, workload, copies, tuple(lengths), shared)
    return plan


def layouts_of(
    instance: Instance, degrees: Sequence[int] | None = None, settings: Sequence[EngineSetting] = (AS_STATED,)
) -> Iterator[Layout]:
    """The layouts of a machine: powers of two and the whole machine, or the given degrees."""
    found = []
    for setting in settings:
        hosts = joined(instance, setting.hosts or 1)
        most = hosts.num_accelerators // (setting.pipeline or 1)
        wanted = sorted({*_DEGREES, most}) if degrees is None else degrees
        splits_a_stage = setting.expert_parallel or setting.dp_attention
        found += [
            Layout(hosts, degree, setting)
            for degree in wanted
            # a lone device has nothing to split
            if 1 <= degree <= most and (degree > 1 or not splits_a_stage)
        ]
    yield from sorted(found, key=lambda layout: layout.tensor_parallel)


def plan_copy(layout: Layout, workload: Workload, profile: EngineProfile, *, open_loop: bool) -> CopyPlan:
    """The scheduler and the speed of one copy; raises InputError with the reason if impossible."""
    setting, degree = layout.setting, layout.tensor_parallel
    workload = workload.under(setting)
    setup = layout.setup(workload)
    problem = setup.split_problem or tensor_parallel_problem(workload.shape, setup.attention_degree)
    if problem is None and not layout.fits:
        copies = max(1, layout.copies)
        problem = (
            f"{copies} copies at TP {degree} need {copies * layout.devices} devices, it has "
            f"{layout.instance.num_accelerators}"
        )
    if problem is not None:
        raise InputError(problem)
    profile = setting.profile(as_set(profile, workload.shape, layout.instance.accelerator))
    model = capacity.planned_model_for(setup, profile)
    config = capacity.scheduler_config_for(setup, profile, workload.most_tokens)
    if (tokens := setting.max_prefill_tokens) is not None:
        longest = workload.longest_prompt
        if not config.chunked_prefill and tokens < longest:
            raise InputError(
                f"prompts of {longest:,} tokens exceed {tokens:,} prompt tokens a step: split "
                "them (chunked prefill) or allow more"
            )
        config = replace(config, max_rolling_batch_prefill_tokens=tokens)
    if workload.cached_tokens:
        config = replace(config, prefix_caching=True)
    steady = SteadyState(
        model=model,
        input_tokens=workload.input_tokens,
        output_tokens=workload.output_tokens,
        slots=slots_of(config, workload.input_tokens, workload.output_tokens),
        open_loop=open_loop,
        batch_limit=config.max_rolling_batch_size,
        overhead_s=profile.parameters.request_overhead_s,
        cached_tokens=workload.cached_tokens,
        join_steps=max(0, config.max_waiting_tokens - 1),
        chunked=config.chunked_prefill,
        step_tokens=config.max_rolling_batch_prefill_tokens,
    )
    return with_prefix_hits(CopyPlan(config, steady, workload))


def slots_of(config: SchedulerConfig, input_tokens: int, output_tokens: int) -> int:
    """Sequences that run together: guaranteed if lengths are reserved, expected if paged."""
    held = input_tokens + output_tokens
    if config.kv_layout is KvLayout.PAGED:
        held = input_tokens + output_tokens // 2
    blocks = -(-held // config.block_size)
    return max(1, min(config.num_blocks // blocks, config.max_rolling_batch_size))


def split_layouts(
    instances: Iterable[Instance],
    workload: Workload,
    profile: EngineProfile,
    *,
    degrees: Sequence[int] | None,
    open_loop: bool,
    settings: Sequence[EngineSetting] = (AS_STATED,),
) -> tuple[list[tuple[Layout, CopyPlan]], list[Rejection]]:
    """Layouts that can run, each with its plan, and the others with their reasons.

    Raises InputError for a model or a number format that the engine does not load.
    """
    problem = capacity.checkpoint_problem(profile, workload.shape, workload.dtype)
    if problem is not None:
        raise InputError(problem)
    plans: dict[tuple[EngineKey, bool], CopyPlan | str] = {}
    possible: list[tuple[Layout, CopyPlan]] = []
    rejected: list[Rejection] = []
    for instance in instances:
        accelerator = instance.accelerator
        blanket = None
        if capacity.device_problem(profile, accelerator) is not None:
            blanket = f"{profile.label} does not run on {accelerator.name}"
        elif accelerator.bandwidth_bytes_per_s is None:
            blanket = f"no source states the memory bandwidth of {accelerator.name}"
        if blanket is not None:
            rejected.append(Rejection(instance.instance_type, None, None, blanket))
            continue
        devices = instance.num_accelerators * max(setting.hosts or 1 for setting in settings)
        rejected.extend(
            Rejection(instance.instance_type, degree, None, f"it has {devices} device(s)")
            for degree in degrees or ()
            if degree > devices
        )
        for layout in layouts_of(instance, degrees, settings):
            key = (layout.engine_key, layout.fits)
            if key not in plans:
                try:
                    plans[key] = plan_copy(layout, workload, profile, open_loop=open_loop)
                except InputError as exc:
                    plans[key] = str(exc).removeprefix(f"{instance.instance_type}: ")
            plan = plans[key]
            if isinstance(plan, CopyPlan):
                possible.append((layout, plan))
            else:
                rejected.append(layout.rejected(plan))
    return possible, rejected
