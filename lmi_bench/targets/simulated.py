"""Assembles a simulated engine: a model on an instance, each step taking its predicted time."""

from dataclasses import replace
from typing import TYPE_CHECKING

from lmi_bench.analysis.model import capacity
from lmi_bench.analysis.model.checkpoint_dtype import planned_dtype
from lmi_bench.analysis.model.profiles import EngineProfile
from lmi_bench.analysis.model.setup import Setup, Speculation
from lmi_bench.analysis.model.speculation import SpeculativeModel
from lmi_bench.catalog.instances import find_instance
from lmi_bench.catalog.models import find_model
from lmi_bench.core.errors import CapacityError, InputError
from lmi_bench.core.scenario import SIMULATED_PREFIX, EngineSection, Scenario
from lmi_bench.engine.drafting import DraftingExecutor
from lmi_bench.engine.executor import Executor
from lmi_bench.engine.simulated import SimulatedExecutor
from lmi_bench.loadgen.prompts.prompts import PromptText, distinct_ids, no_text
from lmi_bench.targets import parts as engine_parts
from lmi_bench.targets.applies import idle_in_engine, refuse_impossible
from lmi_bench.targets.bench import Bench
from lmi_bench.targets.drafting import NGRAM_DRAFT, drafter_for, speculation_notes
from lmi_bench.targets.profiles import find_profile, with_host
from lmi_bench.targets.prompts import longest_request, repeats_text

if TYPE_CHECKING:
    from lmi_bench.engine.chrome_trace import ChromeTrace


def simulated_bench(scenario: Scenario, trace: "ChromeTrace | None") -> Bench:
    """A model on an instance, ready to be measured in virtual time."""
    instance_type = scenario.target.removeprefix(SIMULATED_PREFIX)
    workload = scenario.workload
    if workload.dataset is not None or workload.conversations is not None:
        raise InputError(
            "a simulated instance needs lengths, not text: give --input-tokens and "
            "--output-tokens (with --turns for conversations), or a mix, instead of "
            + ("a data set" if workload.conversations is None else "recorded conversations")
        )
    cached = bool(scenario.engine.prefix_caching)  # only a prefix cache reads the prompts
    words: PromptText = distinct_ids if cached else no_text
    longest, shares = longest_request(scenario), repeats_text(scenario)
    parts = open_simulated_engine(
        scenario.model, instance_type, scenario.engine, max_total_tokens=longest, shares=shares
    )
    scenario = scenario.with_overrides({"engine.tensor_parallel": parts.tensor_parallel})
    return parts.bench(scenario, words, trace)


def open_simulated_engine(
    model: str, instance_type: str, settings: EngineSection, *, max_total_tokens: int, shares: bool = True
) -> engine_parts.EngineParts:
    """An engine that takes the predicted time of each step of a model on an instance.

    max_total_tokens  maximum tokens, input and output, of one request
    shares            whether requests may begin alike
    Raises InputError and CapacityError if the settings do not fit the model and the instance.
    """
    refuse_impossible("simulated", settings)
    profile = with_host(_profile(settings), settings, shares)
    total_tokens = settings.max_model_len or max_total_tokens
    setup = _setup(model, instance_type, settings, profile, total_tokens)
    config = engine_parts.scheduler_config(settings, capacity.scheduler_config_for(setup, profile, total_tokens))
    notes = (
        f"{setup.shape.name} on {setup.instance.instance_type} "
        f"({setup.instance.accelerator.name}), TP {setup.tensor_parallel}, {setup.dtype}: "
        f"predicted step times, {profile.provenance}",
        f"KV cache {config.cache_tokens:,} tokens, at most {config.max_rolling_batch_size} "
        f"sequences at once{' a replica' if settings.replicas > 1 else ''}",
        engine_parts.replica_note(settings),
        *speculation_notes(settings),
        *idle_in_engine("simulated", settings),
        *(f"warning: {text}" for text in profile.warnings_for(accelerator=setup.instance.accelerator.name)),
    )
    return engine_parts.EngineParts(
        executors=_executors(setup, profile, settings, config.block_size),
        config=config,
        shape=setup.shape,
        tokenizer=None,
        facts={
            "kind": "simulated",
            "model": setup.shape.name,
            "instance": setup.instance.instance_type,
            "accelerator": setup.instance.accelerator.name,
            "tensor_parallel": setup.tensor_parallel,
            **engine_parts.replica_facts(settings),
            "dtype": setup.dtype,
            "profile": profile.label,
            "profile_provenance": profile.provenance,
            **engine_parts.scheduler_facts(settings, config),
        },
        setup=setup,
        profile=profile,
        notes=tuple(filter(None, notes)),
        drafter=drafter_for(settings, setup.shape, setup.draft, simulated=True),
        tensor_parallel=setup.tensor_parallel,
        router=settings.router,
    )


def _profile(settings: EngineSection) -> EngineProfile:
    """The profile that the settings name, with the memory that they state."""
    found = find_profile(settings.profile, settings.kv_tokens)
    share, block_size = settings.memory_share or found.memory_share, settings.block_size or found.block_size
    return replace(found, memory_share=share, block_size=block_size)


def _setup(model: str, instance_type: str, settings: EngineSection, profile: EngineProfile, tokens: int) -> Setup:
    """One copy, if the instance has enough devices for all replicas.

    tokens  of the longest request, which the smallest degree that is possible must hold
    """
    shape, instance = find_model(model), find_instance(instance_type)
    copies, devices = settings.replicas, instance.num_accelerators
    dtype = planned_dtype(model, settings.dtype)
    degree = engine_parts.degree_of(settings, devices)
    if settings.tensor_parallel is None:
        degree = capacity.smallest_degree(Setup(shape, instance, degree, dtype), profile, tokens)
    if copies * degree > devices:
        raise CapacityError(
            f"{copies} replicas of {degree} device(s) need {copies * degree}, but {instance_type} "
            f"has {devices}: lower --replicas or --tp"
        )
    setup = Setup(shape, instance, degree, dtype, speculation=_speculation(settings))
    return setup.beside(copies)


def _speculation(settings: EngineSection) -> Speculation | None:
    if settings.draft is None:
        return None
    if settings.draft_acceptance is None:
        raise InputError(
            f"--draft {settings.draft}: a simulated engine cannot measure how many draft tokens "
            "are accepted; give --draft-acceptance, from 0 to 1 (a sweep of the bundled engine "
            "measures it)"
        )
    draft = None if settings.draft == NGRAM_DRAFT else find_model(settings.draft)
    return Speculation(settings.draft_tokens, settings.draft_acceptance, draft)


def _executors(setup: Setup, profile: EngineProfile, settings: EngineSection, block_size: int) -> tuple[Executor, ...]:
    """One executor per replica, with its draft model's if there is one."""
    model = capacity.planned_model_for(setup, profile)
    target, draft = (model.target, model.draft) if isinstance(model, SpeculativeModel) else (model, None)
    acceptance = settings.draft_acceptance or 0.0
    executors: list[Executor] = [
        SimulatedExecutor(target, block_size=block_size, draft_acceptance=acceptance) for _ in range(settings.replicas)
    ]
    if draft is None:
        return tuple(executors)
    return tuple(DraftingExecutor(executor, SimulatedExecutor(draft, block_size=block_size)) for executor in executors)
