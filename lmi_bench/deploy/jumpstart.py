"""TGI's variables as JumpStart set them in 2023 for a model on an instance.

One shard per accelerator if the heads allow it, requests up to the whole context, prefills of at
least 4,096 tokens, 128 concurrent requests. Published for Llama 2 (context 4,096); applied to
other models with their own context.
"""

from __future__ import annotations

from typing import Final

from lmi_bench.catalog.instances import Instance
from lmi_bench.core.errors import CapacityError
from lmi_bench.models.shape import ModelShape, tensor_parallel_problem

MAX_CONCURRENT_REQUESTS: Final = 128
_PREFILL_TOKENS: Final = 4096
_STATED: Final = ("llama-2-7b", "llama-2-13b", "llama-2-70b")


def jumpstart_environment(shape: ModelShape, instance: Instance) -> dict[str, str]:
    """The variables. Raises CapacityError if neither all accelerators nor one can be used."""
    context = shape.max_positions
    degrees = (instance.num_accelerators, 1)
    shards = next((n for n in degrees if tensor_parallel_problem(shape, n) is None), None)
    if shards is None:
        raise CapacityError(
            f"{shape.name} cannot be split over the accelerators of {instance.instance_type}"
        )
    return {
        "SM_NUM_GPUS": str(shards),
        "MAX_INPUT_LENGTH": str(context - 1),
        "MAX_TOTAL_TOKENS": str(context),
        "MAX_BATCH_PREFILL_TOKENS": str(max(_PREFILL_TOKENS, context)),
        "MAX_CONCURRENT_REQUESTS": str(MAX_CONCURRENT_REQUESTS),
    }


def provenance(shape: ModelShape) -> str:
    """The origin of the values, for display."""
    if shape.name.lower() in _STATED:
        return "as published in the benchmark of JumpStart's endpoints for Llama 2 (2023)"
    return "by the rule that JumpStart used for Llama 2 (2023), with this model's own context"
