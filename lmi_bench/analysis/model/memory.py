"""Memory fit of one rank: weights, reserve and KV cache, and the reason where they do not fit.

    B_max = floor((memory - weights - reserve) / KV bytes of a sequence)

guaranteed with every sequence at its full length (input + output), expected with sequences half
through their output (input + output / 2).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from lmi_bench.analysis.model.kv_cache import KV_BYTES_PER_VALUE, kv_bytes_per_sequence
from lmi_bench.analysis.model.weights import weight_bytes
from lmi_bench.core.errors import CapacityError
from lmi_bench.core.units import bytes_to_gib
from lmi_bench.models.shape import ModelShape, tensor_parallel_problem


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """One rank's memory, in bytes.

    kv_bytes_per_sequence   of one sequence at its full length
    sequences_guaranteed    that fit at full length; sequences_expected: half through the output
    problem                 why the model does not fit; None if it does
    """

    memory_bytes: float
    weight_bytes: float
    reserve_bytes: float
    kv_bytes_per_sequence: float
    sequences_guaranteed: int
    sequences_expected: int
    problem: str | None

    @property
    def kv_budget_bytes(self) -> float:
        """Memory left for the KV cache; below 0 the weights do not fit."""
        return self.memory_bytes - self.weight_bytes - self.reserve_bytes

    @property
    def fits(self) -> bool:
        """Whether at least one sequence can run."""
        return self.problem is None


def plan_memory(
    shape: ModelShape,
    *,
    memory_bytes: float,
    input_tokens: int,
    output_tokens: int,
    dtype: str = "float16",
    tensor_parallel: int = 1,
    reserve_bytes: float = 0.0,
    kv_bytes_per_value: float = KV_BYTES_PER_VALUE,
) -> MemoryPlan:
    """A rank's memory, and how many sequences of the given lengths it holds."""
    plan = MemoryPlan(
        memory_bytes,
        weight_bytes(shape, dtype) / tensor_parallel,
        reserve_bytes,
        kv_bytes_per_sequence=0.0,
        sequences_guaranteed=0,
        sequences_expected=0,
        problem=tensor_parallel_problem(shape, tensor_parallel),
    )
    if plan.problem is not None:
        return plan

    def kv_bytes(tokens: float) -> float:
        return kv_bytes_per_sequence(
            shape, tokens, bytes_per_value=kv_bytes_per_value, tensor_parallel=tensor_parallel
        )

    full = kv_bytes(input_tokens + output_tokens)
    half = kv_bytes(input_tokens + output_tokens / 2)
    plan = replace(
        plan,
        kv_bytes_per_sequence=full,
        sequences_guaranteed=max(0, math.floor(plan.kv_budget_bytes / full)),
        sequences_expected=max(0, math.floor(plan.kv_budget_bytes / half)),
    )
    if plan.sequences_guaranteed > 0:
        return plan
    return replace(plan, problem=_misfit(shape, tensor_parallel, plan))


def _misfit(shape: ModelShape, tensor_parallel: int, plan: MemoryPlan) -> str:
    """The term that exceeds the device's memory, with every number."""
    have = f"{bytes_to_gib(plan.memory_bytes):.1f} GiB of the device"
    need = f"{bytes_to_gib(plan.weight_bytes):.1f} GiB of weights a device at TP {tensor_parallel}"
    if plan.weight_bytes > plan.memory_bytes:
        return f"{need} exceed the {have} (weights): more devices or fewer bits a weight"
    if plan.weight_bytes + plan.reserve_bytes > plan.memory_bytes:
        return (
            f"{need} and {bytes_to_gib(plan.reserve_bytes):.1f} GiB of reserve exceed the {have} "
            "(reserve): more devices or fewer bits a weight"
        )
    return (
        f"{shape.name}: {bytes_to_gib(plan.kv_budget_bytes):.2f} GiB left of the {have} hold no "
        f"sequence of {bytes_to_gib(plan.kv_bytes_per_sequence):.2f} GiB of KV cache (KV): shorter "
        "requests or more devices"
    )


def min_devices(
    shape: ModelShape,
    *,
    memory_bytes: float,
    batch: int,
    tokens_per_sequence: float,
    dtype: str = "float16",
    reserve_bytes: float = 0.0,
    kv_bytes_per_value: float = KV_BYTES_PER_VALUE,
    most: int = 64,
) -> int:
    """Fewest devices that hold the weights and the cache of `batch` sequences.

    Considers only degrees that divide the heads. Raises CapacityError beyond `most`.
    """
    weights = weight_bytes(shape, dtype)
    for devices in range(1, most + 1):
        if tensor_parallel_problem(shape, devices) is not None:
            continue
        cache = batch * kv_bytes_per_sequence(
            shape,
            tokens_per_sequence,
            bytes_per_value=kv_bytes_per_value,
            tensor_parallel=devices,
        )
        if weights / devices + reserve_bytes + cache <= memory_bytes:
            return devices
    raise CapacityError(
        f"{shape.name} with {batch} sequences of {tokens_per_sequence:g} tokens does not fit on "
        f"{most} devices of {bytes_to_gib(memory_bytes):.1f} GiB"
    )
