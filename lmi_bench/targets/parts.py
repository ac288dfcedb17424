"""An engine that is ready to be entered, whatever computes its steps, and what all kinds share."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from lmi_bench.analysis.model.profiles import EngineProfile
from lmi_bench.core.errors import CapacityError, InputError
from lmi_bench.core.scenario import EngineSection
from lmi_bench.core.units import ms_to_s
from lmi_bench.engine.async_engine import AsyncEngine
from lmi_bench.engine.chrome_trace import ChromeTrace
from lmi_bench.engine.executor import Executor
from lmi_bench.engine.memory_budget import MemoryBudget
from lmi_bench.engine.quantization import QuantizedBytes
from lmi_bench.engine.replicas import ReplicaGroup
from lmi_bench.engine.router import make_router
from lmi_bench.engine.scheduling.config import BatchingPolicy, KvLayout, SchedulerConfig
from lmi_bench.engine.scheduling.drafting import Drafter
from lmi_bench.engine.scheduling.scheduler import Scheduler
from lmi_bench.engine.tokenizer import Tokenizer
from lmi_bench.models.shape import ModelShape

if TYPE_CHECKING:
    from lmi_bench.engine.torch_backend.static.check import StepDifference as StepDifference


@dataclass(frozen=True, slots=True)
class EngineParts:
    """An engine that is ready to be entered: its executor holds the model already.

    facts    for a run's manifest; notes: shown at the start of a run
    executors  one a replica
    profile    of a simulated engine
    drafter    of speculative decoding
    router     which replica answers a request, where there are several
    quantized  what quantizing did to the model's matrices; None where nothing was
    score      log-probabilities of given tokens behind others; before the engine is entered
    back_end_note  what runs the steps of a bundled engine, and why
    compare    prepared decode steps against eager ones; before the engine is entered
    memory_budget  of each replica's cache, where it follows the free memory
    time_products  seconds of a decode step's matrix products for so many sequences, likewise
    """

    executors: tuple[Executor, ...]
    config: SchedulerConfig
    shape: ModelShape
    tokenizer: Tokenizer | None
    facts: dict[str, Any]
    profile: EngineProfile | None = None
    notes: tuple[str, ...] = ()
    drafter: Drafter | None = None
    tensor_parallel: int = 1
    router: str = "round_robin"
    back_end_note: str = ""
    score: Callable[[Sequence[int], Sequence[int]], Awaitable[list[float]]] | None = None
    quantized: QuantizedBytes | None = None
    compare: Callable[[], Awaitable[list[StepDifference]]] | None = None
    time_products: Callable[[int], Awaitable[float | None]] | None = None
    memory_budget: MemoryBudget | None = None

    def engine(self, trace: ChromeTrace | None = None) -> AsyncEngine | ReplicaGroup:
        """The engine, or all replicas behind their router; an async context manager.

        Raises InputError for a trace of several replicas.
        """
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


async def close_all(executors: Sequence[Executor]) -> None:
    """Close executors that no engine has been entered with."""
    for executor in executors:
        await executor.close()


def degree_of(settings: EngineSection, *, most: int) -> int:
    """The tensor-parallel degree; `max` is as many as there are devices or cores for one copy."""
    degree = settings.tensor_parallel
    return degree if isinstance(degree, int) else most


def replica_note(copies: int, router: str) -> str:
    return f"{copies} replicas behind a {router.replace('_', '-')} router"


def replica_facts(settings: EngineSection) -> dict[str, Any]:
    if settings.replicas == 1:
        return {}
    return {"replicas": settings.replicas, "router": settings.router}


def scheduler_config(settings: EngineSection, derived: SchedulerConfig) -> SchedulerConfig:
    """The engine's own configuration with the settings that were stated laid over it."""
    stated: dict[str, Any] = {
        "policy": BatchingPolicy(settings.policy),
        "batch_size": settings.batch_size,
        "max_batch_delay_s": ms_to_s(settings.max_batch_delay_ms),
        "kv_layout": None if settings.kv_layout is None else KvLayout(settings.kv_layout),
        "max_rolling_batch_size": settings.max_rolling_batch_size,
        "max_rolling_batch_prefill_tokens": settings.max_rolling_batch_prefill_tokens,
        "chunked_prefill": settings.chunked_prefill,
        "max_concurrent_requests": settings.max_concurrent_requests,
        "prefix_caching": settings.prefix_caching,
        "recompute_on_join": settings.recompute_on_join,
        "max_input_tokens": settings.max_input_tokens,
        "num_blocks": settings.num_blocks,
        "max_model_len": settings.max_model_len,
    }
    budget = settings.max_batch_total_tokens
    if budget is not None:
        blocks = settings.num_blocks or derived.num_blocks
        if budget > blocks * derived.block_size:
            raise CapacityError(
                f"max_batch_total_tokens {budget:,}: the KV cache holds "
                f"{blocks * derived.block_size:,} tokens; lower it, or give the cache more memory"
            )
        if budget < derived.block_size:
            raise CapacityError(
                f"max_batch_total_tokens {budget:,} is less than one KV-cache block of "
                f"{derived.block_size} tokens: raise it, or lower --block-size"
            )
        stated["num_blocks"] = budget // derived.block_size
    return replace(derived, **{key: value for key, value in stated.items() if value is not None})


def config_facts(config: SchedulerConfig) -> dict[str, Any]:
    return {key: getattr(value, "value", value) for key, value in asdict(config).items()}
