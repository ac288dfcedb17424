"""A deployment plan: a model's layout on instances, from `recommend` or from the user."""

import re
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

from lmi_bench.analysis.fleet.answer import Recommendation
from lmi_bench.analysis.fleet.start_up import StartUp, estimated_start_up
from lmi_bench.analysis.model.capacity import format_problem
from lmi_bench.analysis.model.checkpoint_dtype import narrow_dtype, planned_dtype
from lmi_bench.analysis.model.engine_setting import AS_STATED, EngineSetting
from lmi_bench.analysis.model.memory import kv_bytes_per_value, weight_bytes, weight_format
from lmi_bench.analysis.model.profiles import EngineProfile
from lmi_bench.analysis.model.setup import OWN_LAYER, Setup, Speculation
from lmi_bench.catalog.instances import find_instance
from lmi_bench.catalog.models import find_model, find_model_entry
from lmi_bench.catalog.tables import is_same_model
from lmi_bench.core.errors import CapacityError, InputError
from lmi_bench.core.units import plural
from lmi_bench.deploy.engine_arguments import engine_arguments
from lmi_bench.deploy.images import Image
from lmi_bench.deploy.limits import Lengths, ServedLimits, served_limits
from lmi_bench.deploy.settings import NOTHING, Stated
from lmi_bench.models.shape import ModelShape, possible_degrees, tensor_parallel_problem

NGRAM: Final = "ngram"
_DRAFT_TOKENS: Final = 5
_OWN_DRAFT_TOKENS: Final = 1  # the published heads draft one token
_CONTEXT, _TYPICAL_TOKENS = 32_768, 2_048
_FULL_BITS: Final = 16
_OF_OTHER_ENGINES: Final = re.compile(r"(?:^|[-_./])(gguf|exl[23]|mlx|onnx|bnb)(?:[-_./]|$)")
_AWQ_SINCE: Final = 7.5  # compute capability; vLLM's AWQ configuration
_HEAD_ROOM: Final = 0.8
"""Share of the planned concurrency at which a copy is added, since it starts minutes later."""


@dataclass(frozen=True, slots=True)
class Weights:
    """Where the weights are, and their format.

    location       Hub id, s3:// prefix or folder from which the container loads them
    states_dtype   True if they are published in the plan's format, so that servers detect it
    stated_dtype   True if the user states the format; else 16-bit weights keep their own
    """

    location: str
    states_dtype: bool = False
    stated_dtype: bool = False


@dataclass(frozen=True, slots=True)
class DeploymentPlan:
    """A model on `instances` machines, `copies` of it on each.

    setup         one copy: model, machine, tensor-parallel degree, number format
    basis         origin of the layout and its limits, for the files' comments
    engine        further engine settings; None keeps the server's default
    draft         `ngram`, `mtp` (the model's own layer), or where the container finds a draft model
    draft_tokens  draft tokens per step
    concurrency   requests in a copy at the capacity within the SLOs; None: not planned
    image         that will run it; None: not known, or not chosen yet
    trusts_code   the server may run code that comes with the weights
    warnings      for the user, about this plan
    """

    setup: Setup
    weights: Weights
    instances: int
    copies: int
    limits: ServedLimits
    basis: str
    engine: EngineSetting = AS_STATED
    draft: str | None = None
    draft_tokens: int = _DRAFT_TOKENS
    concurrency: float | None = None
    image: Image | None = None
    trusts_code: bool = False
    warnings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        degree, instance = self.setup.tensor_parallel, self.setup.instance
        problem = tensor_parallel_problem(self.setup.shape, degree)
        problem = problem or format_problem(self.setup.dtype, instance.accelerator)
        if problem is not None:
            raise CapacityError(problem)
        capability = instance.accelerator.compute_capability
        if "awq" in self.weights.location.lower() and (capability or _AWQ_SINCE) < _AWQ_SINCE:
            raise CapacityError(
                f"the weights {self.weights.location} need compute capability {_AWQ_SINCE:g}, "
                f"{instance.accelerator.name} has {capability:g}: take a GPTQ checkpoint"
            )
        speculation, shape = self.setup.speculation, self.setup.shape
        drafts = speculation.draft if speculation and self.draft != NGRAM else None
        if drafts and drafts.vocab_size != shape.vocab_size:
            raise CapacityError(
                f"{shape.name} has {shape.vocab_size:,} tokens and its draft {drafts.name} "
                f"{drafts.vocab_size:,}: engines want a draft model with the same vocabulary"
            )
        degree = self.setup.devices
        if degree % self.hosts:
            raise CapacityError(
                f"{degree} accelerators of a copy do not divide over {self.hosts} hosts: change --tp or --pp"
            )
        if self.copies * degree > instance.num_accelerators:
            raise CapacityError(
                f"{self.copies} copies of TP {degree} need {self.copies * degree} accelerators; "
                f"{instance.instance_type} has {instance.num_accelerators}"
            )

    @property
    def hosts(self) -> int:
        """Machines that one copy spans; `setup.instance` has the devices of all."""
        return self.setup.parallelism.hosts

    @property
    def fills_the_machine(self) -> bool:
        """True if no further copy fits on the accelerators."""
        return self.copies == self.setup.instance.num_accelerators // self.setup.devices

    @property
    def has_one_byte_cache(self) -> bool:
        """True if the KV cache has one byte per value, the only format that must be requested."""
        kv_dtype = self.engine.kv_dtype
        return kv_dtype is not None and kv_bytes_per_value("float16", kv_dtype) == 1

    def start_up(self, *, workers: int, downloads: int) -> StartUp:
        """The estimated start-up of a machine; arguments as for `estimated_start_up`."""
        setup = self.setup
        return estimated_start_up(
            setup.instance,
            weight_bytes=weight_bytes(setup.shape, setup.dtype),
            num_layers=setup.shape.num_layers,
            tensor_parallel=setup.tensor_parallel,
            workers=workers,
            downloads=downloads,
            compiles=self.engine.cuda_graphs is not False,
        )

    def scaling_target(self, stated: float | None, most_machines: int | None) -> float:
        """Concurrent requests of a copy at which autoscaling adds one; raises InputError."""
        if most_machines is not None and most_machines < self.instances:
            raise InputError(f"at most {most_machines} instances are fewer than the {self.instances} planned")
        wanted = self.limits.expected if self.concurrency is None else self.concurrency
        return stated or max(1.0, _HEAD_ROOM * min(wanted, self.limits.max_num_seqs))

    def describe(self) -> str:
        """One line for display."""
        setup, copies = self.setup, "copy" if self.copies == 1 else "copies"
        limits = self.limits
        return (
            f"{setup.shape.name} ({setup.dtype}) on {self.instances} x "
            f"{setup.instance.instance_type}, {self.copies} {copies} of TP {setup.tensor_parallel} "
            f"each, {plural(limits.max_num_seqs, 'sequence')} per copy, requests up to "
            f"{limits.max_model_len:,} tokens"
        )


def plan_from_recommendation(
    answer: Recommendation,
    model: str,
    profile: EngineProfile,
    stated: Stated = NOTHING,
    *,
    image: Image | None = None,
    weights: str | None = None,
) -> DeploymentPlan:
    """The recommended layout of an answer that has one, with what the user states instead.

    model    its name in the request
    profile  of the server that runs it: its memory decides whether the workload fits

    Raises CapacityError, with the numbers, if the workload's longest request does not fit.
    """
    best, question = answer.recommended, answer.question
    assert best is not None
    engine, instance = best.setting, find_instance(best.instance)
    dtype = planned_dtype(model, stated.dtype or engine.dtype or question.dtype)
    degree = stated.tensor_parallel or best.tensor_parallel
    shape, split = _shape(model, weights), engine.parallelism(instance, degree)
    draft, speculation = _drafting(stated.draft, shape, engine.speculation)
    setup = Setup(shape, instance, degree, dtype, engine.kv_dtype, speculation, split)
    is_planned = degree == best.tensor_parallel
    copies = best.copies if is_planned else instance.num_accelerators // setup.devices
    batch = best.memory.mean_batch_per_copy
    kinds = question.kinds or (question,)
    lengths = Lengths(
        question.input_tokens,
        question.output_tokens,
        max(kind.input_tokens for kind in kinds),
        max(kind.input_tokens + kind.output_tokens for kind in kinds),
        batch,
        are_means=not question.kinds,
    )
    limits = served_limits(setup, profile, lengths, stated, engine=engine, image=image)
    warnings: tuple[str, ...] = ()
    if round(batch) > limits.expected:
        warnings = (
            f"the plan runs {batch:.0f} sequences at once in a copy; {profile.label} leaves memory "
            f"for {limits.expected}: recommend with that --profile",
        )
    return DeploymentPlan(
        setup,
        _weights(model, weights, dtype, image, is_stated=stated.dtype is not None),
        instances=stated.machines or best.instances,
        copies=stated.replicas or copies,
        limits=limits,
        basis=f"recommended for {question.load}, {question.objective}; {question.profile}; "
        + stated.added_to(limits.basis),
        engine=engine,
        draft=draft,
        draft_tokens=_DRAFT_TOKENS if speculation is None else speculation.draft_tokens,
        concurrency=_concurrency(answer),
        image=image,
        warnings=warnings,
    )


def _drafting(
    stated: str | None, shape: ModelShape, planned: Speculation | None = None
) -> tuple[str | None, Speculation | None]:
    """The draft as the server names it, and what it does: the stated one, else the plan's.

    A draft model of the catalog counts with its memory; the size of another is not known.
    """
    if stated is None:
        if planned is None or planned.own:
            return None if planned is None else OWN_LAYER, planned
        return NGRAM if planned.draft is None else _hub_id(planned.draft.name), planned
    if stated == NGRAM:
        return NGRAM, None
    if stated == OWN_LAYER:
        return OWN_LAYER, Speculation.by_own_layer(shape, _OWN_DRAFT_TOKENS)
    draft, speculation = _hub_id(stated), None
    with suppress(InputError):
        speculation = Speculation(_DRAFT_TOKENS, 0, find_model(draft))
    return draft, speculation


def _concurrency(answer: Recommendation) -> float:
    """Requests in a copy at the lower end of the capacity within the SLOs.

    By Little's law with the latency at the planned load, which is not longer than at the capacity:
    too small rather than too large for a scaling target.
    """
    best, rate = answer.recommended, answer.question.rate_per_s
    assert best is not None
    capacity, batch = best.figures["capacity_rate_per_s"], best.memory.mean_batch_per_copy
    if capacity is None or not rate:
        return batch
    return min(best.memory.slots_per_copy, batch * capacity.low / rate)


def plan_from_layout(
    model: str,
    instance_name: str,
    profile: EngineProfile,
    stated: Stated = NOTHING,
    *,
    image: Image | None = None,
    weights: str | None = None,
) -> DeploymentPlan:
    """A layout stated by the user; omitted values follow from the machine's memory.

    By default the tensor-parallel degree is the smallest that holds the context, at most 32,768
    tokens unless stated, with as many copies as then fit; where no degree holds that, the context
    is what memory holds. dtype None: as the weights are published, at most 16 bits.

    Raises CapacityError, with the numbers, if the model does not fit.
    """
    shape, instance = _shape(model, weights), find_instance(instance_name)
    dtype = planned_dtype(weights or model, stated.dtype)
    found = _weights(model, weights, dtype, image, is_stated=stated.dtype is not None)
    draft, speculation = _drafting(stated.draft, shape)
    setup = Setup(shape, instance, 1, dtype, speculation=speculation)
    setup, limits = _smallest(setup, profile, stated, image)
    warnings: tuple[str, ...] = ()
    if stated.max_model_len is None and limits.max_model_len < shape.max_positions:
        warnings = (
            f"requests are limited to {limits.max_model_len:,} of the model's "
            f"{shape.max_positions:,} tokens: --max-model-len states another limit",
        )
    return DeploymentPlan(
        setup,
        found,
        instances=stated.machines or 1,
        copies=stated.replicas or instance.num_accelerators // setup.tensor_parallel,
        limits=limits,
        basis=stated.added_to(limits.basis),
        draft=draft,
        image=image,
        warnings=warnings,
    )


def _smallest(setup: Setup, profile: EngineProfile, stated: Stated, image: Image | None) -> tuple[Setup, ServedLimits]:
    """The set-up with the smallest degree that holds the context, and its limits."""
    shape, instance, context = setup.shape, setup.instance, stated.max_model_len
    most = shape.max_positions
    if context is not None and context > most:
        raise CapacityError(f"{shape.name} takes at most {most:,} tokens, input and output together, not {context:,}")
    typical = min(stated.typical_tokens or _TYPICAL_TOKENS, context or most)
    usual = context or min(most, _CONTEXT)
    tried = [(usual, replace(stated, max_model_len=usual))]
    if context is None:
        tried.append((typical, stated))
    half = max(1, typical // 2)
    reasons: dict[str, None] = {}
    for longest, wanted in tried:
        answer = max(1, typical - half)
        prompt = min(stated.max_input_tokens or most, max(half, longest - answer))
        lengths = Lengths(half, answer, prompt, longest)
        possible = possible_degrees(shape, instance.num_accelerators) or [1]
        for degree in [stated.tensor_parallel] if stated.tensor_parallel else possible:
            split = replace(setup, tensor_parallel=degree)
            try:
                return split, served_limits(split, profile, lengths, wanted, image=image)
            except CapacityError as exc:
                reason = str(exc).removeprefix(f"{instance.instance_type}: ")
                reasons[f"TP {degree}: {reason}"] = None
    raise CapacityError(
        f"{shape.name} in {setup.dtype} with requests of {longest:,} tokens does not fit "
        f"{instance.instance_type}\n  " + "\n  ".join(reasons)
    )


def _without_bitsandbytes(image: Image | None) -> bool:
    """True if the engine of a known image does not read weights of bitsandbytes."""
    if image is None or image.engine not in ("vllm", "sglang"):
        return image is not None
    known = engine_arguments(image.engine, image.engine_version)
    return bool(known) and "bitsandbytes" not in known["quantization"].choices


def _weights(model: str, location: str | None, dtype: str, image: Image | None, *, is_stated: bool) -> Weights:
    """The weights of a plan; raises InputError where they are not in its number format."""
    place = location or _hub_id(model)
    narrow, is_own = narrow_dtype(place), place.startswith(("s3://", "/"))
    other = _OF_OTHER_ENGINES.search(place.lower())
    if other and (other[1] != "bnb" or _without_bitsandbytes(image)):
        raise InputError(
            f"the server does not read the format of the weights {place} ({other[1]}): name "
            "others with --model-id, such as ORG/NAME-AWQ"
        )
    is_full = dtype == "float8" or weight_format(dtype).bits >= _FULL_BITS  # engines make float8
    if narrow is None and not (is_own or is_full):
        raise InputError(
            f"{dtype} weights need a quantized checkpoint, and {place} is none by its name: name "
            "one with --model-id, such as ORG/NAME-AWQ, or your own with --model-data"
        )
    if narrow not in (None, dtype):
        raise InputError(
            f"the weights {place} are {narrow}, the plan has {dtype}: plan with --dtype {narrow}, "
            "or name another checkpoint with --model-id"
        )
    return Weights(place, narrow == dtype, is_stated)


def _shape(model: str, weights: str | None) -> ModelShape:
    """The shape of a model, with the context of its variant that the weights' name states."""
    shape = named = find_model(model)
    with suppress(InputError):
        named = find_model(weights or model)
    return named if named.name == shape.name else shape


def _hub_id(model: str) -> str:
    """The Hub id of a model for the container, or the folder as it is.

    A Hub id is kept: the catalog has only the base of a chat or quantized variant.
    """
    try:
        entry = find_model_entry(model)
    except InputError:
        return model  # a folder
    if "/" in model:
        return model
    hub_id, name = entry.hf_id, entry.shape.name
    if hub_id and is_same_model(model, (name, hub_id)):
        return hub_id
    base = f", only for {hub_id}, of whose shape it is planned" if hub_id else ""
    raise InputError(f"no Hub id is known for {model}{base}: give --model-id (Hub id or s3:// prefix)")
