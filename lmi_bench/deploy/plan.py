"""A deployment plan: a model's layout on instances, from `recommend` or from the user."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from lmi_bench.analysis.fleet.answer import Recommendation
from lmi_bench.analysis.model.capacity import memory_plan_for
from lmi_bench.analysis.model.checkpoint_dtype import narrow_dtype, planned_dtype
from lmi_bench.analysis.model.engine_setting import AS_STATED, EngineSetting
from lmi_bench.analysis.model.memory import kv_bytes_per_value
from lmi_bench.analysis.model.profiles import EngineProfile
from lmi_bench.analysis.model.setup import Setup
from lmi_bench.catalog.instances import find_instance
from lmi_bench.catalog.models import find_model, find_model_entry
from lmi_bench.catalog.tables import variant_words
from lmi_bench.core.errors import CapacityError, InputError
from lmi_bench.models.shape import possible_degrees, tensor_parallel_problem

NGRAM: Final = "ngram"
_MOST_SLOTS: Final = 256


@dataclass(frozen=True, slots=True)
class DeploymentPlan:
    """A model on `instances` machines, `copies` of it on each.

    setup             one copy: model, machine, tensor-parallel degree, number format
    model_id          Hub id, s3:// prefix or folder from which the container loads the weights
    slots             maximum concurrent sequences per copy
    max_model_len     maximum tokens per request, input and output together
    max_input_tokens  maximum prompt tokens
    basis             origin of slots and lengths, for the files' comments
    engine            further engine settings; None keeps the server's default
    draft             `ngram`, or the location of a draft model inside the container
    draft_tokens      draft tokens per step
    """

    setup: Setup
    model_id: str
    instances: int
    copies: int
    slots: int
    max_model_len: int
    max_input_tokens: int
    basis: str
    engine: EngineSetting = AS_STATED
    draft: str | None = None
    draft_tokens: int = 5

    def __post_init__(self) -> None:
        degree, instance = self.setup.tensor_parallel, self.setup.instance
        problem = tensor_parallel_problem(self.setup.shape, degree)
        if problem is not None:
            raise CapacityError(problem)
        if self.copies * degree > instance.num_accelerators:
            raise CapacityError(
                f"{self.copies} copies of TP {degree} need {self.copies * degree} accelerators; "
                f"{instance.instance_type} has {instance.num_accelerators}"
            )

    @property
    def fills_the_machine(self) -> bool:
        """True if no further copy fits on the accelerators."""
        return self.copies == self.setup.instance.num_accelerators // self.setup.tensor_parallel

    @property
    def checkpoint_states_dtype(self) -> bool:
        """True if the weights are published in this format, so that servers detect it."""
        return narrow_dtype(self.model_id) == self.setup.dtype

    @property
    def has_one_byte_cache(self) -> bool:
        """True if the KV cache has one byte per value, the only format that must be requested."""
        kv_dtype = self.engine.kv_dtype
        return kv_dtype is not None and kv_bytes_per_value("float16", kv_dtype) == 1

    def describe(self) -> str:
        """One line for display."""
        setup, copies = self.setup, "copy" if self.copies == 1 else "copies"
        return (
            f"{setup.shape.name} ({setup.dtype}) on {self.instances} x "
            f"{setup.instance.instance_type}, {self.copies} {copies} of TP {setup.tensor_parallel} "
            f"each, {self.slots} sequences per copy, requests up to {self.max_model_len:,} tokens"
        )


def plan_from_recommendation(
    answer: Recommendation, model: str, *, model_id: str | None = None
) -> DeploymentPlan:
    """The recommended layout of an answer that has one. model: its name in the request."""
    best, question = answer.recommended, answer.question
    assert best is not None
    plan = DeploymentPlan(
        Setup(
            find_model(model),
            find_instance(best.instance),
            best.tensor_parallel,
            best.setting.dtype or question.dtype,
        ),
        model_id=_model_id(model, model_id),
        instances=best.instances,
        copies=best.copies,
        slots=max(1, min(_MOST_SLOTS, best.memory.slots_per_copy)),
        max_model_len=question.most_tokens,
        max_input_tokens=question.longest_prompt,
        basis=f"recommended for {question.load}, {question.objective}; {question.profile}",
        engine=best.setting,
    )
    speculation = best.setting.speculation
    if speculation is None:
        return plan
    draft = NGRAM if speculation.draft is None else _model_id(speculation.draft.name, None)
    return replace(plan, draft=draft, draft_tokens=speculation.draft_tokens)


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
    degrees = possible_degrees(shape, instance.num_accelerators) or [1]
    reasons = []
    for degree in [tensor_parallel] if tensor_parallel else degrees:
        setup = Setup(shape, instance, degree, dtype)
        half = max(1, longest // 2)
        memory = memory_plan_for(setup, profile, input_tokens=half, output_tokens=longest - half)
        if memory.problem is not None:
            reasons.append(f"TP {degree}: {memory.problem}")
            continue
        return DeploymentPlan(
            setup,
            model_id=_model_id(model, model_id),
            instances=instances,
            copies=copies or instance.num_accelerators // degree,
            slots=slots or max(1, min(_MOST_SLOTS, memory.sequences_expected)),
            max_model_len=longest,
            max_input_tokens=max_input_tokens or longest - 1,
            basis=f"{memory.sequences_guaranteed} sequences of {longest:,} tokens always fit in a "
            f"copy, {memory.sequences_expected} if half of each is prompt and half of its output "
            f"is done ({profile.label})",
        )
    raise CapacityError(
        f"{shape.name} in {dtype} with requests of {longest:,} tokens does not fit "
        f"{instance.instance_type}\n  " + "\n  ".join(reasons)
    )


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
    if hub_id and not variant_words(model) - variant_words(hub_id):
        return hub_id
    base = f", only for its base, {hub_id}" if hub_id else ""
    raise InputError(
        f"no Hub id is known for {model}{base}: give --model-id (Hub id or s3:// prefix)"
    )
