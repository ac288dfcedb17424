"""Maps KV heads to devices when a model is split, by strategy.

The names are NeuronX's (`option.group_query_attention`). The bundled engine splits over heads, as
vLLM and TGI do, and replicates heads if there are more ranks than heads.
"""

from dataclasses import dataclass
from typing import Final

from lmi_bench.core.errors import InputError
from lmi_bench.models.shape import ModelShape, tensor_parallel_problem

STRATEGIES: Final = {
    "shard-over-heads": "each device keeps the KV heads that its query heads read",
    "replicated-heads": "each query head gets its own KV head, as in multi-head attention",
    "shard-over-batch": "each device keeps every KV head for its part of the batch",
}


@dataclass(frozen=True, slots=True)
class DeviceHeads:
    """Indices of one device's query heads and of the KV heads that it keeps.

    cache_share  share of an unsplit model's cache; above 1 is possible with replicated heads
    """

    query_heads: range
    kv_heads: tuple[int, ...]
    cache_share: float


def shard_map(shape: ModelShape, degree: int, strategy: str) -> list[DeviceHeads]:
    """Every device's heads; raises InputError if the heads cannot be split this way."""
    if strategy not in STRATEGIES:
        raise InputError(f"strategy {strategy!r}: use one of {', '.join(STRATEGIES)}")
    problem = tensor_parallel_problem(shape, degree)
    if problem is not None:
        raise InputError(f"--tp {degree}: {problem}")
    per_device = shape.num_heads // degree
    readers = shape.num_heads // shape.num_kv_heads  # query heads that read one KV head
    devices = []
    for device in range(degree):
        queries = range(device * per_device, (device + 1) * per_device)
        read = tuple(query // readers for query in queries)
        if strategy == "shard-over-batch":
            kept, share = tuple(range(shape.num_kv_heads)), 1 / degree
        else:
            kept = read if strategy == "replicated-heads" else tuple(sorted(set(read)))
            share = len(kept) / shape.num_kv_heads
        devices.append(DeviceHeads(queries, kept, share))
    return devices
