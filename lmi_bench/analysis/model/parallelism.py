"""How one copy of a model is split beyond tensor parallelism, and what that costs.

The splits are in docs/planner_model.md (Layouts). With data-parallel attention tokens are sent to
the experts' devices and back instead of all-reduces:

    bytes a token and layer on a device's link = hidden * (1 + 2) * min(top-k, n) / n * (n - 1) / n

(FP8 there, 16 bits back, as in DeepEP: DeepSeek-AI 2024, arXiv:2412.19437, section 3.2.2). Idle
pipeline stages: Narayanan et al. 2021, arXiv:2104.04473, section 2.2.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from statistics import NormalDist
from typing import Any, Final

from lmi_bench.analysis.model.memory import embedding_params, expert_params, weight_format
from lmi_bench.core.errors import InputError
from lmi_bench.models.shape import ModelShape

NETWORK_BYTES_PER_S: Final = 50e9
"""A network interface of 400 Gbit/s for each device, as in today's GPU hosts."""
NETWORK_LATENCY_S: Final = 1.5e-5
_THERE_AND_BACK_BYTES: Final = 1 + 2
_MATRICES: Final = 3  # of a gated feed-forward


@dataclass(frozen=True, slots=True)
class Parallelism:
    """The split of one copy beyond its tensor-parallel degree n, the devices of a stage.

    expert_parallel      whole experts on each device; False: a slice of each expert
    attention_groups     groups with the attention of their own sequences; 1: all n share each
    pipeline             stages of n devices, with a share of the layers each
    hosts                machines that a copy spans
    network_bytes_per_s  of each device to other hosts, one way
    """

    expert_parallel: bool = False
    attention_groups: int = 1
    pipeline: int = 1
    hosts: int = 1
    network_bytes_per_s: float = NETWORK_BYTES_PER_S

    def __post_init__(self) -> None:
        for name in ("attention_groups", "pipeline", "hosts"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not self.network_bytes_per_s > 0:
            raise InputError(
                f"the network between hosts must have a rate, got {self.network_bytes_per_s:g}"
            )

    @property
    def stage_hosts(self) -> int:
        """Machines that a pipeline stage spans: stages take whole ones as far as they can."""
        return -(-self.hosts // self.pipeline)

    @property
    def label(self) -> str:
        """Such as `EP, DP attention x8, PP 2, 2 hosts`; empty for tensor parallelism alone."""
        parts = ["EP"] if self.expert_parallel else []
        if self.attention_groups > 1:
            parts.append(f"DP attention x{self.attention_groups}")
        if self.pipeline > 1:
            parts.append(f"PP {self.pipeline}")
        if self.hosts > 1:
            parts.append(f"{self.hosts} hosts")
        return ", ".join(parts)

    def to_json(self) -> dict[str, Any]:
        """As plans and profiles keep it; the network only of copies that span hosts."""
        content = asdict(self)
        if self.hosts == 1:
            del content["network_bytes_per_s"]
        return content


PLAIN: Final = Parallelism()


def parallelism_problem(
    shape: ModelShape, parallelism: Parallelism, tensor_parallel: int
) -> str | None:
    """Why a model cannot be split so; None if it can."""
    groups = parallelism.attention_groups
    if parallelism.expert_parallel and not shape.is_moe:
        return f"{shape.name} has no experts to spread over devices"
    if parallelism.expert_parallel and shape.experts % tensor_parallel:
        return f"{shape.experts} experts of {shape.name} do not divide over {tensor_parallel}"
    if groups > 1 and not shape.is_moe:
        return f"{shape.name} has no experts to share: use copies instead of DP attention"
    if tensor_parallel % groups:
        return f"{groups} attention groups do not divide {tensor_parallel} devices"
    if parallelism.pipeline > shape.num_layers:
        return f"{parallelism.pipeline} stages are more than the {shape.num_layers} layers"
    return None


def attention_params(shape: ModelShape) -> int:
    """Parameters of attention in all layers: what is left beside experts, MLP and embeddings.

    DeepSeek-V3: 11.4e9 (hand count: 187e6 a layer).
    """
    each = _MATRICES * shape.hidden_size * shape.expert_ffn_size
    moe_layers = round(expert_params(shape) / (shape.experts * each)) if shape.experts else 0
    others = moe_layers * shape.shared_experts * each
    dense_layers = shape.num_layers - moe_layers
    others += dense_layers * _MATRICES * shape.hidden_size * shape.ffn_size
    others += expert_params(shape) + embedding_params(shape) + shape.encoder_params
    return max(0, shape.params_total - others)


def repeated_params(shape: ModelShape, parallelism: Parallelism) -> int:
    """Parameters that a copy holds more than once: attention, in each further group."""
    return attention_params(shape) * (parallelism.attention_groups - 1)


def repeated_weight_bytes(
    shape: ModelShape, dtype: str, parallelism: Parallelism, tensor_parallel: int
) -> float:
    """Bytes of a device's weights beyond an even share: of `repeated_params`."""
    fmt = weight_format(dtype)
    bits = 16 if fmt.covers == "experts" else fmt.bits
    return repeated_params(shape, parallelism) / tensor_parallel * bits / 8


def busiest_rank_sd(ranks: int) -> float:
    """By how many standard deviations the largest of n equal shares exceeds the mean.

    Blom's expected largest of n normal values: 1.43 for 8 (exact 1.42), 2.08 for 32 (2.07).
    """
    if ranks < 2:
        return 0.0
    return NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))


@dataclass(frozen=True, slots=True)
class Collective:
    """Exchanges of a layer: seconds to start them all, and seconds for each row."""

    start_s: float
    row_s: float


def expert_exchange(
    shape: ModelShape,
    parallelism: Parallelism,
    ranks: int,
    *,
    link_bytes_per_s: float,
    latency_s: float,
) -> Collective:
    """Sending a layer's tokens to their experts and back, of a batch spread over the ranks."""
    reached = min(shape.experts_per_token, ranks) / ranks
    row_bytes = shape.hidden_size * _THERE_AND_BACK_BYTES * reached * (ranks - 1) / ranks
    away = 1 - 1 / parallelism.stage_hosts
    row_s = row_bytes * ((1 - away) / link_bytes_per_s + away / parallelism.network_bytes_per_s)
    start_s = latency_s if parallelism.stage_hosts == 1 else max(latency_s, NETWORK_LATENCY_S)
    return Collective(2 * start_s, row_s)


def across_hosts(parallelism: Parallelism, ranks: int) -> Collective:
    """What an all-reduce adds between hosts: start, and seconds for a byte of the reduced array.

    Each host reduces first, so a device sends 2 (h - 1) / h of its share of the array.
    """
    hosts = parallelism.stage_hosts
    if hosts == 1:
        return Collective(0.0, 0.0)
    share = 2 * (hosts - 1) / hosts / math.ceil(ranks / hosts)
    return Collective(NETWORK_LATENCY_S, share / parallelism.network_bytes_per_s)
