"""The set-up of one copy: a model in its number formats on devices of a machine."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from lmi_bench.analysis.model.memory import (
    embedding_params,
    kv_bytes_per_sequence,
    kv_bytes_per_value,
)
from lmi_bench.analysis.model.parallelism import NETWORK_BYTES_PER_S, PLAIN, Parallelism
from lmi_bench.catalog.instances import Instance
from lmi_bench.catalog.models import find_model
from lmi_bench.core.errors import InputError
from lmi_bench.models.shape import ModelShape

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
    def from_json(cls, content: Mapping[str, Any]) -> "Speculation":
        """Inverse of `to_json`; raises InputError for an unknown draft, KeyError or TypeError."""
        named = content["draft"]
        draft = None if named in (None, OWN_LAYER) else find_model(named)
        tokens, acceptance = content["draft_tokens"], content["draft_acceptance"]
        if type(tokens) is not int or type(acceptance) not in (int, float):
            raise TypeError(f"draft_tokens is {tokens!r}, draft_acceptance is {acceptance!r}")
        return cls(tokens, acceptance, draft, own=named == OWN_LAYER)


def next_token_layer(shape: ModelShape) -> ModelShape:
    """The model's layer for later tokens as a model of one layer, with the model's own head.

    It has a layer's share of the parameters and joins two vectors of the hidden size (DeepSeek-AI
    2024, arXiv:2412.19437, section 2.2).
    """
    joins = 2 * shape.hidden_size**2
    tables = embedding_params(shape)
    per_layer = (shape.params_total - tables) // shape.num_layers + joins
    active = (shape.params_active - tables) // shape.num_layers + joins
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

    def beside(self, copies: int) -> "Setup":
        """The copy as one of so many; a machine holds as many as its devices allow."""
        held = max(1, self.instance.num_accelerators // self.devices)
        return replace(self, host_copies=min(copies, held))

    @property
    def devices(self) -> int:
        """Devices of the copy, on all its hosts."""
        return self.tensor_parallel * self.parallelism.pipeline

    @property
    def attention_degree(self) -> int:
        """Devices that share the attention of a sequence."""
        return self.tensor_parallel // self.parallelism.attention_groups

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
    link_bytes_per_s  rate at which the cache of one prompt moves
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
        setup = self.setup
        moved = kv_bytes_per_sequence(
            setup.shape,
            prompt_tokens,
            bytes_per_value=kv_bytes_per_value(setup.dtype, setup.kv_dtype),
        )
        return moved / self.link_bytes_per_s
