"""Groups in which scales can move between a norm or matrix and the matrices that read its output.

Dividing a producer's outputs and multiplying the matching columns of all its readers leaves the
model's function unchanged, and makes channels easier to round. Outputs that pass a nonlinearity
(Falcon's GELU) or that readers use in other shapes (values shared by query heads) are excluded.
"""

from __future__ import annotations

from dataclasses import dataclass

from lmi_bench.models.spec import DecoderSpec


@dataclass(frozen=True, slots=True)
class ScaleGroup:
    """producer  norm or matrix whose outputs are divided
    readers      matrices whose columns are multiplied, including routers of experts
    seen_at      matrix whose recorded inputs represent all readers
    """

    producer: str
    readers: tuple[str, ...]
    seen_at: str


def scale_groups(spec: DecoderSpec) -> list[ScaleGroup]:
    """All groups of a model, layer by layer."""
    of_layer = _falcon_groups if spec.family == "falcon" else _llama_groups
    return [group for index in range(spec.num_layers) for group in of_layer(spec, index)]


def _llama_groups(spec: DecoderSpec, index: int) -> list[ScaleGroup]:
    layer = f"model.layers.{index}"
    attention = f"{layer}.self_attn"
    queries = tuple(f"{attention}.{name}_proj" for name in "qkv")
    groups = [ScaleGroup(f"{layer}.input_layernorm", queries, queries[0])]
    if spec.num_heads == spec.num_kv_heads:
        out = f"{attention}.o_proj"
        groups.append(ScaleGroup(f"{attention}.v_proj", (out,), out))
    norm = f"{layer}.post_attention_layernorm"
    if not spec.experts:
        mlp = f"{layer}.mlp"
        first = (f"{mlp}.gate_proj", f"{mlp}.up_proj")
        down = f"{mlp}.down_proj"
        groups.append(ScaleGroup(norm, first, first[0]))
        groups.append(ScaleGroup(f"{mlp}.up_proj", (down,), down))
        return groups
    mixtral = spec.family == "mixtral"
    mlp = f"{layer}.{'block_sparse_moe' if mixtral else 'mlp'}"
    gate, up, last = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    router = f"{mlp}.gate"
    experts = [f"{mlp}.experts.{number}" for number in range(spec.experts)]
    readers = tuple(f"{expert}.{name}" for expert in experts for name in (gate, up))
    groups.append(ScaleGroup(norm, (router, *readers), router))
    inner = [(f"{expert}.{up}", f"{expert}.{last}") for expert in experts]
    return groups + [ScaleGroup(producer, (reader,), reader) for producer, reader in inner]


def _falcon_groups(spec: DecoderSpec, index: int) -> list[ScaleGroup]:
    layer = f"transformer.h.{index}"
    queries, up = f"{layer}.self_attention.query_key_value", f"{layer}.mlp.dense_h_to_4h"
    if spec.norms_per_layer == 1:
        return [ScaleGroup(f"{layer}.input_layernorm", (queries, up), queries)]
    first, second = ("input_layernorm", "post_attention_layernorm")
    if spec.parallel:
        first, second = ("ln_attn", "ln_mlp")
    return [
        ScaleGroup(f"{layer}.{first}", (queries,), queries),
        ScaleGroup(f"{layer}.{second}", (up,), up),
    ]
