"""What a sweep runs on: the target, its prompts, its clock, and what is known of its limits.

Engines and the planner are loaded where a target is one: a URL's first request waits for none.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from lmi_bench.analysis.results.knee_cause import KneeFacts
from lmi_bench.catalog.instances import find_instance
from lmi_bench.core.clock import run_virtual
from lmi_bench.core.errors import InputError
from lmi_bench.core.scenario import SAGEMAKER_PREFIX, Scenario
from lmi_bench.engine.scheduling.config import BatchingPolicy, KvLayout, SchedulerConfig
from lmi_bench.engine.scheduling.step_shape import StepShape
from lmi_bench.jobs.sweep.levels import with_levels_found
from lmi_bench.loadgen.aws.cloudwatch import LevelSpan
from lmi_bench.loadgen.prompts.prompts import (
    NoText,
    Prompts,
    PromptText,
    TokenIds,
)
from lmi_bench.loadgen.run.target import Target
from lmi_bench.targets.access import NO_ACCESS, Access
from lmi_bench.targets.prompts import lengths_of, longest_request, make_prompts

if TYPE_CHECKING:
    from lmi_bench.engine.step_trace import StepTrace
    from lmi_bench.targets.parts import EngineParts

Main = Callable[[Target], Awaitable[Any]]
SIMULATED_PREFIX = "sim:"
_FIRST_MADE_UP_ID, _MADE_UP_IDS = 2_000, 32_000
ENGINE_TARGET = "engine"


@dataclass(frozen=True, slots=True)
class Bench:
    """A target that is ready to be measured, and everything that depends on its kind.

    scenario    as it will run: nothing in it is left to be found
    run         runs a coroutine over the target on the clock that the target needs
    knee_facts  what is known of the server, for the levels' lines given
    usd_per_hour, count_instances  price of all its instances, and how many answer now, if known
    secrets     values that must never reach a file
    open_target, metrics_url, metrics_headers  of a server elsewhere: a connection of one's own to
                it, for worker processes, and where it may keep its metrics
    cloudwatch  what CloudWatch says of an endpoint in each of these spans
    """

    scenario: Scenario
    title: str
    facts: dict[str, Any]
    prompts: Callable[[str], Prompts]
    run: Callable[[Main], Any]
    knee_facts: Callable[[Sequence[Mapping[str, Any]]], KneeFacts]
    notes: tuple[str, ...] = ()
    secrets: tuple[str, ...] = ()
    spacing_s: float = 0.0
    salted: bool = True
    usd_per_hour: float | None = None
    count_instances: Callable[[], int | None] | None = None
    open_target: Callable[[], AbstractAsyncContextManager[Target]] | None = None
    metrics_url: str | None = None
    cloudwatch: Callable[[Sequence[LevelSpan]], list[dict[str, Any]]] | None = None
    metrics_headers: Mapping[str, str] = field(default_factory=dict, repr=False)

    def new_salt(self) -> str:
        """What makes this run's prompts unlike those of every other run."""
        return secrets.token_hex(4) if self.salted else ""


def open_bench(
    scenario: Scenario, access: Access = NO_ACCESS, *, trace: StepTrace | None = None
) -> Bench:
    """The scenario's target, checked and loaded; raises InputError where it cannot be.

    access  what an endpoint wants to see before it answers
    trace   written by the engine, where it runs in this process
    """
    from lmi_bench.targets.http import http_bench, sagemaker_bench

    target = scenario.target
    if target == ENGINE_TARGET:
        return _engine_bench(scenario, trace)
    if target.startswith(SIMULATED_PREFIX):
        instance_type = target.removeprefix(SIMULATED_PREFIX)
        return _simulated_bench(with_levels_found(scenario), instance_type, trace)
    if trace is not None:
        raise InputError(
            "--step-trace shows an engine's own steps: use --target engine or sim:INSTANCE, or "
            "give --step-trace to `lmi-bench serve`"
        )
    if target.startswith(SAGEMAKER_PREFIX):
        return sagemaker_bench(scenario, access)
    if "://" in target:
        return http_bench(scenario, access)
    raise InputError(
        f"target {target!r} is not understood; write engine, sim:INSTANCE "
        "(such as sim:ml.g5.2xlarge), a URL (http://host:port) or sagemaker:NAME"
    )


def _engine_bench(scenario: Scenario, trace: StepTrace | None) -> Bench:
    from lmi_bench.loadgen.run.in_process_target import InProcessTarget
    from lmi_bench.targets.bundled import open_torch_engine
    from lmi_bench.targets.parts import close_all
    from lmi_bench.targets.quantizing import refuse_emulated

    parts = open_torch_engine(scenario.model, scenario.engine)
    try:
        refuse_emulated(parts.quantized)
    except InputError:
        asyncio.run(close_all(parts.executors))
        raise
    tokenizer = parts.tokenizer
    assert tokenizer is not None  # a torch engine has read its folder's
    special = max((0, *(eos + 1 for eos in tokenizer.eos_token_ids)))
    ids = TokenIds(tokenizer.vocab_size, first_id=special if special < 1000 else 0)
    eos = () if scenario.workload.ignore_eos else tokenizer.eos_token_ids

    async def run_in(main: Main) -> Any:
        async with parts.engine(trace) as engine:
            return await main(InProcessTarget(engine, eos_token_ids=eos))

    return Bench(
        scenario=scenario,
        title=f"bundled engine, {parts.shape.name}",
        facts=parts.facts,
        prompts=lambda salt: make_prompts(scenario, ids, tokenizer, salt),
        run=lambda main: asyncio.run(run_in(main)),
        knee_facts=lambda _levels: _of_all(_cache_facts(parts.config, scenario), parts),
        notes=parts.notes,
        salted=not scenario.workload.reuse_prompts,
    )


def _simulated_bench(scenario: Scenario, instance_type: str, trace: StepTrace | None) -> Bench:
    from lmi_bench.loadgen.run.in_process_target import InProcessTarget
    from lmi_bench.targets.profiles import find_profile
    from lmi_bench.targets.simulated import open_simulated_engine

    if scenario.workload.dataset is not None:
        raise InputError(
            "a simulated instance needs lengths, not text: give --input-tokens and "
            "--output-tokens, or a mix, instead of a data set"
        )
    if scenario.workload.conversations is not None:
        raise InputError(
            "a simulated instance needs lengths, not text: give --turns with --input-tokens and "
            "--output-tokens instead of recorded conversations"
        )
    cached = bool(scenario.engine.prefix_caching)
    # only a prefix cache looks at what is asked; ids above those that the executor makes up
    words: PromptText = TokenIds(_MADE_UP_IDS, first_id=_FIRST_MADE_UP_ID) if cached else NoText()
    total = longest_request(scenario)
    parts = open_simulated_engine(
        scenario.model,
        instance_type,
        scenario.engine,
        max_total_tokens=total,
        profile=find_profile(scenario.engine.profile),
    )

    async def run_in(main: Main) -> Any:
        async with parts.engine(trace) as engine:
            return await main(InProcessTarget(engine, simulated=True))

    return Bench(
        scenario=scenario,
        title=f"simulated {instance_type}, {parts.shape.name}",
        facts=parts.facts,
        prompts=lambda salt: make_prompts(scenario, words, None, salt),
        run=lambda main: run_virtual(run_in(main)),
        knee_facts=lambda levels: _simulated_facts(scenario, instance_type, parts, levels),
        notes=parts.notes,
        salted=False,
    )


def _cache_facts(config: SchedulerConfig, scenario: Scenario) -> KneeFacts:
    """What the scheduler's own limits say: sequences in the cache, slots of the batch."""
    lengths = lengths_of(scenario)
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


def _simulated_facts(
    scenario: Scenario,
    instance_type: str,
    parts: EngineParts,
    levels: Sequence[Mapping[str, Any]],
) -> KneeFacts:
    """Limits of the simulated engine, and the part of its step model that binds at each level."""
    from lmi_bench.analysis.model.capacity import step_time_model_for, theory_batch

    profile = parts.profile
    assert profile is not None  # a simulated engine has one
    instance = find_instance(instance_type)
    degree, dtype = parts.tensor_parallel, str(parts.facts["dtype"])
    lengths = max(lengths_of(scenario), key=lambda kind: kind.input_tokens + kind.output_tokens)
    theory = theory_batch(
        parts.shape,
        instance,
        degree,
        dtype,
        input_tokens=lengths.input_tokens,
        output_tokens=lengths.output_tokens,
        profile=profile,
    )
    model = step_time_model_for(parts.shape, instance, degree, dtype, profile)
    limits = _cache_facts(parts.config, scenario)
    context = lengths.input_tokens + lengths.output_tokens // 2
    copies = len(parts.executors)
    binding = {}
    for line in levels:
        load = line["concurrency"] if line["concurrency"] is not None else line["rate_per_s"]
        running = round((line.get("mean_concurrency") or 0) / copies)
        batch = max(1, min(running, int(limits.b_max_expected or running)))
        shape = StepShape(
            decode_sequences=batch, decode_tokens=batch, decode_context_tokens=batch * context
        )
        binding[load] = model.explain(shape).binding
    one = replace(
        limits,
        b_star=float("inf") if theory.b_star is None else theory.b_star,
        binding=binding,
    )
    return _of_all(one, parts)


def _of_all(one: KneeFacts, parts: EngineParts) -> KneeFacts:
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
