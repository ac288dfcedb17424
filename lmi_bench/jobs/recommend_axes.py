"""The engine's settings to choose from, as the flags of `recommend` name them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lmi_bench.analysis.model.engine_setting import EngineAxes
from lmi_bench.analysis.model.weights import weight_format
from lmi_bench.core.errors import InputError
from lmi_bench.jobs.planned import planned_speculation
from lmi_bench.jobs.settings.planning import DraftSettings


@dataclass(frozen=True, slots=True)
class AxisFlags:
    """Comma lists as they were given; None is what was left out."""

    dtype: str | None = None
    kv_dtype: str | None = None
    draft: str | None = None
    draft_tokens: int | None = None
    draft_acceptance: str | None = None
    max_batch: str | None = None
    prefill_tokens: str | None = None
    chunked: str | None = None
    memory_share: str | None = None
    graphs: str | None = None
    replicas: str | None = None

    @property
    def first_dtype(self) -> str | None:
        """The format that the others are compared with; None where none is given."""
        names = _listed("--dtype", self.dtype, str)
        return weight_format(names[0]).name if names else None

    def axes(self) -> EngineAxes:
        """The values of each axis; raises InputError for one that cannot be read."""
        return EngineAxes(
            dtypes=_listed("--dtype", self.dtype, str),
            kv_dtypes=_listed("--kv-dtype", self.kv_dtype, str),
            speculation=planned_speculation(
                DraftSettings(self.draft, self.draft_tokens, self.draft_acceptance)
            ),
            max_batch_sizes=_listed("--max-batch", self.max_batch, int),
            max_prefill_tokens=_listed("--prefill-tokens", self.prefill_tokens, int),
            chunked_prefill=_listed("--chunked", self.chunked, _on_off),
            memory_shares=_listed("--memory-share", self.memory_share, float),
            cuda_graphs=_listed("--graphs", self.graphs, _on_off),
            copies=_listed("--replicas", self.replicas, int),
        )


def _listed(flag: str, text: str | None, read: Callable[[str], Any]) -> tuple[Any, ...]:
    """The values between commas."""
    if text is None:
        return ()
    try:
        return tuple(read(part.strip()) for part in text.split(","))
    except ValueError:
        kind = {int: "whole numbers", float: "numbers", _on_off: "on, off or both"}.get(read)
        raise InputError(f"{flag} {text}: write {kind or 'names'} between commas") from None


def _on_off(word: str) -> bool:
    if word.lower() not in ("on", "off"):
        raise ValueError(word)
    return word.lower() == "on"
