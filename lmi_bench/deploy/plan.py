"""A deployment plan: a model's layout on instances, from `recommend` or from the user."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final

from lmi_bench.analysis.fleet.answer import Recommendation
from lmi_bench.analysis.model.capacity import memory_plan_for
from lmi_bench.analysis.model.checkpoint_dtype import narrow_dtype, planned_dtype
from lmi_bench.analysis.model.memory import MemoryPlan
from lmi_bench.analysis.model.profiles import EngineProfile
from lmi_bench.analysis.model.setup import Setup
from lmi_bench.analysis.model.weights import weight_format
from lmi_bench.catalog.instances import Instance, find_instance
from lmi_bench.catalog.models import find_model, find_model_entry
from lmi_bench.catalog.names import variant_words
from lmi_bench.core.errors import CapacityError, InputError
from lmi_bench.deploy.engine_wishes import NGRAM, EngineWishes
from lmi_bench.models.shape import ModelShape, tensor_parallel_problem

_MOST_SLOTS: Final = 256


@dataclass(frozen=True, slots=True)
class DeploymentPlan:
    """A model on `instances` machines, `copies` of it on each.

    model_id          Hub id, s3:// prefix or folder from which the container loads the weights
    slots             maximum concurrent sequences per copy
    max_model_len     maximum tokens per request, input and output together
    max_input_tokens  maximum prompt tokens
    basis             origin of slots and lengths, for the files' comments
    engine            further engine settings
    """

    shape: ModelShape
    model_id: str
    instance: Instance
    instances: int
    tensor_parallel: int
    copies: int
    dtype: str
    slots: int
    max_model_len: int
    max_input_tokens: int
    basis: str
    engine: EngineWishes = field(default_factory=EngineWishes)

    def __post_init__(self) -> None:
        problem = tensor_parallel_problem(self.shape, self.tensor_parallel)
        if problem is not None:
            raise CapacityError(problem)
        have = self.instance.num_accelerators
        if self.copies * self.tensor_parallel > have:
            raise CapacityError(
                f"{self.copies} copies of TP {self.tensor_parallel} need "
                f"{self.copies * self.tensor_parallel} accelerators; "
                f"{self.instance.instance_type} has {have}"
            )

    @property
    def fills_the_machine(self) -> bool:
        """True if no further copy fits on the accelerators."""
        return self.copies == self.instance.num_accelerators // self.tensor_parallel

    @property
    def weights_say_their_format(self) -> bool:
        """True if the weights are published in this format, so that servers detect it."""
        return narrow_dtype(self.model_id) == self.dtype

    def describe(self) -> str:
        """One line for display."""
        copies = "copy" if self.copies == 1 else "copies"
        return (
            f"{self.shape.name} ({self.dtype}) on {self.instances} x "
            f"{self.instance.instance_type}, {self.copies} {copies} of TP {self.tensor_parallel} "
            f"each, {self.slots} sequences per copy, requests up to {self.max_model_len:,} tokens"
        )


def plan_from_recommendation(
    answer: Recommendation, model: str, *, model_id: str | None = None
) -> DeploymentPlan:
    """The recommended layout of an answer that has one. model: as it was asked for."""
    best, question = answer.recommended, answer.question
    assert best is not None
    slots = best.memory.get("slots_per_copy")
    engine = EngineWishes.of_setting(best.setting)
    if engine.draft not in (None, NGRAM):
        engine = replace(engine, draft=_model_id(str(engine.draft), None))
    return DeploymentPlan(
        shape=find_model(model),
        model_id=_model_id(model, model_id),
        instance=find_instance(best.instance),
        instances=best.instances,
        tensor_parallel=best.tensor_parallel,
        copies=best.copies,
        dtype=best.setting.dtype or question.dtype,
        slots=_MOST_SLOTS if slots is None else max(1, min(_MOST_SLOTS, int(slots))),
        max_model_len=question.most_tokens,
        max_input_tokens=question.longest_prompt,
        basis=f"recommended for {question.load}, {question.objective}; {question.profile}",
        engine=engine,
    )


def plan_from_layout(
    model: str,
    instance_name: str,
    profile: EngineProfile,
    *,
    tensor_parallel: int | None = None,
    copies: int | None = None,
    instances: int = 1,
    dtype: str | None = None,
    max_model_len: int | None = None,
    max_input_tokens: int | None = None,
    slots: int | None = None,
    model_id: str | None = None,
) -> DeploymentPlan:
    """A layout stated by the user; omitted values follow from the machine's memory.

    The token limits decide how many sequences fit. By default the tensor-parallel degree is the
    smallest that holds the model, with as many copies as then fit.
    dtype None: as the weights are published, at most 16 bits.

    Raises CapacityError, with the numbers, if the model does not fit.
    """
    shape = find_model(model)
    instance = find_instance(instance_name)
    dtype = planned_dtype(model, dtype)
    longest = max_model_len or shape.max_positions
    if longest > shape.max_positions:
        raise CapacityError(
            f"{shape.name} takes at most {shape.max_positions:,} tokens, input and output "
            f"together, not {longest:,}"
        )
    degrees = [tensor_parallel] if tensor_parallel else _degrees(shape, instance)
    reasons = []
    for degree in degrees:
        memory = memory_plan_for(
            Setup(shape, instance, degree, dtype),
            profile,
            input_tokens=max(1, longest // 2),
            output_tokens=longest - max(1, longest // 2),
        )
        if memory.problem is not None:
            reasons.append(f"TP {degree}: {memory.problem}")
            continue
        return DeploymentPlan(
            shape=shape,
            model_id=_model_id(model, model_id),
            instance=instance,
            instances=instances,
            tensor_parallel=degree,
            copies=copies or instance.num_accelerators // degree,
            dtype=dtype,
            slots=slots or max(1, min(_MOST_SLOTS, memory.sequences_expected)),
            max_model_len=longest,
            max_input_tokens=max_input_tokens or longest - 1,
            basis=_basis(memory, longest, profile),
        )
    raise CapacityError(
        f"{shape.name} in {dtype} with requests of {longest:,} tokens does not fit "
        f"{instance.instance_type}\n  " + "\n  ".join(reasons)
    )


def _basis(memory: MemoryPlan, longest: int, profile: EngineProfile) -> str:
    return (
        f"{memory.sequences_guaranteed} sequences of {longest:,} tokens always fit in a copy, "
        f"{memory.sequences_expected} if half of each is prompt and half of its output is done "
        f"({profile.label})"
    )


def _degrees(shape: ModelShape, instance: Instance) -> list[int]:
    degrees = [
        degree
        for degree in (1, 2, 4, 8, 16)
        if degree <= instance.num_accelerators and tensor_parallel_problem(shape, degree) is None
    ]
    return degrees or [1]


def _model_id(model: str, stated: str | None) -> str:
    """The location of the weights for the container; for a catalog model its Hub id.

    A Hub id is kept: the catalog has only the base of a chat or quantized variant.
    """
    if stated is not None:
        return stated
    try:
        hub_id = find_model_entry(model).hf_id
    except InputError:
        return model  # a folder
    if "/" in model:
        return model
    if hub_id and variant_words(model) - variant_words(hub_id):
        raise InputError(
            f"no Hub id is known for {model}, only for its base, {hub_id}: give --model-id "
            "(Hub id or s3:// prefix)"
        )
    if not hub_id:
        raise InputError(
            f"no Hub id is known for {model}: give --model-id (Hub id or s3:// prefix)"
        )
    return hub_id


def lmi_dtype(dtype: str) -> tuple[str | None, str | None]:
    """LMI's dtype and quantize for a number format of the planner; None omits the setting.

    int4 and mxfp4 come from a quantized checkpoint, whose config states them.
    """
    match dtype:
        case "float16":
            return "fp16", None
        case "bfloat16":
            return "bf16", None
        case "float32":
            return "fp32", None
        case "float8":
            return None, "fp8"
        case "int4" | "mxfp4":
            return None, None
    raise InputError(
        f"no LMI setting is known for {weight_format(dtype).name} weights: use "
        "float16, bfloat16, float32, float8, int4 or mxfp4 (a quantized checkpoint)"
    )
