"""Puts the parts together: which target, engine, executor and clock a command runs on.

The only module that reaches `engine.torch_backend`, inside the function that needs it.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from lmi_bench.analysis.knee_cause import KneeFacts
from lmi_bench.clock import run_virtual
from lmi_bench.engine.async_engine import AsyncEngine
from lmi_bench.engine.executor import Executor
from lmi_bench.engine.scheduling.config import BatchingPolicy, KvLayout, SchedulerConfig
from lmi_bench.engine.scheduling.scheduler import Scheduler
from lmi_bench.engine.tokenizer import Tokenizer
from lmi_bench.errors import InputError
from lmi_bench.loadgen.in_process_target import InProcessTarget
from lmi_bench.loadgen.prompts import (
    CommonWords,
    DatasetPrompts,
    ExactText,
    Lengths,
    NoText,
    Prompts,
    PromptText,
    SyntheticPrompts,
    TokenIds,
    load_dataset,
)
from lmi_bench.loadgen.target import Target
from lmi_bench.model_shape import ModelShape
from lmi_bench.scenario import EngineSection, Scenario
from lmi_bench.units import bytes_to_gib

T = TypeVar("T")
Main = Callable[[Target], Awaitable[T]]
SIMULATED_PREFIX = "sim:"
ENGINE_TARGET = "engine"


@dataclass(frozen=True, slots=True)
class EngineParts:
    """An engine that is ready to be entered: its executor holds the model already.

    facts  what a run's manifest says of it; notes: what a person is told at start
    """

    executor: Executor
    config: SchedulerConfig
    shape: ModelShape
    tokenizer: Tokenizer | None
    facts: dict[str, Any]
    notes: tuple[str, ...] = ()

    def engine(self) -> AsyncEngine:
        """The engine; an async context manager."""
        return AsyncEngine(Scheduler(self.config), self.executor)


@dataclass(frozen=True, slots=True)
class Bench:
    """A target that is ready to be measured, and everything that depends on its kind.

    run         runs a coroutine over the target on the clock that the target needs
    knee_facts  what is known of the server, for the levels' lines given
    secrets     values that must never reach a file
    """

    title: str
    facts: dict[str, Any]
    prompts: Callable[[str], Prompts]
    run: Callable[[Main[Any]], Any]
    knee_facts: Callable[[Sequence[Mapping[str, Any]]], KneeFacts]
    notes: tuple[str, ...] = ()
    secrets: tuple[str, ...] = ()
    spacing_s: float = 0.0
    salted: bool = field(default=True)

    def new_salt(self) -> str:
        """What makes this run's prompts unlike those of every other run."""
        return secrets.token_hex(4) if self.salted else ""


@contextmanager
def open_bench(scenario: Scenario) -> Iterator[Bench]:
    """The scenario's target, checked and loaded; raises InputError where it cannot be."""
    target = scenario.target
    if target == ENGINE_TARGET:
        yield _engine_bench(scenario)
    elif target.startswith(SIMULATED_PREFIX):
        yield _simulated_bench(scenario, target.removeprefix(SIMULATED_PREFIX))
    elif "://" in target:
        yield _http_bench(scenario)
    else:
        raise InputError(
            f"target {target!r} is not understood; write engine, sim:INSTANCE "
            "(such as sim:ml.g5.2xlarge) or a URL (http://host:port)"
        )


def open_torch_engine(model: str, settings: EngineSection) -> EngineParts:
    """The bundled engine with a model folder or a demo model, loaded into memory.

    Raises InputError where the model or a setting cannot be used, or torch is not installed.
    """
    if settings.tensor_parallel > 1:
        raise InputError(
            f"--tp {settings.tensor_parallel}: the bundled engine runs on one rank so far; "
            "leave --tp out, or simulate it with --target sim:INSTANCE"
        )
    try:
        from lmi_bench.engine.torch_backend.demo import DEMO_MODELS, ensure_demo_model
        from lmi_bench.engine.torch_backend.executor import DEFAULT_BLOCK_SIZE, TorchExecutor
    except ImportError as exc:
        raise InputError(
            f"the bundled engine needs {exc.name}: pip install 'lmi-bench[engine]', or use "
            "--target sim:INSTANCE or a URL"
        ) from exc
    if model in DEMO_MODELS:
        folder = ensure_demo_model(model)
    elif Path(model).is_dir():
        folder = Path(model)
    else:
        raise InputError(
            f"model {model!r} is neither a folder nor a demo model ({', '.join(DEMO_MODELS)}): "
            "give the path of a Hugging Face folder (config.json, *.safetensors, tokenizer.json)"
        )
    options: dict[str, Any] = {}
    if settings.memory_share is not None:
        options["memory_share"] = settings.memory_share
    executor = TorchExecutor.load(
        folder,
        dtype=settings.dtype or "bfloat16",
        num_blocks=settings.num_blocks,
        block_size=settings.block_size or DEFAULT_BLOCK_SIZE,
        threads=settings.threads,
        **options,
    )
    shape = executor.model_shape
    config = _scheduler_config(
        settings,
        SchedulerConfig(
            num_blocks=executor.num_blocks,
            block_size=executor.block_size,
            max_model_len=min(shape.max_positions, executor.num_blocks * executor.block_size),
        ),
    )
    return EngineParts(
        executor=executor,
        config=config,
        shape=shape,
        tokenizer=Tokenizer.from_folder(folder),
        facts={
            "kind": "engine",
            "model": shape.name,
            "back_end": "torch",
            "weights": executor.weights_description,
            "threads": executor.threads,
            "free_memory_bytes": executor.free_memory_bytes,
            "kv_cache_bytes": executor.kv_cache_bytes,
            "scheduler": _config_facts(config),
        },
        notes=(
            f"{shape.name}: {shape.params_total:,} parameters, {executor.weights_description}",
            f"free memory after loading {bytes_to_gib(executor.free_memory_bytes):.1f} GiB; KV "
            f"cache {bytes_to_gib(executor.kv_cache_bytes):.2f} GiB in {config.num_blocks:,} "
            f"blocks of {config.block_size}, {config.cache_tokens:,} tokens",
        ),
    )


def open_simulated_engine(
    model: str,
    instance_type: str,
    settings: EngineSection,
    *,
    max_total_tokens: int,
    profile: EngineProfile | None = None,
) -> EngineParts:
    """An engine that takes the predicted time of each step of a model on an instance.

    max_total_tokens  most tokens, input and output, of one request
    """
    profile = profile or TGI_2023
    shape = find_model(model)
    instance = find_instance(instance_type)
    dtype = settings.dtype or "float16"
    derived = scheduler_config_for(
        shape,
        instance,
        settings.tensor_parallel,
        dtype,
        profile,
        settings.max_model_len or max_total_tokens,
    )
    config = _scheduler_config(settings, derived)
    step_time = step_time_model_for(shape, instance, settings.tensor_parallel, dtype, profile)
    warnings = profile.warnings_for(accelerator=instance.accelerator.name)
    return EngineParts(
        executor=SimulatedExecutor(step_time, block_size=config.block_size),
        config=config,
        shape=shape,
        tokenizer=None,
        facts={
            "kind": "simulated",
            "model": shape.name,
            "instance": instance.instance_type,
            "accelerator": instance.accelerator.name,
            "tensor_parallel": settings.tensor_parallel,
            "dtype": dtype,
            "profile": profile.label,
            "profile_provenance": profile.provenance,
            "scheduler": _config_facts(config),
        },
        notes=(
            f"{shape.name} on {instance.instance_type} ({instance.accelerator.name}), TP "
            f"{settings.tensor_parallel}, {dtype}: predicted step times, {profile.provenance}",
            f"KV cache {config.cache_tokens:,} tokens, at most {config.max_rolling_batch_size} "
            "sequences at once",
            *(f"warning: {text}" for text in warnings),
        ),
    )


def _scheduler_config(settings: EngineSection, derived: SchedulerConfig) -> SchedulerConfig:
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
        "num_blocks": settings.num_blocks,
        "max_model_len": settings.max_model_len,
    }
    return replace(derived, **{key: value for key, value in stated.items() if value is not None})


def _config_facts(config: SchedulerConfig) -> dict[str, Any]:
    return {key: getattr(value, "value", value) for key, value in asdict(config).items()}


def _engine_bench(scenario: Scenario) -> Bench:
    parts = open_torch_engine(scenario.model, scenario.engine)
    tokenizer = parts.tokenizer
    assert tokenizer is not None  # a torch engine has read its folder's
    special = max((0, *(eos + 1 for eos in tokenizer.eos_token_ids)))
    ids = TokenIds(tokenizer.vocab_size, first_id=special if special < 1000 else 0)
    eos = () if scenario.workload.ignore_eos else tokenizer.eos_token_ids

    async def run_in(main: Main[Any]) -> Any:
        async with parts.engine() as engine:
            result = await main(InProcessTarget(engine, eos_token_ids=eos))
            return result

    return Bench(
        title=f"bundled engine, {parts.shape.name}",
        facts=parts.facts,
        prompts=lambda salt: _prompts(scenario, ids, tokenizer, salt),
        run=lambda main: asyncio.run(run_in(main)),
        knee_facts=lambda _levels: _cache_facts(parts.config, scenario),
        notes=parts.notes,
        salted=not scenario.workload.reuse_prompts,
    )


def _simulated_bench(scenario: Scenario, instance_type: str) -> Bench:
    if scenario.workload.dataset is not None:
        raise InputError(
            "a simulated instance needs lengths, not text: give --input-tokens and "
            "--output-tokens, or a mix, instead of a data set"
        )
    total = max(kind.input_tokens + kind.output_tokens for kind in _lengths(scenario))
    parts = open_simulated_engine(
        scenario.model, instance_type, scenario.engine, max_total_tokens=total
    )

    async def run_in(main: Main[Any]) -> Any:
        async with parts.engine() as engine:
            return await main(InProcessTarget(engine))

    return Bench(
        title=f"simulated {instance_type}, {parts.shape.name}",
        facts=parts.facts,
        prompts=lambda salt: _prompts(scenario, NoText(), None, salt),
        run=lambda main: run_virtual(run_in(main)),
        knee_facts=lambda levels: _simulated_facts(scenario, instance_type, parts, levels),
        notes=parts.notes,
        salted=False,
    )


def _lengths(scenario: Scenario) -> list[Lengths]:
    workload = scenario.workload
    if not workload.mix:
        return [Lengths(workload.input_tokens, workload.output_tokens)]
    return [Lengths(kind.input_tokens, kind.output_tokens, kind.share) for kind in workload.mix]


def _prompts(
    scenario: Scenario, text: PromptText, tokenizer: Tokenizer | None, salt: str
) -> Prompts:
    workload = scenario.workload
    if workload.dataset is not None:
        return DatasetPrompts(
            load_dataset(Path(workload.dataset)),
            output_tokens=workload.output_tokens,
            tokenizer=tokenizer,
            seed=scenario.seed,
            salt=salt,
            ignore_eos=workload.ignore_eos,
        )
    return SyntheticPrompts(
        _lengths(scenario), text, seed=scenario.seed, salt=salt, ignore_eos=workload.ignore_eos
    )


def _cache_facts(config: SchedulerConfig, scenario: Scenario) -> KneeFacts:
    """What the scheduler's own limits say: sequences in the cache, slots of the batch."""
    lengths = _lengths(scenario)
    shares = sum(kind.share for kind in lengths)
    full = sum((k.input_tokens + k.output_tokens) * k.share for k in lengths) / shares
    half = sum((k.input_tokens + k.output_tokens / 2) * k.share for k in lengths) / shares
    paged = config.kv_layout is KvLayout.PAGED
    slots = {
        BatchingPolicy.NONE: 1,
        BatchingPolicy.DYNAMIC: config.batch_size,
        BatchingPolicy.ROLLING: config.max_rolling_batch_size,
    }[config.policy]
    return KneeFacts(
        b_max=config.cache_tokens // full,
        b_max_expected=config.cache_tokens // (half if paged else full),
        max_batch=slots,
    )
