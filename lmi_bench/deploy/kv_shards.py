"""Maps KV heads to devices when a model is split, by NeuronX's `option.group_query_attention`.

The bundled engine, vLLM and TGI split over heads, and copy heads for more ranks than heads.
"""

from dataclasses import replace
from typing import Final

from lmi_bench.core.errors import InputError
from lmi_bench.models.shape import ModelShape, RankHeads, split_heads

STRATEGIES: Final = {
    "shard-over-heads": "each device keeps the KV heads that its query heads read",
    "replicated-heads": "copies: a KV head on each device that reads it, else for each query head",
    "shard-over-batch": "each device keeps every KV head for its part of the batch",
}


def shard_map(shape: ModelShape, degree: int, strategy: str) -> list[tuple[RankHeads, float]]:
    """Every device's heads, and its share of an unsplit model's cache, padding counted.

    Raises InputError if the heads cannot be split this way.
    """
    if strategy not in STRATEGIES:
        raise InputError(f"strategy {strategy!r}: use one of {', '.join(STRATEGIES)}")
    kv_heads = shape.num_kv_heads
    ranks = split_heads(shape, degree, strategy)
    if strategy != "shard-over-batch":
        return [(rank, rank.kv_slots / kv_heads) for rank in ranks]
    every = tuple(range(kv_heads))
    return [(replace(rank, kv_heads=every, kv_slots=kv_heads), 1 / degree) for rank in ranks]
