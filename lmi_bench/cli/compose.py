"""Puts an engine together: model, executor, scheduler settings, tokenizer.

The only module that reaches `engine.torch_backend`, inside the functions that need it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lmi_bench.analysis.builtin_profiles import TGI_2023
from lmi_bench.analysis.capacity import scheduler_config_for, step_time_model_for
from lmi_bench.analysis.profiles import EngineProfile
from lmi_bench.catalog.instances import find_instance
from lmi_bench.catalog.models import find_model
from lmi_bench.cli.console import progress
from lmi_bench.engine.async_engine import AsyncEngine
from lmi_bench.engine.executor import Executor
from lmi_bench.engine.scheduling.config import BatchingPolicy, KvLayout, SchedulerConfig
from lmi_bench.engine.scheduling.scheduler import Scheduler
from lmi_bench.engine.simulated import SimulatedExecutor
from lmi_bench.engine.tokenizer import Tokenizer
from lmi_bench.errors import InputError
from lmi_bench.model_shape import ModelShape
from lmi_bench.scenario import EngineSection
from lmi_bench.units import MIB, bytes_to_gib, ms_to_s

DEMO_NAMES = ("demo-15m", "demo-110m")


@dataclass(frozen=True, slots=True)
class EngineParts:
    """An engine that is ready to be entered: its executor holds the model already.

    facts    what a run's manifest says of it; notes: what a person is told at start
    profile  of a simulated engine
    """

    executor: Executor
    config: SchedulerConfig
    shape: ModelShape
    tokenizer: Tokenizer | None
    facts: dict[str, Any]
    profile: EngineProfile | None = None
    notes: tuple[str, ...] = ()

    def engine(self) -> AsyncEngine:
        """The engine; an async context manager."""
        return AsyncEngine(Scheduler(self.config), self.executor)


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
    with progress() as report:
        executor = TorchExecutor.load(
            folder,
            dtype=settings.dtype or "bfloat16",
            kv_dtype=settings.kv_dtype,
            num_blocks=settings.num_blocks,
            block_size=settings.block_size or DEFAULT_BLOCK_SIZE,
            threads=settings.threads,
            progress=lambda done, total: report("weights, MiB", done / MIB, total / MIB),
            **options,
        )
    shape = replace(executor.model_shape, name=model if model in DEMO_MODELS else folder.name)
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
            "free_memory_bytes": executor.free_memory_bytes,
            "kv_dtype": executor.kv_dtype,
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
    if settings.kv_dtype is not None:
        raise InputError(
            f"--kv-dtype {settings.kv_dtype}: a simulated engine's cache has the format of its "
            "weights; leave it out, or choose both with --dtype"
        )
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
        profile=profile,
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


def find_tokenizer(model: str) -> Tokenizer | None:
    """The tokenizer of a model folder or a demo model; None where there is none at hand.

    Loads no torch, so that a sweep over HTTP can make prompts of exact lengths.
    """
    folder = Path(model)
    if (folder / "tokenizer.json").is_file():
        return Tokenizer.from_folder(folder)
    if model in DEMO_NAMES:
        from lmi_bench.engine.torch_backend.demo_vocabulary import (
            EOS_TOKEN_ID,
            demo_tokenizer_json,
        )

        return Tokenizer.from_json(demo_tokenizer_json(), eos_token_ids=(EOS_TOKEN_ID,))
    return None
