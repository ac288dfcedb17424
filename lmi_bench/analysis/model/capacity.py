"""Computes the scheduler's limits for a model on a machine: blocks, slots, prompt budget.

Simulated targets and the recommender both use them, so they plan with the same engine.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from lmi_bench.analysis.model import memory
from lmi_bench.analysis.model.profiles import EngineProfile, as_set
from lmi_bench.analysis.model.roofline import FLOP_PER_PARAMETER, Roofline
from lmi_bench.analysis.model.setup import Parallelism, Setup
from lmi_bench.analysis.model.speculation import PricedSteps, SpeculativeModel
from lmi_bench.analysis.model.step_costs import compute_dtype
from lmi_bench.analysis.model.step_time import StepTimeModel
from lmi_bench.catalog.accelerators import Accelerator
from lmi_bench.core.errors import CapacityError, InputError
from lmi_bench.core.units import bytes_to_gib
from lmi_bench.engine.scheduling.config import SchedulerConfig
from lmi_bench.engine.scheduling.step_shape import StepShape
from lmi_bench.models.shape import ModelShape, possible_degrees, tensor_parallel_problem

WITHOUT_FLOAT16: Final = (
    *("Gemma2ForCausalLM", "Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
    *("Glm4ForCausalLM", "Plamo2ForCausalLM"),
)
"""Architectures that vLLM refuses in float16, where they overflow (its `config/model.py`)."""
_SINCE: Final = {"mxfp4": 8.0, "mxfp4-float8": 8.0, "nvfp4": 7.5, "float8": 7.5, "bfloat16": 8.0}
"""The least compute capability of a format's kernels: vLLM 0.32, get_min_capability."""
_ACTIVATION_BYTES, _LOGIT_BYTES = 2, 4


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """One rank's memory, in bytes, and how many sequences the copy holds.

    kv_bytes_per_sequence   cache of one sequence at its full length
    sequences_guaranteed    number that fits at full length; sequences_expected: half through output
    problem                 why the model does not fit; None if it does
    """

    memory_bytes: float
    weight_bytes: float
    reserve_bytes: float
    kv_bytes_per_sequence: float = 0.0
    sequences_guaranteed: int = 0
    sequences_expected: int = 0
    problem: str | None = None

    @property
    def kv_budget_bytes(self) -> float:
        """Memory left for the KV cache; below 0 the weights do not fit."""
        return self.memory_bytes - self.weight_bytes - self.reserve_bytes


def memory_plan_for(setup: Setup, profile: EngineProfile, *, input_tokens: int, output_tokens: int) -> MemoryPlan:
    """One rank's memory under the engine's share and reserve.

    B_max = floor((memory - weights - reserve) / KV bytes of a sequence)
    """
    shape, split, degree = setup.shape, setup.parallelism, setup.tensor_parallel
    plan = MemoryPlan(
        setup.instance.accelerator.memory_bytes * profile.memory_share,
        (memory.weight_bytes(shape, setup.dtype) / degree + setup.repeated_weight_bytes) / split.pipeline,
        reserve_bytes_of(setup, profile),
        problem=tensor_parallel_problem(shape, setup.attention_degree),
    )
    if plan.problem is not None:
        return plan
    if profile.cache_tokens is not None:
        cache_bytes = profile.cache_tokens * kv_bytes_of(setup, input_tokens + output_tokens)
        reserve_bytes = plan.memory_bytes - plan.weight_bytes - cache_bytes
        plan = replace(plan, reserve_bytes=reserve_bytes)
    group = setup.attention_degree
    full = setup.sequence_bytes(input_tokens + output_tokens, group) / split.pipeline
    half = setup.sequence_bytes(input_tokens + output_tokens / 2, group) / split.pipeline
    guaranteed, expected = (  # a sequence's cache is in one group, a share of it on each stage
        split.attention_groups * max(0, math.floor(plan.kv_budget_bytes / each)) for each in (full, half)
    )
    plan = replace(plan, kv_bytes_per_sequence=full, sequences_guaranteed=guaranteed, sequences_expected=expected)
    return plan if guaranteed > 0 else replace(plan, problem=_misfit(setup, plan))


def _misfit(setup: Setup, plan: MemoryPlan) -> str:
    """The term that exceeds the device's memory, with every number."""
    have = f"{bytes_to_gib(plan.memory_bytes):.1f} GiB of the device"
    need = f"{bytes_to_gib(plan.weight_bytes):.1f} GiB of weights a device"
    need += f" at TP {setup.tensor_parallel}"
    if plan.weight_bytes > plan.memory_bytes:
        return f"{need} exceed the {have} (weights): more devices or fewer bits a weight"
    if plan.weight_bytes + plan.reserve_bytes > plan.memory_bytes:
        return (
            f"{need} and {bytes_to_gib(plan.reserve_bytes):.1f} GiB of reserve exceed the {have} "
            "(reserve): more devices or fewer bits a weight"
        )
    return (
        f"{setup.shape.name}: {bytes_to_gib(plan.kv_budget_bytes):.2f} GiB left of the {have} hold "
        f"no sequence of {bytes_to_gib(plan.kv_bytes_per_sequence):.2f} GiB of KV cache (KV): "
        "shorter requests or more devices"
    )


def reserve_bytes_of(setup: Setup, profile: EngineProfile) -> float:
    """Memory of a device that is neither for weights nor for the cache.

    The constant of the profile, and what a step of the most tokens holds at once, as in the dummy
    step with which vLLM measures it at start (`determine_available_memory`): for each token 2 *
    hidden and 3 * width / TP in 16 bits, logits in 32 bits with a copy for each sequence.
    """
    if profile.reserves_activations and not profile.reserve_bytes_per_token:
        return profile.reserve_bytes
    shape, limits = setup.shape, as_set(profile, setup.shape, setup.instance.accelerator)
    if profile.reserve_bytes_per_token:
        return profile.reserve_bytes + limits.max_prefill_tokens * profile.reserve_bytes_per_token
    width = max(shape.ffn_size, shape.experts_per_token * shape.expert_ffn_size)
    token_bytes = _ACTIVATION_BYTES * (2 * shape.hidden_size + 3 * width / setup.tensor_parallel)
    logits = min(limits.max_batch_size, limits.max_prefill_tokens) * shape.vocab_size
    return profile.reserve_bytes + limits.max_prefill_tokens * token_bytes + 2 * _LOGIT_BYTES * logits


def in_groups(profile: EngineProfile, parallelism: Parallelism, *, prompts_alone: bool = False) -> EngineProfile:
    """The profile with the limits of all attention groups: each has a scheduler's sequences.

    Engines whose prompts pause decoding (SGLang) share out the tokens of a prompt step instead, but
    for workers that only compute prompts: their steps are set to hold a prompt of each group.
    """
    groups = parallelism.attention_groups
    if groups == 1:
        return profile
    tokens = groups if profile.chunked_prefill or prompts_alone else 1
    return replace(
        profile, max_batch_size=groups * profile.max_batch_size, max_prefill_tokens=tokens * profile.max_prefill_tokens
    )


def scheduler_config_for(
    setup: Setup, profile: EngineProfile, max_total_tokens: int, *, prompts_alone: bool = False
) -> SchedulerConfig:
    """The scheduler of one copy, for requests of at most `max_total_tokens`, input and output.

    prompts_alone  it only computes prompts, for other workers that decode
    Raises CapacityError where no such request fits, InputError where devices are too few.
    """
    shape, instance = setup.shape, setup.instance
    check_devices(setup)
    if max_total_tokens > shape.max_positions:
        raise CapacityError(
            f"{shape.name} takes at most {shape.max_positions:,} tokens, input and output "
            f"together; the requests have {max_total_tokens:,}: shorten them"
        )
    cache_tokens = _cache_tokens(setup, profile, max_total_tokens)
    profile = as_set(profile, shape, instance.accelerator, cache_tokens)
    profile = in_groups(profile, setup.parallelism, prompts_alone=prompts_alone)
    config = scheduler_with(profile, cache_tokens, max_total_tokens)
    return _with_host(setup, profile, config) if profile.host_cache_bytes else config


def scheduler_with(profile: EngineProfile, cache_tokens: float, max_total_tokens: int) -> SchedulerConfig:
    """The profile's scheduler over a cache that holds at least one request."""
    tokens = profile.max_prefill_tokens
    return SchedulerConfig(
        num_blocks=max(math.floor(cache_tokens / profile.block_size), math.ceil(max_total_tokens / profile.block_size)),
        block_size=profile.block_size,
        max_model_len=max_total_tokens,
        kv_layout=profile.kv_layout,
        max_rolling_batch_size=profile.max_batch_size,
        max_rolling_batch_prefill_tokens=tokens if profile.chunked_prefill else max(tokens, max_total_tokens),
        chunked_prefill=profile.chunked_prefill,
        max_waiting_tokens=0 if profile.chunked_prefill else profile.max_waiting_tokens,
        waiting_served_ratio=profile.waiting_served_ratio,
    )


def _with_host(setup: Setup, profile: EngineProfile, config: SchedulerConfig) -> SchedulerConfig:
    """The scheduler with blocks on the host; as it is where to compute a token is faster."""
    host, size_bytes = setup.instance, profile.host_cache_bytes
    if host.host_memory_bytes < setup.host_copies * size_bytes:
        raise CapacityError(
            f"{host.instance_type}: {setup.host_copies} x {bytes_to_gib(size_bytes):g} GiB exceed "
            f"the host's {bytes_to_gib(host.host_memory_bytes):g} GiB: lower --host-cache-gib"
        )
    model = step_time_model_for(setup, profile)
    tokens = min(config.max_rolling_batch_prefill_tokens, config.max_model_len)
    prompt = StepShape(1, tokens, tokens * (tokens + 1) // 2)
    if model.costs.copy_token_s * tokens >= model.step_time_s(prompt):
        return config
    token_bytes = kv_bytes_of(setup, config.max_model_len) * setup.devices
    return replace(config, host_blocks=int(size_bytes / token_bytes / config.block_size))


def _cache_tokens(setup: Setup, profile: EngineProfile, max_total_tokens: int) -> float:
    """Tokens that the cache holds, after the weights and a draft's weights and cache."""
    shape, instance = setup.shape, setup.instance
    plan = memory_plan_for(setup, profile, input_tokens=max_total_tokens - 1, output_tokens=1)
    if plan.problem is not None:
        degrees = _fitting_degrees(setup, profile, max_total_tokens)
        way_out = ", ".join(f"--tp {degree}" for degree in degrees)
        way_out = f"; {way_out} would fit" if way_out else ""
        raise CapacityError(f"{instance.instance_type}: {plan.problem}{way_out}")
    bytes_per_token = kv_bytes_of(setup, max_total_tokens)
    draft = setup.draft
    if draft is None:
        return plan.kv_budget_bytes / bytes_per_token
    budget_bytes = plan.kv_budget_bytes - memory.weight_bytes(draft, setup.dtype) / setup.devices
    bytes_per_token += kv_bytes_of(replace(setup, shape=draft), max_total_tokens)
    if budget_bytes < bytes_per_token * max_total_tokens:
        raise CapacityError(
            f"{instance.instance_type}: {shape.name} with the draft {draft.name} leaves "
            f"{bytes_to_gib(budget_bytes):.2f} GiB of a device, which hold no sequence of "
            f"{max_total_tokens:,} tokens: more devices or a smaller draft"
        )
    return budget_bytes / bytes_per_token


def kv_bytes_of(setup: Setup, context_tokens: float) -> float:
    """Bytes of cache on each device for a token, averaged over a context of that length.

    With attention groups averaged over the devices too: a token is in one group.
    """
    parts = setup.parallelism.attention_groups * setup.parallelism.pipeline
    return setup.sequence_bytes(context_tokens, setup.attention_degree) / context_tokens / parts


def check_devices(setup: Setup) -> None:
    """Raises InputError if the hosts lack the devices, CapacityError for an impossible split."""
    if setup.split_problem is not None:
        raise CapacityError(setup.split_problem)
    hosts, instance = setup.parallelism.hosts, setup.instance
    if hosts == 1 and setup.parallelism.pipeline == 1:
        if not 1 <= setup.tensor_parallel <= instance.num_accelerators:
            raise InputError(
                f"tensor parallel {setup.tensor_parallel} is not possible on "
                f"{instance.instance_type}, which has {instance.num_accelerators} accelerator(s): "
                f"use 1 to {instance.num_accelerators}"
            )
    elif setup.devices > hosts * instance.num_accelerators:
        raise InputError(
            f"{setup.devices} devices of a copy are more than {hosts} x {instance.instance_type} "
            f"have ({hosts * instance.num_accelerators}): use more hosts or lower degrees"
        )


def step_time_model_for(setup: Setup, profile: EngineProfile) -> StepTimeModel:
    """The step-time model of one copy, without speculation; raises InputError if impossible."""
    check_devices(setup)
    shape, device = setup.shape, setup.instance.accelerator
    problem = device_problem(profile, device) or checkpoint_problem(profile, shape, setup.dtype)
    if problem := problem or format_problem(setup.dtype, device, shape.architecture):
        raise InputError(problem)
    return StepTimeModel(setup, profile)


def smallest_degree(setup: Setup, profile: EngineProfile, max_total_tokens: int) -> int:
    """The smallest tensor-parallel degree that holds such requests; 1 if none does."""
    return next(_fitting_degrees(setup, profile, max_total_tokens), 1)


def _fitting_degrees(setup: Setup, profile: EngineProfile, max_total_tokens: int) -> Iterator[int]:
    for degree in possible_degrees(setup.shape, setup.instance.num_accelerators):
        split = replace(setup, tensor_parallel=degree)
        if memory_plan_for(split, profile, input_tokens=max_total_tokens - 1, output_tokens=1).problem is None:
            yield degree


def device_problem(profile: EngineProfile, accelerator: Accelerator) -> str | None:
    """Why the engine does not run on a device; None if it does."""
    where = f"{profile.label} does not run on {accelerator.name}"
    if accelerator.vendor not in profile.vendors:
        return f"{where} ({accelerator.vendor}): calibrate a profile on it first"
    has, needed = accelerator.compute_capability, profile.compute_capability
    if has is not None and has < needed:
        return f"{where}: it needs compute capability {needed:g}, {accelerator.name} has {has:g}"
    return None


def format_problem(dtype: str, accelerator: Accelerator, architecture: str = "") -> str | None:
    """Why engines do not load weights of a format on a device; None if they do."""
    name = memory.weight_format(dtype).name
    if architecture in WITHOUT_FLOAT16 and name != "float32":  # it computes in 16 bits
        name, dtype = "bfloat16", f"{architecture} overflows in float16: its"
    has, needed = accelerator.compute_capability, _SINCE.get(name, 0.0)
    if has is None or has >= needed:
        return None
    return f"{dtype} weights need compute capability {needed:g}, {accelerator.name} has {has:g}"


def checkpoint_problem(profile: EngineProfile, shape: ModelShape, dtype: str) -> str | None:
    """Why the engine does not load a model in a number format; None if it does."""
    other = "use the profile of an engine that does, such as --profile vllm"
    if profile.architectures and shape.architecture not in ("", *profile.architectures):
        return f"{profile.label} does not load {shape.name} ({shape.architecture}): {other}"
    if profile.dtypes and memory.weight_format(dtype).name not in profile.dtypes:
        return f"{profile.label} does not load weights in {dtype}: {other}"
    return None


def planned_model_for(setup: Setup, profile: EngineProfile) -> PricedSteps:
    """`step_time_model_for`, with speculation if any; the draft runs on the same devices.

    Raises InputError too where draft and model have different vocabularies.
    """
    target, speculation = step_time_model_for(setup, profile), setup.speculation
    if speculation is None:
        return target
    draft = setup.draft
    if draft is None:
        return SpeculativeModel(target, None, speculation)
    if draft.vocab_size != setup.shape.vocab_size:
        raise InputError(
            f"draft {draft.name} has {draft.vocab_size:,} token ids, {setup.shape.name} "
            f"{setup.shape.vocab_size:,}: a draft's token ids must mean the same"
        )
    draft_model = step_time_model_for(replace(setup, shape=draft), profile)
    return SpeculativeModel(target, draft_model, speculation)


def roofline_of(setup: Setup, *, input_tokens: int, output_tokens: int) -> Roofline:
    """The roofline from data sheets, for a context of input + output / 2, with a token a step.

    Raises InputError where no source states a peak.
    """
    accelerator, devices = setup.instance.accelerator, setup.tensor_parallel
    peak = accelerator.peak_flop_per_s(compute_dtype(accelerator, setup.dtype))
    bandwidth = accelerator.bandwidth_bytes_per_s
    if peak is None or bandwidth is None:
        raise InputError(f"no source states the bandwidth and {setup.dtype} peak of {accelerator.name}")
    context, shape = input_tokens + output_tokens / 2, setup.shape
    weight_bytes = memory.weight_bytes(shape, setup.dtype)
    bits = memory.weight_format(setup.dtype).bits  # that every format has for experts
    expert_bytes = memory.expert_params(shape) * bits / memory.BITS_PER_BYTE
    return Roofline(
        peak,
        bandwidth,
        weight_bytes / devices,
        context * kv_bytes_of(setup, context),
        FLOP_PER_PARAMETER * shape.params_active / devices,
        expert_bytes / weight_bytes,
        1 - shape.experts_per_token / shape.experts if expert_bytes else 0.0,
    )
