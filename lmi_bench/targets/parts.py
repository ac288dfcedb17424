"""An engine that is loaded but not started: its parts, settings, facts and limits."""

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from lmi_bench.analysis.model.capacity import roofline_of, step_time_model_for
from lmi_bench.analysis.model.profiles import EngineProfile
from lmi_bench.analysis.model.setup import Setup
from lmi_bench.analysis.results.knee_cause import KneeFacts
from lmi_bench.core.clock import run_virtual
from lmi_bench.core.errors import CapacityError, InputError
from lmi_bench.core.level import Level
from lmi_bench.core.scenario import EngineSection, Scenario
from lmi_bench.core.units import ms_to_s
from lmi_bench.engine.async_engine import AsyncEngine
from lmi_bench.engine.chrome_trace import ChromeTrace
from lmi_bench.engine.executor import Executor
from lmi_bench.engine.memory_budget import MemoryBudget
from lmi_bench.engine.quantization import QuantizedBytes
from lmi_bench.engine.replicas import ReplicaGroup
from lmi_bench.engine.router import make_router
from lmi_bench.engine.scheduling.config import KvLayout, SchedulerConfig
from lmi_bench.engine.scheduling.drafting import Drafter
from lmi_bench.engine.scheduling.scheduler import Scheduler
from lmi_bench.engine.scheduling.step_shape import StepShape
from lmi_bench.engine.tokenizer import Tokenizer
from lmi_bench.loadgen.prompts.prompts import PromptText
from lmi_bench.loadgen.run.in_process_target import InProcessTarget
from lmi_bench.models.shape import ModelShape
from lmi_bench.targets.bench import Bench, Main
from lmi_bench.targets.drafting import speculation_facts
from lmi_bench.targets.prompts import lengths_of, make_prompts

if TYPE_CHECKING:
    from lmi_bench.engine.torch_backend.executor import ParallelExecutor, TorchExecutor

    LoadedModel = TorchExecutor | ParallelExecutor  # a model over one rank or several


@dataclass(frozen=True, slots=True)
class EngineParts:
    """An engine that is loaded but not started.

    executors       one per replica
    facts           for a run's manifest
    setup, profile  of a simulated engine
    notes           shown at the start of a run
    drafter         of speculative decoding
    router          policy that chooses the replica for a request
    back_end_note   what runs the steps of a bundled engine, and why
    models          of a bundled engine's replica: its model, then a draft model
    memory_budget   of each replica's cache if it follows the free memory
    """

    executors: tuple[Executor, ...]
    config: SchedulerConfig
    shape: ModelShape
    tokenizer: Tokenizer | None
    facts: dict[str, Any]
    setup: Setup | None = None
    profile: EngineProfile | None = None
    notes: tuple[str, ...] = ()
    drafter: Drafter | None = None
    tensor_parallel: int = 1
    router: str = "round_robin"
    back_end_note: str = ""
    models: "tuple[LoadedModel, ...]" = ()
    memory_budget: MemoryBudget | None = None

    @property
    def request_overhead_s(self) -> float:
        """Time of a request outside a simulated engine; a bundled one has its own."""
        return 0.0 if self.profile is None else self.profile.parameters.request_overhead_s

    @property
    def quantized(self) -> QuantizedBytes | None:
        """Result of quantizing the model's matrices; None without quantization."""
        return self.models[0].quantized if self.models else None

    @property
    def loaded(self) -> "LoadedModel":
        """The model of a bundled engine; its methods are for use before the start."""
        return self.models[0]

    def engine(self, trace: ChromeTrace | None = None) -> AsyncEngine | ReplicaGroup:
        """The engine, or all replicas behind their router; an async context manager. Raises
        InputError for a trace of several replicas."""
        if trace is not None and len(self.executors) > 1:
            raise InputError(
                f"--step-trace shows the steps of one engine, not of {len(self.executors)} "
                "replicas: leave one of the two out"
            )
        engines = [
            AsyncEngine(
                Scheduler(self.config, drafter=self.drafter),
                executor,
                on_step=None if trace is None else trace.on_step,
                on_end=None if trace is None else trace.on_end,
                memory_budget=self.memory_budget,
                seq_ids=itertools.count(number, len(self.executors)),
            )
            for number, executor in enumerate(self.executors)
        ]
        return engines[0] if len(engines) == 1 else ReplicaGroup(engines, make_router(self.router))

    def bench(self, scenario: Scenario, text: PromptText, trace: ChromeTrace | None) -> Bench:
        """The engine as a target; a simulated one runs in virtual time."""
        simulated, tokenizer, workload = self.setup, self.tokenizer, scenario.workload
        eos = () if tokenizer is None or workload.ignore_eos else tokenizer.eos_token_ids
        kind, overhead_s = "bundled engine", self.request_overhead_s
        if simulated is not None:
            kind = f"simulated {simulated.instance.instance_type}"

        async def run_in(main: Main) -> Any:
            async with self.engine(trace) as engine:
                return await main(InProcessTarget(engine, simulated is not None, eos, overhead_s))

        return Bench(
            scenario=scenario,
            title=f"{kind}, {self.shape.name}",
            facts=self.facts,
            prompts=lambda salt: make_prompts(scenario, text, tokenizer, salt),
            run=lambda main: (run_virtual if simulated else asyncio.run)(run_in(main)),
            knee_facts=lambda levels: engine_limits(scenario, self, levels),
            notes=self.notes,
            salted=simulated is None and not workload.reuse_prompts,
        )


async def close_all(executors: Sequence[Executor]) -> None:
    """Close executors whose engine was never started."""
    for executor in executors:
        await executor.close()


def degree_of(settings: EngineSection, devices: int) -> int:
    """The tensor-parallel degree; `max` uses all devices or cores, shared by the replicas."""
    degree = settings.tensor_parallel or 1
    return degree if isinstance(degree, int) else max(1, devices // settings.replicas)


def replica_note(settings: EngineSection) -> str:
    """The number of replicas and their router, for display; empty for one replica."""
    if settings.replicas == 1:
        return ""
    return f"{settings.replicas} replicas behind a {settings.router.replace('_', '-')} router"


def replica_facts(settings: EngineSection) -> dict[str, Any]:
    """Replicas and their router, for a run's manifest; empty for one replica."""
    if settings.replicas == 1:
        return {}
    return {"replicas": settings.replicas, "router": settings.router}


def scheduler_facts(settings: EngineSection, config: SchedulerConfig) -> dict[str, Any]:
    """The scheduler's configuration and speculative decoding, for a run's manifest."""
    scheduler = {key: getattr(value, "value", value) for key, value in asdict(config).items()}
    return {"scheduler": scheduler, **speculation_facts(settings)}


def scheduler_config(settings: EngineSection, derived: SchedulerConfig) -> SchedulerConfig:
    """The engine's own configuration, overridden by the settings that were stated."""
    shared = {field.name for field in fields(SchedulerConfig)} & {*EngineSection.model_fields}
    stated: dict[str, Any] = {name: getattr(settings, name) for name in shared}
    stated["max_batch_delay_s"] = ms_to_s(settings.max_batch_delay_ms)
    budget = settings.max_batch_total_tokens
    if budget is not None:
        tokens = (settings.num_blocks or derived.num_blocks) * derived.block_size
        if budget > tokens:
            raise CapacityError(
                f"max_batch_total_tokens {budget:,}: the KV cache holds {tokens:,} tokens; lower "
                "it, or give the cache more memory"
            )
        if budget < derived.block_size:
            raise CapacityError(
                f"max_batch_total_tokens {budget:,} is less than one KV-cache block of "
                f"{derived.block_size} tokens: raise it, or lower --block-size"
            )
        stated["num_blocks"] = budget // derived.block_size
    stated = {key: value for key, value in stated.items() if value is not None}
    if settings.policy != "rolling" or settings.chunked_prefill or settings.recompute_on_join:
        derived = replace(derived, max_waiting_tokens=0)  # a profile's rule for whole prompts
    return replace(derived, **stated)


def engine_limits(scenario: Scenario, parts: EngineParts, levels: Sequence[Level]) -> KneeFacts:
    """Limits over all replicas: sequences in the cache, slots of the batch. Of a simulated engine
    also the part of its step model that binds at each level."""
    kinds, config, copies = lengths_of(scenario), parts.config, len(parts.executors)
    shares = sum(kind.share for kind in kinds)
    full = sum((k.input_tokens + k.output_tokens) * k.share for k in kinds) / shares
    half = sum((k.input_tokens + k.output_tokens / 2) * k.share for k in kinds) / shares
    paged = config.kv_layout is KvLayout.PAGED
    limits = KneeFacts(
        b_max=config.cache_tokens // full * copies,
        b_max_expected=config.cache_tokens // (half if paged else full) * copies,
        max_batch=config.max_running * copies,
    )
    if parts.setup is None or parts.profile is None:
        return limits
    setup, profile = replace(parts.setup, speculation=None), parts.profile
    lengths = max(kinds, key=lambda kind: kind.input_tokens + kind.output_tokens)
    prompt, output = lengths.input_tokens, lengths.output_tokens
    critical = roofline_of(setup, input_tokens=prompt, output_tokens=output).critical_batch
    model = step_time_model_for(setup, profile)
    context = prompt + output // 2
    binding = {}
    for line in levels:
        running = round((line.mean_concurrency or 0) / copies)
        batch = max(1, min(running, int((limits.b_max_expected or 0) / copies or running)))
        binding[line.load.value] = model.explain(StepShape.decoding(batch, batch * context)).binding
    b_star = float("inf") if critical is None else critical * copies
    return replace(limits, b_star=b_star, binding=binding)
