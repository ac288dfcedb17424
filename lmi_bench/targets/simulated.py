"""Puts a simulated engine together: a model on an instance, each step taking its predicted time."""

from __future__ import annotations

from dataclasses import replace

from lmi_bench.analysis.model.builtin_profiles import TGI_2023
from lmi_bench.analysis.model.capacity import scheduler_config_for, step_time_model_for
from lmi_bench.analysis.model.checkpoint_dtype import planned_dtype
from lmi_bench.analysis.model.profiles import EngineProfile
from lmi_bench.analysis.model.speculation import Speculation
from lmi_bench.catalog.instances import find_instance
from lmi_bench.catalog.models import find_model
from lmi_bench.core.errors import CapacityError, InputError
from lmi_bench.core.scenario import EngineSection
from lmi_bench.engine.drafting import DraftingExecutor
from lmi_bench.engine.executor import Executor
from lmi_bench.engine.scheduling.step_shape import StepTime
from lmi_bench.engine.simulated import SimulatedExecutor
from lmi_bench.targets.drafting import (
    NGRAM_DRAFT,
    drafter_for,
    speculation_facts,
    speculation_notes,
)
from lmi_bench.targets.idle_settings import idle_in_simulation
from lmi_bench.targets.parts import (
    EngineParts,
    config_facts,
    degree_of,
    replica_facts,
    replica_note,
    scheduler_config,
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
            "weights; leave it out, choose both with --dtype, or ask `lmi-bench predict --kv-dtype`"
        )
    if settings.follow_memory:
        raise InputError("--follow-memory: a simulated engine takes no memory; leave it out")
    if settings.rope_scaling is not None:
        raise InputError(
            f"--rope-scaling {settings.rope_scaling}: a simulated engine reads no positions; "
            "state the length with --max-model-len"
        )
    if settings.quantize != "none":
        raise InputError(
            f"--quantize {settings.quantize}: a simulated engine has no weights to round; its "
            "format is chosen with --dtype"
        )
    for option, stated in (
        ("--compile", settings.compile),
        ("--artefact", settings.artefact is not None),
        ("--device", settings.device is not None),
    ):
        if stated:
            raise InputError(f"{option}: a simulated engine computes nothing; leave it out")
    profile = profile or TGI_2023
    if settings.memory_share is not None:
        profile = replace(profile, memory_share=settings.memory_share)
    if settings.block_size is not None:
        profile = replace(profile, block_size=settings.block_size)
    shape = find_model(model)
    instance = find_instance(instance_type)
    copies, devices = settings.replicas, instance.num_accelerators
    degree = degree_of(settings, most=max(1, devices // copies))
    if copies * degree > devices:
        raise CapacityError(
            f"{copies} replicas of {degree} device(s) need {copies * degree}, but {instance_type} "
            f"has {devices}: lower --replicas or --tp"
        )
    dtype = planned_dtype(model, settings.dtype)
    draft = None
    if settings.draft is not None and settings.draft != NGRAM_DRAFT:
        draft = find_model(settings.draft)
    speculation = None
    if settings.draft is not None:
        speculation = Speculation(settings.draft_tokens, settings.draft_acceptance or 0.0, draft)
    derived = scheduler_config_for(
        shape,
        instance,
        degree,
        dtype,
        profile,
        settings.max_model_len or max_total_tokens,
        speculation=speculation,
    )
    config = scheduler_config(settings, derived)
    step_time = step_time_model_for(shape, instance, degree, dtype, profile)
    warnings = list(profile.warnings_for(accelerator=instance.accelerator.name))
    draft_time = None
    if draft is not None:
        if draft.vocab_size != shape.vocab_size:
            raise InputError(
                f"draft {draft.name} has {draft.vocab_size:,} token ids, {shape.name} "
                f"{shape.vocab_size:,}: a draft's token ids must mean the same"
            )
        draft_time = step_time_model_for(draft, instance, degree, dtype, profile)
    return EngineParts(
        executors=tuple(
            _simulated_executor(step_time, draft_time, settings, config.block_size)
            for _ in range(copies)
        ),
        config=config,
        shape=shape,
        tokenizer=None,
        facts={
            "kind": "simulated",
            "model": shape.name,
            "instance": instance.instance_type,
            "accelerator": instance.accelerator.name,
            "tensor_parallel": degree,
            **replica_facts(settings),
            "dtype": dtype,
            "profile": profile.label,
            "profile_provenance": profile.provenance,
            "scheduler": config_facts(config),
            **speculation_facts(settings),
        },
        profile=profile,
        notes=(
            f"{shape.name} on {instance.instance_type} ({instance.accelerator.name}), TP "
            f"{degree}, {dtype}: predicted step times, {profile.provenance}",
            f"KV cache {config.cache_tokens:,} tokens, at most {config.max_rolling_batch_size} "
            f"sequences at once{' a replica' if copies > 1 else ''}",
            *((replica_note(copies, settings.router),) if copies > 1 else ()),
            *speculation_notes(settings),
            *idle_in_simulation(settings),
            *(f"warning: {text}" for text in warnings),
        ),
        drafter=drafter_for(settings, shape, draft, simulated=True),
        tensor_parallel=degree,
        router=settings.router,
    )


def _simulated_executor(
    step_time: StepTime, draft_time: StepTime | None, settings: EngineSection, block_size: int
) -> Executor:
    executor: Executor = SimulatedExecutor(
        step_time, block_size=block_size, draft_acceptance=settings.draft_acceptance or 0.0
    )
    if draft_time is None:
        return executor
    return DraftingExecutor(executor, SimulatedExecutor(draft_time, block_size=block_size))
