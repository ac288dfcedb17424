"""The set-up of one copy: a model in its number formats on a machine, and how it is split.

The splits are in docs/planner_model.md (Layouts). With data-parallel attention tokens are sent to
the experts' devices and back instead of all-reduces:

    bytes a token and layer on a device's link = hidden * (1 + 2) * min(top-k, n) / n * (n - 1) / n

(FP8 there, 16 bits back, as in DeepEP: DeepSeek-AI 2024, arXiv:2412.19437, section 3.2.2). Idle
pipeline stages: Narayanan et al. 2021, arXiv:2104.04473, section 2.2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from statistics import NormalDist
from typing import Any, Final

from lmi_bench.analysis.model import memory
from lmi_bench.catalog.instances import Instance
from lmi_bench.catalog.models import all_model_entries, find_model
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
            raise InputError(f"the network between hosts must have a rate, got {self.network_bytes_per_s:g}")

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


def network_bytes_per_s(machine: Instance, hosts: int = 2) -> float:
    """Of each device to other hosts, one way: 400 Gbit/s if its machine's is unknown or unused."""
    if hosts == 1 or machine.network_bits_per_s is None:
        return NETWORK_BYTES_PER_S
    return machine.network_bits_per_s / 8 / machine.num_accelerators


def pools_bytes_per_s(machine: Instance, devices: float = math.inf) -> float:
    """Of each device to another pool, with so many devices in both: the link of one machine that
    holds them (a shared bridge's share), else the network."""
    rate = machine.link.bytes_per_s
    if rate is None or devices > machine.num_accelerators:
        return network_bytes_per_s(machine)
    return rate / machine.num_accelerators if machine.link.is_shared else rate


def attention_params(shape: ModelShape) -> int:
    """Parameters of attention in all layers: what is left beside experts, MLP and embeddings.

    DeepSeek-V3: 11.4e9 (hand count: 187e6 a layer).
    """
    each = _MATRICES * shape.hidden_size * shape.expert_ffn_size
    moe_layers = round(memory.expert_params(shape) / (shape.experts * each)) if shape.experts else 0
    others = moe_layers * shape.shared_experts * each
    dense_layers = shape.num_layers - moe_layers
    others += dense_layers * _MATRICES * shape.hidden_size * shape.ffn_size
    others += memory.expert_params(shape) + memory.embedding_params(shape) + shape.encoder_params
    return max(0, shape.params_total - others)


def busiest_rank_sd(ranks: int) -> float:
    """By how many standard deviations the largest of n equal shares exceeds the mean.

    Blom's expected largest of n normal values: 0 for 1, 1.43 for 8 (exact 1.42), 2.08 for 32.
    """
    return NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))


def expert_exchange(setup: Setup, *, link_bytes_per_s: float, latency_s: float) -> tuple[float, float]:
    """Seconds to start sending a layer's tokens to their experts and back, and seconds for each
    row of a batch spread over the ranks."""
    shape, parallelism, ranks = setup.shape, setup.parallelism, setup.tensor_parallel
    reached = min(shape.experts_per_token, ranks) / ranks
    row_bytes = shape.hidden_size * _THERE_AND_BACK_BYTES * reached * (ranks - 1) / ranks
    away = 1 - 1 / parallelism.stage_hosts
    row_s = row_bytes * ((1 - away) / link_bytes_per_s + away / parallelism.network_bytes_per_s)
    start_s = latency_s if parallelism.stage_hosts == 1 else max(latency_s, NETWORK_LATENCY_S)
    return 2 * start_s, row_s


def across_hosts(setup: Setup) -> tuple[float, float]:
    """What an all-reduce adds between hosts: start, and seconds for a byte of the reduced array.

    Each host reduces first, so a device sends 2 (h - 1) / h of its share of the array.
    """
    hosts = setup.parallelism.stage_hosts
    if hosts == 1:
        return 0.0, 0.0
    share = 2 * (hosts - 1) / hosts / math.ceil(setup.tensor_parallel / hosts)
    return NETWORK_LATENCY_S, share / setup.parallelism.network_bytes_per_s


ACCEPTANCE: Final = 0.65
"""Acceptance of a token that the model's own layer drafts, where nobody measured it: DeepSeek-AI
reports 85 to 90 % of the second tokens (arXiv:2412.19437, section 5.4.3); later ones are guessed
from its own guesses."""
OWN_LAYER: Final = "mtp"
"""Name of the draft that is part of the model, as in DeepSeek-V3 and GLM-4.5."""


@dataclass(frozen=True, slots=True)
class Speculation:
    """The drafter, its number of tokens, and how often they are accepted.

    draft_tokens  drafted in a step (k)
    acceptance    probability a that a drafted token is accepted if those before it were
    draft         the smaller model; None: n-gram lookup, at no cost on the device
    own           the model's own layer for the next tokens drafts (MTP), used again for each
    """

    draft_tokens: int
    acceptance: float
    draft: ModelShape | None = None
    own: bool = False

    def __post_init__(self) -> None:
        if self.draft_tokens < 1:
            raise InputError(f"drafted tokens must be at least 1, got {self.draft_tokens}")
        if self.own and self.draft is not None:
            raise InputError(f"either {self.draft.name} drafts or the model's own layer, not both")
        if not 0 <= self.acceptance <= 1:
            raise InputError(f"draft acceptance must be from 0 to 1, got {self.acceptance:g}")

    @property
    def tokens_per_step(self) -> float:
        """Mean tokens of a step for each sequence, 1 to k + 1; k = 4, a = 0.8: 3.36."""
        if self.acceptance == 1:
            return self.draft_tokens + 1.0
        return float((1 - self.acceptance ** (self.draft_tokens + 1)) / (1 - self.acceptance))

    @property
    def draft_name(self) -> str:
        """What drafts, for display: a model, `ngram` or `mtp`."""
        if self.own:
            return OWN_LAYER
        return "ngram" if self.draft is None else self.draft.name

    def to_json(self) -> dict[str, Any]:
        return {
            "draft": OWN_LAYER if self.own else None if self.draft is None else self.draft.name,
            "draft_tokens": self.draft_tokens,
            "draft_acceptance": self.acceptance,
            "tokens_per_step": self.tokens_per_step,
        }

    @classmethod
    def by_own_layer(cls, shape: ModelShape, draft_tokens: int, acceptance: float = ACCEPTANCE) -> Speculation:
        """Drafts by the model's own layer; raises InputError for a model without one."""
        if not shape.mtp_layers:
            names = [each.shape.name for each in all_model_entries() if each.shape.mtp_layers]
            raise InputError(
                f"--draft {OWN_LAYER}: {shape.name} has no layer of its own that drafts (MTP); "
                f"use --draft ngram, a smaller model, or one of {', '.join(names)}"
            )
        return cls(draft_tokens, acceptance, own=True)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Speculation:
        """Inverse of `to_json`; raises InputError for an unknown draft, KeyError or TypeError."""
        named = content["draft"]
        draft = None if named in (None, OWN_LAYER) else find_model(named)
        tokens, acceptance = content["draft_tokens"], content["draft_acceptance"]
        if type(tokens) is not int or type(acceptance) not in (int, float):
            raise TypeError(f"draft_tokens is {tokens!r}, draft_acceptance is {acceptance!r}")
        return cls(tokens, acceptance, draft, own=named == OWN_LAYER)


def next_token_layer(shape: ModelShape) -> ModelShape:
    """The model's layer for later tokens as a model of one layer, with the model's own head.

    It has the parameters that are known of it, else a layer's share, and joins two vectors of the
    hidden size (DeepSeek-AI 2024, arXiv:2412.19437, section 2.2).
    """
    joins = 2 * shape.hidden_size**2
    tables = memory.embedding_params(shape)
    per_layer = (shape.params_total - tables) // shape.num_layers
    if shape.mtp_params:
        per_layer = shape.mtp_params // shape.mtp_layers
    active = min(per_layer, (shape.params_active - tables) // shape.num_layers) + joins
    per_layer += joins
    return replace(
        shape,
        name=f"{shape.name} (next tokens)",
        num_layers=1,
        full_attention_layers=None,
        cacheless_layers=0,
        state_bytes=0,
        sparse_layers=min(1, shape.sparse_layers),
        encoder_params=0,
        params_total=per_layer + tables,
        params_active=active + tables,
    )


@dataclass(frozen=True, slots=True)
class Setup:
    """One copy of a model, without its engine.

    tensor_parallel  devices that the copy, or each of its pipeline stages, is split over
    dtype, kv_dtype  formats of weights and cache; cache None: 32 bits with 32-bit weights, else 16
    speculation      speculation of the engine; None: one token a step
    parallelism      how it is split beyond that degree
    host_copies      copies on the host, this one included: they share its processor
    """

    shape: ModelShape
    instance: Instance
    tensor_parallel: int
    dtype: str
    kv_dtype: str | None = None
    speculation: Speculation | None = None
    parallelism: Parallelism = PLAIN
    host_copies: int = 1

    def beside(self, copies: int) -> Setup:
        """The copy as one of so many; a machine holds as many as its devices allow."""
        held = max(1, self.instance.num_accelerators // self.devices)
        return replace(self, host_copies=min(copies, held))

    def prefill_worker(self, degree: int) -> Setup:
        """A worker of that degree which computes the prompts of this copy's requests."""
        groups = degree if self.parallelism.attention_groups > 1 else 1
        parallelism = replace(self.parallelism, attention_groups=groups)
        return replace(self, tensor_parallel=degree, parallelism=parallelism, speculation=None)

    @property
    def devices(self) -> int:
        """Devices of the copy, on all its hosts."""
        return self.tensor_parallel * self.parallelism.pipeline

    @property
    def attention_degree(self) -> int:
        """Devices that share the attention of a sequence."""
        return self.tensor_parallel // self.parallelism.attention_groups

    @property
    def split_problem(self) -> str | None:
        """Why the model cannot be split so; None if it can."""
        shape, split, ranks = self.shape, self.parallelism, self.tensor_parallel
        groups = split.attention_groups
        if split.expert_parallel and not shape.is_moe:
            return f"{shape.name} has no experts to spread over devices"
        if split.expert_parallel and shape.experts % ranks:
            return f"{shape.experts} experts of {shape.name} do not divide over {ranks}"
        if groups > 1 and not shape.is_moe:
            return f"{shape.name} has no experts to share: use copies instead of DP attention"
        if ranks % groups:
            return f"{groups} attention groups do not divide {ranks} devices"
        width, block = shape.expert_ffn_size or shape.ffn_size, shape.weight_block
        is_cut = block and ranks > 1 and not split.expert_parallel and width % (ranks * block)
        if is_cut and memory.weight_format(self.dtype).name.endswith("float8"):  # as vLLM and SGLang refuse it
            return (
                f"an MLP of {width:,} / TP {ranks} = {width / ranks:g} would cut the blocks of {block} that FP8 "
                f"weights of {shape.name} are stored in: use expert parallelism or another TP"
            )
        if split.pipeline > shape.num_layers:
            return f"{split.pipeline} stages are more than the {shape.num_layers} layers"
        return None

    @property
    def repeated_params(self) -> int:
        """Parameters that the copy holds more than once: attention, in each further group."""
        return attention_params(self.shape) * (self.parallelism.attention_groups - 1)

    @property
    def repeated_weight_bytes(self) -> float:
        """Bytes of a device's weights beyond an even share: of `repeated_params`."""
        fmt = memory.weight_format(self.dtype)
        bits = fmt.rest_bits if fmt.covers == "experts" else fmt.bits
        return self.repeated_params / self.tensor_parallel * bits / 8

    def sequence_bytes(self, tokens: float, devices: int) -> float:
        """Bytes of a sequence's cache on each of so many devices with its attention, of all
        stages."""
        value_bytes = memory.kv_bytes_per_value(self.dtype, self.kv_dtype)
        return memory.kv_bytes_per_sequence(self.shape, tokens, bytes_per_value=value_bytes, tensor_parallel=devices)

    @property
    def draft(self) -> ModelShape | None:
        """What drafts: the smaller model, or the model's own layer for the next tokens."""
        if self.speculation is None:
            return None
        return next_token_layer(self.shape) if self.speculation.own else self.speculation.draft


ROUTED_S: Final = 0.1
"""Least time outside the engines of a request that goes through a router and two servers: on
MI355X and B200 1,024 tokens take 0.15 to 0.2 s to the first token, of which 0.07 are computed."""


@dataclass(frozen=True, slots=True)
class PrefillPool:
    """Workers that only compute prompts; their caches move to the workers that decode.

    setup             of one worker
    link_bytes_per_s  rate at which the cache of one prompt moves, over the link of one device
    """

    setup: Setup
    workers: int
    link_bytes_per_s: float = NETWORK_BYTES_PER_S

    def __post_init__(self) -> None:
        if self.workers < 1 or not self.link_bytes_per_s > 0:
            raise InputError(
                f"a prefill pool of {self.workers} workers with a link of "
                f"{self.link_bytes_per_s:g} B/s: both must be above 0"
            )

    def transfer_s(self, prompt_tokens: float) -> float:
        """Seconds in which the cache of a prompt moves: every head and layer once."""
        return self.setup.sequence_bytes(prompt_tokens, 1) / self.link_bytes_per_s
