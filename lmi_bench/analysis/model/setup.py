"""The set-up of one copy: a model in its number formats on devices of a machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lmi_bench.catalog.instances import Instance
from lmi_bench.catalog.models import find_model
from lmi_bench.core.errors import InputError
from lmi_bench.models.shape import ModelShape


@dataclass(frozen=True, slots=True)
class Speculation:
    """The drafter, its number of tokens, and how often they are accepted.

    draft_tokens  drafted in a step (k)
    acceptance    probability a that a drafted token is accepted if those before it were
    draft         the smaller model; None: n-gram lookup, at no cost on the device
    """

    draft_tokens: int
    acceptance: float
    draft: ModelShape | None = None

    def __post_init__(self) -> None:
        if self.draft_tokens < 1:
            raise InputError(f"drafted tokens must be at least 1, got {self.draft_tokens}")
        if not 0 <= self.acceptance <= 1:
            raise InputError(f"draft acceptance must be from 0 to 1, got {self.acceptance:g}")

    @property
    def tokens_per_step(self) -> float:
        """Mean tokens of a step for each sequence, 1 to k + 1; k = 4, a = 0.8: 3.36."""
        if self.acceptance == 1:
            return self.draft_tokens + 1.0
        return float((1 - self.acceptance ** (self.draft_tokens + 1)) / (1 - self.acceptance))

    def to_json(self) -> dict[str, Any]:
        return {
            "draft": None if self.draft is None else self.draft.name,
            "draft_tokens": self.draft_tokens,
            "draft_acceptance": self.acceptance,
            "tokens_per_step": self.tokens_per_step,
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Speculation:
        """Inverse of `to_json`; raises InputError for an unknown draft, KeyError or TypeError."""
        draft = None if content["draft"] is None else find_model(content["draft"])
        tokens, acceptance = content["draft_tokens"], content["draft_acceptance"]
        if type(tokens) is not int or type(acceptance) not in (int, float):
            raise TypeError(f"draft_tokens is {tokens!r}, draft_acceptance is {acceptance!r}")
        return cls(tokens, acceptance, draft)


@dataclass(frozen=True, slots=True)
class Setup:
    """One copy of a model, without its engine.

    tensor_parallel  devices that the copy is split over
    dtype, kv_dtype  formats of weights and cache; cache None: 32 bits with 32-bit weights, else 16
    speculation      speculation of the engine; None: one token a step
    """

    shape: ModelShape
    instance: Instance
    tensor_parallel: int
    dtype: str
    kv_dtype: str | None = None
    speculation: Speculation | None = None
