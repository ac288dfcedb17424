"""The sections of a scenario file: each checks itself, `scenario` checks them together."""

from __future__ import annotations

import re
from collections.abc import Callable

from pydantic import BaseModel, ConfigDict, field_validator, model_validator

from lmi_bench.core import scenario_fields as fields
from lmi_bench.core.engine_fields import BatchingFields, ModelFields
from lmi_bench.core.errors import InputError
from lmi_bench.core.lengths import parse_lengths, parse_seconds
from lmi_bench.core.sessions import parse_agents

DEFAULT_CONCURRENCY = (1, 2, 4, 8, 16, 32)


def _as_list(value: object) -> object:
    """One level may be written without brackets."""
    return [value] if isinstance(value, int | float) and not isinstance(value, bool) else value


def _as_text(value: object) -> object:
    """A number is a distribution with this one value."""
    if isinstance(value, int):
        return str(value)
    return f"{value:.15g}" if isinstance(value, float) else value


def _levels_or_auto(value: object) -> object:
    """Levels as a list, or the word auto."""
    if isinstance(value, str) and value != "auto":
        raise ValueError("write levels such as [1, 2, 4], or auto")
    return _as_list(value)


def _connections(value: object) -> object:
    """The use of connections, or their number; one message for both kinds of mistake."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return value
    if value in ("reuse", "per-request"):
        return value
    raise ValueError("write reuse, per-request or a number of connections, at least 1")


def raise_value_error(parse: Callable[[str], object], text: str) -> None:
    """Check a text with its parser; pydantic gathers ValueErrors only."""
    try:
        parse(text)
    except InputError as exc:
        raise ValueError(str(exc)) from exc


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)


class LengthShare(Section):
    """One kind of request of a mixed workload; lengths in tokens, `share` relative to the rest."""

    input_tokens: fields.PositiveInt
    output_tokens: fields.PositiveInt
    share: fields.Positive = 1.0


class WorkloadSection(Section, fields.SessionFields, fields.WorkloadFields):
    """The requests: one by one, or turns of conversations."""

    mix: tuple[LengthShare, ...] = ()

    _texts = field_validator("turns", "think_s", mode="before")(_as_text)

    @model_validator(mode="after")
    def _one_source(self) -> WorkloadSection:
        sources = ("mix", "dataset", "trace", "conversations", "agents", "agent_trace")
        named = [name for name in sources if getattr(self, name) not in (None, ())]
        if self.input_lengths is not None or self.output_lengths is not None:
            named.append("input_lengths or output_lengths")
        if len(named) > 1:
            raise ValueError(f"give either {' or '.join(named)}, not both")
        for text in (self.input_lengths, self.output_lengths):
            if text is not None:
                raise_value_error(parse_lengths, text)
        shortest = min((kind.input_tokens for kind in self.mix), default=self.input_tokens)
        if self.input_lengths is not None:
            shortest = round(parse_lengths(self.input_lengths).mean)
        if self.documents is not None:
            self._check_documents(shortest)
        if self.shared_prefix >= shortest and self.trace is None and self.turns is None:
            raise ValueError(
                f"a shared prefix of {self.shared_prefix} tokens does not fit a prompt of "
                f"{shortest}: input_tokens counts both, so give for example "
                f"{self.shared_prefix + shortest}"
            )
        return self

    def _check_documents(self, shortest: int) -> None:
        if self.dataset or self.trace or self.has_sessions:
            raise ValueError("documents are a part of generated single prompts")
        if (found := self.corpus) is None:
            raise ValueError(f"documents {self.documents!r}: write COUNTxTOKENS, such as 1000x1500")
        if self.shared_prefix + found[1] >= shortest:
            raise ValueError(
                f"a shared prefix of {self.shared_prefix} tokens and a document of {found[1]} do "
                f"not fit a prompt of {shortest}: input_tokens counts both and the question"
            )

    @property
    def corpus(self) -> tuple[int, int] | None:
        """Number of documents and their tokens; None without, or if they cannot be read."""
        found = re.fullmatch(r"([1-9]\d{0,6})x([1-9]\d{0,6})", self.documents or "")
        return None if found is None else (int(found[1]), int(found[2]))

    @model_validator(mode="after")
    def _whole_conversations(self) -> WorkloadSection:
        if self.turns is not None:
            try:
                parse_lengths(self.turns)
            except InputError:
                raise ValueError(
                    f"turns {self.turns!r} are not understood; write a number of at least 1, or a "
                    "distribution such as uniform(2,6)"
                ) from None
            alone = ("mix", "dataset", "trace", "conversations", "agents", "agent_trace")
            if any(getattr(self, name) for name in alone):
                raise ValueError(f"turns makes its own conversations; leave out {', '.join(alone)}")
        if self.agents is not None:
            raise_value_error(parse_agents, self.agents)
        if self.idle_cap_s is not None and self.agent_trace is None:
            raise ValueError("idle_cap_s shortens recorded gaps; give agent_trace")
        if self.begins_within and not self.has_agents:
            raise ValueError("begins_within is for sessions; give agents or agent_trace")
        if self.think_s is not None:
            raise_value_error(parse_seconds, self.think_s)
            if not self.has_sessions or self.has_agents:
                raise ValueError("think_s is a pause between turns; give turns or conversations")
        if self.shared_prefix and (self.dataset or self.conversations or self.has_agents):
            raise ValueError("shared_prefix is for generated prompts, not for recorded text")
        return self

    @property
    def begins_alike(self) -> bool:
        """Whether prompts share their beginnings by design, so that a prefix cache can help."""
        parts = self.shared_prefix or self.documents or self.trace
        return self.has_sessions or bool(parts)

    @property
    def has_sessions(self) -> bool:
        """Whether requests are turns of conversations, or belong to an agent's session."""
        return self.turns is not None or self.conversations is not None or self.has_agents

    @property
    def has_agents(self) -> bool:
        """Whether requests are those of agents' sessions."""
        return self.agents is not None or self.agent_trace is not None


class LoadSection(Section, fields.SessionLoadFields, fields.LoadFields):
    """The load, of single requests or of conversations."""

    _levels = field_validator("concurrency", mode="before")(_levels_or_auto)
    _rates = field_validator("rate_per_s", "speed", mode="before")(_as_list)

    @model_validator(mode="after")
    def _one_kind_of_load(self) -> LoadSection:
        if self.concurrency is not None and self.rate_per_s is not None:
            raise ValueError("give either concurrency or rate_per_s, not both")
        for name in ("concurrency", "rate_per_s"):
            if getattr(self, name) == ():
                raise ValueError(f"{name} has no level; write for example [1, 2, 4]")
        if self.search is not None:
            self._check_search(self.search)
        if self.max_sessions is not None and self.rate_per_s is None:
            raise ValueError("max_sessions needs a rate; with concurrency that is the sessions")
        if self.is_adaptive and (self.repeat > 1 or self.until or self.stop_when):
            raise ValueError("repeat, until, stop_when need listed levels, not auto or a search")
        if self.repeat_unsteady and (self.repeat > 1 or self.until or self.search):
            raise ValueError("repeat_unsteady: leave it out beside repeat, until and search")
        return self

    def _check_search(self, over: str) -> None:
        start = self.concurrency if over == "concurrency" else self.rate_per_s
        other = self.rate_per_s if over == "concurrency" else self.concurrency
        if other is not None:
            raise ValueError(f"search over {over} picks its own levels; leave the others out")
        if isinstance(start, tuple) and len(start) > 1:
            raise ValueError(f"search over {over} takes one value to start from, got {len(start)}")

    @property
    def is_adaptive(self) -> bool:
        """Whether a rule picks the levels from those before."""
        return self.search is not None or self.concurrency == "auto"

    @property
    def concurrency_levels(self) -> tuple[int, ...]:
        """Levels of the closed loop; empty if the load is a rate or chosen during the sweep."""
        if self.rate_per_s is not None or self.search is not None or self.concurrency == "auto":
            return ()
        return DEFAULT_CONCURRENCY if self.concurrency is None else self.concurrency


class EngineSection(Section, BatchingFields, ModelFields):
    """Settings of the bundled and of the simulated engine; an endpoint keeps its own."""


class SageMakerSection(Section, fields.SageMakerFields):
    """The part of a SageMaker endpoint."""


class ClientSection(Section, fields.ClientFields):
    """How the load generator sends and takes its times."""

    _uses = field_validator("connections", mode="before")(_connections)

    @field_validator("session_header")
    @classmethod
    def _is_a_name(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"[A-Za-z0-9_-]+", value):
            raise ValueError("write a header's name, such as X-Session-ID")
        return value
