"""Results of a finished sweep: its knees (knees.json) and a search's answer (slo.json)."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Self

from lmi_bench.core.json_value import JsonValue


@dataclass(frozen=True, slots=True)
class Knee(JsonValue):
    """The knee of a sweep by one rule; without a load if the rule finds none.

    axis       `concurrency` or `rate_per_s` (req/s)
    low, high  interval of the knee, on its axis; `high` None: at or above the highest level
    cause      the limit beyond it; change: the one change that moves it
    why        reasoning of the rule, with the numbers
    """

    rule: str
    axis: str = "concurrency"
    concurrency: float | None = None
    rate_per_s: float | None = None
    low: float | None = None
    high: float | None = None
    cause: str = "unknown"
    change: str = ""
    recommended: bool = False
    why: str = ""

    @property
    def load(self) -> float | None:
        """The knee on its axis."""
        value = self.concurrency if self.axis == "concurrency" else self.rate_per_s
        return None if value is None else float(value)

    def at(self, load: float, low: float, high: float | None) -> Self:
        """The knee at a load of its axis, with its interval."""
        by_users = self.axis == "concurrency"
        return replace(
            self,
            concurrency=whole(load) if by_users else None,
            rate_per_s=None if by_users else whole(load),
            low=whole(low),
            high=None if high is None else whole(high),
        )


def recommended_knee(knees: Iterable[Knee]) -> Knee | None:
    """The knee that a sweep recommends; None if it recommends none."""
    return next((knee for knee in knees if knee.recommended), None)


@dataclass(frozen=True, slots=True)
class SloAnswer(JsonValue):
    """The highest load that meets the SLOs, from a search.

    load          axis of the loads: `concurrency` or `rate_per_s`
    value         highest load that met every SLO; None: not even the lowest load did
    low, high     95 % interval of the boundary; `high` None: no load failed
    first_breach  lowest load that missed an SLO; None: no load did
    binding       the SLO that is missed there, or is nearest to its limit
    boundary      `cliff`: one step of the load misses the SLO by far, or requests fail;
                  else `smooth`
    """

    slo: Sequence[str]
    load: str
    value: float | None
    low: float | None
    high: float | None
    first_breach: float | None
    binding: str | None
    boundary: str | None
    endpoint_seconds: float


def whole(value: float) -> float:
    """The value as an int if it is a whole number, as loads are written."""
    return int(value) if value == int(value) else value
