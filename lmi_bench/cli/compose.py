"""Puts an engine together: model, executor, scheduler settings, tokenizer.

The only module that reaches `engine.torch_backend`, inside the functions that need it.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lmi_bench.analysis.builtin_profiles import TGI_2023
from lmi_bench.analysis.capacity import scheduler_config_for, step_time_model_for
from lmi_bench.analysis.kv_cache import kv_bytes_per_token
from lmi_bench.analysis.profiles import EngineProfile
from lmi_bench.catalog.instances import find_instance
from lmi_bench.catalog.models import find_model
from lmi_bench.cli.console import progress
from lmi_bench.cli.speculation import (
    NGRAM_DRAFT,
    check_same_vocabulary,
    drafter_for,
    speculation_facts,
    speculation_notes,
)
from lmi_bench.engine.async_engine import AsyncEngine
from lmi_bench.engine.drafting import DraftingExecutor
from lmi_bench.engine.executor import Executor
from lmi_bench.engine.scheduling.config import BatchingPolicy, KvLayout, SchedulerConfig
from lmi_bench.engine.scheduling.drafting import Drafter
from lmi_bench.engine.scheduling.scheduler import Scheduler
from lmi_bench.engine.simulated import SimulatedExecutor
from lmi_bench.engine.step_trace import StepTrace
from lmi_bench.engine.tokenizer import Tokenizer
from lmi_bench.errors import CapacityError, InputError
from lmi_bench.model_folder import shape_of_folder
from lmi_bench.model_shape import ModelShape
from lmi_bench.scenario import EngineSection
from lmi_bench.units import MIB, bytes_to_gib, ms_to_s

DEMO_NAMES = ("demo-15m", "demo-110m")


@dataclass(frozen=True, slots=True)
class EngineParts:
    """An engine that is ready to be entered: its executor holds the model already.

    facts    what a run's manifest says of it; notes: what a person is told at start
    profile  of a simulated engine
    drafter  of speculative decoding
    score    log-probabilities of given tokens behind others; before the engine is entered
    """

    executor: Executor
    config: SchedulerConfig
    shape: ModelShape
    tokenizer: Tokenizer | None
    facts: dict[str, Any]
    profile: EngineProfile | None = None
    notes: tuple[str, ...] = ()
    drafter: Drafter | None = None
    score: Callable[[Sequence[int], Sequence[int]], Awaitable[list[float]]] | None = None

    def engine(self, trace: StepTrace | None = None) -> AsyncEngine:
        """The engine; an async context manager."""
        return AsyncEngine(
            Scheduler(self.config, drafter=self.drafter),
            self.executor,
            on_step=None if trace is None else trace.on_step,
            on_end=None if trace is None else trace.on_end,
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
    if settings.draft_acceptance is not None:
        raise InputError(
            "--draft-acceptance is for a simulated engine; the bundled one measures how many "
            "drafted tokens hold"
        )
    try:
        from lmi_bench.engine.torch_backend.executor import (
            DEFAULT_BLOCK_SIZE,
            DEFAULT_MEMORY_SHARE,
            TorchExecutor,
        )
    except ImportError as exc:
        raise InputError(
            f"the bundled engine needs {exc.name}: pip install 'lmi-bench[engine]', or use "
            "--target sim:INSTANCE or a URL"
        ) from exc
    folder = _model_folder(model)
    draft_folder = None
    share = settings.memory_share or DEFAULT_MEMORY_SHARE
    if settings.draft is not None and settings.draft != NGRAM_DRAFT:
        draft_folder = _model_folder(settings.draft)
        check_same_vocabulary(folder, draft_folder)
        bytes_a_token = [
            kv_bytes_per_token(shape_of_folder(place)) for place in (folder, draft_folder)
        ]
        share *= bytes_a_token[0] / sum(bytes_a_token)  # each caches the same tokens
    options: dict[str, Any] = {
        "dtype": settings.dtype or "bfloat16",
        "kv_dtype": settings.kv_dtype,
        "block_size": settings.block_size or DEFAULT_BLOCK_SIZE,
        "threads": settings.threads,
        "sampling_seed": secrets.randbits(62),  # a draft has to draw as the model does
    }
    with progress() as report:
        loaded = TorchExecutor.load(
            folder,
            num_blocks=settings.num_blocks,
            memory_share=share,
            progress=lambda done, total: report("weights, MiB", done / MIB, total / MIB),
            **options,
        )
    executor: Executor = loaded
    notes = []
    longest = loaded.model_shape.max_positions
    if draft_folder is not None:
        draft = TorchExecutor.load(
            draft_folder, num_blocks=loaded.num_blocks, beside=loaded, **options
        )
        executor = DraftingExecutor(loaded, draft)
        longest = min(longest, draft.model_shape.max_positions)
        notes.append(
            f"draft {settings.draft}: {draft.model_shape.params_total:,} parameters, "
            f"{draft.weights_description}; KV cache {bytes_to_gib(draft.kv_cache_bytes):.2f} GiB"
        )
    shape = replace(loaded.model_shape, name=model if model in DEMO_NAMES else folder.name)
    config = _scheduler_config(
        settings,
        SchedulerConfig(
            num_blocks=loaded.num_blocks,
            block_size=loaded.block_size,
            max_model_len=min(longest, loaded.num_blocks * loaded.block_size),
        ),
    )
    if config.max_model_len > longest:
        raise InputError(
            f"--max-model-len {config.max_model_len:,}: {shape.name} "
            + (f"with the draft {settings.draft} " if draft_folder else "")
            + f"knows {longest:,} positions"
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
            "weights": loaded.weights_description,
            "free_memory_bytes": loaded.free_memory_bytes,
            "kv_dtype": loaded.kv_dtype,
            "kv_cache_bytes": loaded.kv_cache_bytes,
            "scheduler": _config_facts(config),
            **speculation_facts(settings),
        },
        notes=(
            f"{shape.name}: {shape.params_total:,} parameters, {loaded.weights_description}",
            f"free memory after loading {bytes_to_gib(loaded.free_memory_bytes):.1f} GiB; KV "
            f"cache {bytes_to_gib(loaded.kv_cache_bytes):.2f} GiB in {config.num_blocks:,} "
            f"blocks of {config.block_size}, {config.cache_tokens:,} tokens",
            *notes,
            *speculation_notes(settings),
        ),
        drafter=drafter_for(settings),
        score=loaded.score,
    )


def _model_folder(model: str) -> Path:
    """A model's folder; a demo model is made first where it is not there yet."""
    from lmi_bench.engine.torch_backend.demo import DEMO_MODELS, ensure_demo_model

    if model in DEMO_MODELS:
        return ensure_demo_model(model)
    if Path(model).is_dir():
        return Path(model)
    raise InputError(
        f"model {model!r} is neither a folder nor a demo model ({', '.join(DEMO_MODELS)}): "
        "give the path of a Hugging Face folder (config.json, *.safetensors, tokenizer.json)"
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
    if settings.draft is not None and settings.draft_acceptance is None:
        raise InputError(
            f"--draft {settings.draft}: a simulated engine cannot tell how many drafted tokens "
            "hold; give --draft-acceptance, from 0 to 1 (a sweep of the bundled engine measures it)"
        )
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
    warnings = list(profile.warnings_for(accelerator=instance.accelerator.name))
    executor: Executor = SimulatedExecutor(
        step_time,
        block_size=config.block_size,
        draft_acceptance=settings.draft_acceptance or 0.0,
    )
    if settings.draft is not None and settings.draft != NGRAM_DRAFT:
        draft = find_model(settings.draft)
        if draft.vocab_size != shape.vocab_size:
            raise InputError(
                f"draft {draft.name} has {draft.vocab_size:,} token ids, {shape.name} "
                f"{shape.vocab_size:,}: a draft's token ids must mean the same"
            )
        draft_time = step_time_model_for(draft, instance, settings.tensor_parallel, dtype, profile)
        executor = DraftingExecutor(
            executor, SimulatedExecutor(draft_time, block_size=config.block_size)
        )
        warnings.append(f"the memory of the draft {settings.draft} is not counted")
    return EngineParts(
        executor=executor,
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
            **speculation_facts(settings),
        },
        profile=profile,
        notes=(
            f"{shape.name} on {instance.instance_type} ({instance.accelerator.name}), TP "
            f"{settings.tensor_parallel}, {dtype}: predicted step times, {profile.provenance}",
            f"KV cache {config.cache_tokens:,} tokens, at most {config.max_rolling_batch_size} "
            "sequences at once",
            *speculation_notes(settings),
            *(f"warning: {text}" for text in warnings),
        ),
        drafter=drafter_for(settings, simulated=True),
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
        "prefix_caching": settings.prefix_caching,
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
        stated["num_blocks"] = budget // derived.block_size
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
