"""What is known of an engine's limits, for the cause of a knee."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lmi_bench.analysis.results.knee_cause import KneeFacts
from lmi_bench.catalog.instances import find_instance
from lmi_bench.core.level import Level
from lmi_bench.core.scenario import Scenario
from lmi_bench.engine.scheduling.config import KvLayout, SchedulerConfig
from lmi_bench.engine.scheduling.step_shape import StepShape
from lmi_bench.targets.parts import EngineParts
from lmi_bench.targets.prompts import lengths_of


def scheduler_limits(config: SchedulerConfig, scenario: Scenario) -> KneeFacts:
    """What the scheduler's own limits say: sequences in the cache, slots of the batch."""
    lengths = lengths_of(scenario)
    shares = sum(kind.share for kind in lengths)
    full = sum((k.input_tokens + k.output_tokens) * k.share for k in lengths) / shares
    half = sum((k.input_tokens + k.output_tokens / 2) * k.share for k in lengths) / shares
    paged = config.kv_layout is KvLayout.PAGED
    return KneeFacts(
        b_max=config.cache_tokens // full,
        b_max_expected=config.cache_tokens // (half if paged else full),
        max_batch=config.max_running,
    )


def simulated_limits(
    scenario: Scenario,
    instance_type: str,
    parts: EngineParts,
    levels: Sequence[Level],
) -> KneeFacts:
    """Limits of the simulated engine, and the part of its step model that binds at each level."""
    from lmi_bench.analysis.model.capacity import step_time_model_for, theory_batch
    from lmi_bench.analysis.model.setup import Setup

    profile = parts.profile
    assert profile is not None  # a simulated engine has one
    lengths = max(lengths_of(scenario), key=lambda kind: kind.input_tokens + kind.output_tokens)
    setup = Setup(
        parts.shape,
        find_instance(instance_type),
        parts.tensor_parallel,
        str(parts.facts["dtype"]),
    )
    theory = theory_batch(
        setup, profile, input_tokens=lengths.input_tokens, output_tokens=lengths.output_tokens
    )
    model = step_time_model_for(setup, profile)
    limits = scheduler_limits(parts.config, scenario)
    context = lengths.input_tokens + lengths.output_tokens // 2
    copies = len(parts.executors)
    binding = {}
    for line in levels:
        running = round((line.mean_concurrency or 0) / copies)
        batch = max(1, min(running, int(limits.b_max_expected or running)))
        shape = StepShape(
            decode_sequences=batch, decode_tokens=batch, decode_context_tokens=batch * context
        )
        binding[line.load.value] = model.explain(shape).binding
    one = replace(
        limits,
        b_star=float("inf") if theory.b_star is None else theory.b_star,
        binding=binding,
    )
    return limits_of_all(one, parts)


def limits_of_all(one: KneeFacts, parts: EngineParts) -> KneeFacts:
    """The limits of all replicas together, from those of one."""
    copies = len(parts.executors)

    def times(limit: float | None) -> float | None:
        return None if limit is None else limit * copies

    return replace(
        one,
        b_max=times(one.b_max),
        b_max_expected=times(one.b_max_expected),
        b_star=times(one.b_star),
        max_batch=None if one.max_batch is None else one.max_batch * copies,
    )
