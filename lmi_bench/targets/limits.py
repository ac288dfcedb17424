"""Limits of an engine in this process, from which the cause of a knee follows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lmi_bench.analysis.model.capacity import step_time_model_for, theory_batch
from lmi_bench.analysis.results.knee_cause import KneeFacts
from lmi_bench.core.level import Level
from lmi_bench.core.scenario import Scenario
from lmi_bench.engine.scheduling.config import KvLayout
from lmi_bench.engine.scheduling.step_shape import StepShape
from lmi_bench.targets.parts import EngineParts
from lmi_bench.targets.prompts import lengths_of


def scheduler_limits(parts: EngineParts, scenario: Scenario) -> KneeFacts:
    """The scheduler's limits over all replicas: sequences in the cache, slots of the batch."""
    lengths, config, copies = lengths_of(scenario), parts.config, len(parts.executors)
    shares = sum(kind.share for kind in lengths)
    full = sum((k.input_tokens + k.output_tokens) * k.share for k in lengths) / shares
    half = sum((k.input_tokens + k.output_tokens / 2) * k.share for k in lengths) / shares
    paged = config.kv_layout is KvLayout.PAGED
    return KneeFacts(
        b_max=config.cache_tokens // full * copies,
        b_max_expected=config.cache_tokens // (half if paged else full) * copies,
        max_batch=None if config.max_running is None else config.max_running * copies,
    )


def simulated_limits(scenario: Scenario, parts: EngineParts, levels: Sequence[Level]) -> KneeFacts:
    """Limits of the simulated engine, and the part of its step model that binds at each level."""
    assert parts.setup is not None  # a simulated engine has both
    assert parts.profile is not None
    setup, profile = replace(parts.setup, speculation=None), parts.profile
    lengths = max(lengths_of(scenario), key=lambda kind: kind.input_tokens + kind.output_tokens)
    theory = theory_batch(
        setup, profile, input_tokens=lengths.input_tokens, output_tokens=lengths.output_tokens
    )
    model = step_time_model_for(setup, profile)
    limits, copies = scheduler_limits(parts, scenario), len(parts.executors)
    context = lengths.input_tokens + lengths.output_tokens // 2
    binding = {}
    for line in levels:
        running = round((line.mean_concurrency or 0) / copies)
        batch = max(1, min(running, int((limits.b_max_expected or 0) / copies or running)))
        shape = StepShape(
            decode_sequences=batch, decode_tokens=batch, decode_context_tokens=batch * context
        )
        binding[line.load.value] = model.explain(shape).binding
    b_star = float("inf") if theory.b_star is None else theory.b_star * copies
    return replace(limits, b_star=b_star, binding=binding)
