"""What a search found: the highest load that meets the SLOs, and how sure that is.

The interval is that of the load at which measured / limit becomes 1: where the curves that go
through all levels within their noise (`slo_curve`) reach it, the middle 95 % of them. It is never
narrower than the bracket itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lmi_bench.analysis.results.uncertainty import central_interval
from lmi_bench.analysis.search.slo_search import SloSearch
from lmi_bench.analysis.search.slo_trials import Bracket, Trial, bracket, curve
from lmi_bench.core.level import Level
from lmi_bench.core.load import LoadAxis

Boundary = Literal["smooth", "cliff"]

BOUNDARY_CONFIDENCE = 0.95
_LOOK_BEYOND = math.log(2.0)
_CLIFF_JUMP, _CLIFF_GROWTH = 1.5, 8.0


@dataclass(frozen=True, slots=True)
class SloAnswer:
    """The content of slo.json.

    value         highest load that met every SLO; None where not even the least did
    low, high     95 % interval of the boundary; `high` is None where no load failed
    first_breach  lowest load that missed an SLO, None where none did
    binding       the SLO that is missed there, or is nearest to its limit
    boundary      `cliff`: a step of the load breaks the SLO by far, or makes requests fail
    """

    slo: tuple[str, ...]
    load: LoadAxis
    value: float | None
    low: float | None
    high: float | None
    first_breach: float | None
    binding: str | None
    boundary: Boundary | None
    endpoint_seconds: float

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> SloAnswer:
        """The value of slo.json's content."""
        return cls(**{**content, "slo": tuple(content["slo"])})

    def to_dict(self) -> dict[str, Any]:
        """The value as JSON holds it."""
        whole = self.load == "concurrency"
        return {
            "slo": list(self.slo),
            "load": self.load,
            "value": int(self.value) if whole and self.value is not None else self.value,
            "low": self.low,
            "high": self.high,
            "first_breach": (
                int(self.first_breach)
                if whole and self.first_breach is not None
                else self.first_breach
            ),
            "binding": self.binding,
            "boundary": self.boundary,
            "endpoint_seconds": self.endpoint_seconds,
        }


def slo_answer(search: SloSearch, levels: Sequence[Level], *, seed: int = 0) -> SloAnswer:
    """What the levels of a search say.

    endpoint_seconds  is the sum of the levels' wall times, warm-ups left out
    """
    trials = search.trials(levels)
    found = bracket(trials)
    low = high = None
    if found.high is not None and found.low is not None:
        low, high = boundary_interval(trials, seed=seed)
        low = min(low, search.surely_carried(found.low, levels))
        high = max(high, found.high.load)
    elif found.low is not None:
        low = search.surely_carried(found.low, levels)
    elif found.high is not None:
        low, high = 0.0, found.high.load
    at = found.high or found.low
    return SloAnswer(
        slo=tuple(str(slo) for slo in search.slos),
        load=search.axis,
        value=None if found.low is None else found.low.load,
        low=low,
        high=high,
        first_breach=None if found.high is None else found.high.load,
        binding=None if at is None else at.judgement.binding,
        boundary=_boundary(found),
        endpoint_seconds=math.fsum(line.wall_s or 0.0 for line in levels),
    )


def _boundary(found: Bracket) -> Boundary | None:
    if found.low is None or found.high is None:
        return None
    if not math.isfinite(found.high.ratio):
        return "cliff"
    jump = found.high.ratio / found.low.ratio
    growth = math.log(jump) / math.log(found.high.load / found.low.load)
    return "cliff" if jump > _CLIFF_JUMP and growth > _CLIFF_GROWTH else "smooth"


def boundary_interval(trials: Sequence[Trial], *, seed: int = 0) -> tuple[float, float]:
    """95 % interval of the load at which measured / limit becomes 1.

    It may reach below the lowest load tried (then 0) and beyond the highest, as far as was looked.
    """
    crossings = curve(trials).crossings(_LOOK_BEYOND, seed=seed)
    low, high = central_interval(crossings, BOUNDARY_CONFIDENCE)
    return math.exp(low), math.exp(min(high, trials[-1].log_load + _LOOK_BEYOND))
