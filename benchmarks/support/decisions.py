"""Judges decisions, not errors: was the limit kept, and what did the choice cost too much?

A planner sees predictions; the world has its own figures. Regret is the true cost of the choice
over that of the cheapest option that truly keeps the limit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lmi_bench.analysis.fit.uncertainty import Z80


@dataclass(frozen=True, slots=True)
class Option:
    """Something that can be bought, as predicted and as it is.

    log_sd  of the predicted latency's logarithm
    """

    name: str
    predicted_usd: float
    predicted_latency: float
    true_usd: float
    true_latency: float
    log_sd: float


@dataclass(frozen=True, slots=True)
class Decision:
    """What was chosen under a limit; regret is None where nothing keeps the limit or it is broken.

    tied  options that a prediction off by one standard deviation would make the choice
    """

    limit: float
    chosen: Option | None
    kept: bool
    regret: float | None
    tied: tuple[str, ...] = ()


def choose(options: Sequence[Option], limit: float) -> Option | None:
    """The cheapest that keeps the limit at its interval's upper end, else as predicted.

    The recommender's rule; None where no option is expected to keep it.
    """
    sure = [o for o in options if o.predicted_latency * math.exp(Z80 * o.log_sd) < limit]
    likely = [o for o in options if o.predicted_latency < limit]
    allowed = sure or likely
    return min(allowed, key=lambda option: option.predicted_usd) if allowed else None


def decide(options: Sequence[Option], limit: float) -> Decision:
    """Choose under a limit and judge the choice by the true figures."""
    chosen = choose(options, limit)
    if chosen is None:
        return Decision(limit, None, kept=False, regret=None)
    kept = chosen.true_latency < limit
    feasible = [option.true_usd for option in options if option.true_latency < limit]
    regret = chosen.true_usd / min(feasible) if kept else None
    return Decision(limit, chosen, kept, regret, _tied(options, chosen, limit))


def _tied(options: Sequence[Option], chosen: Option, limit: float) -> tuple[str, ...]:
    """What would be chosen if all times, or the chosen one's cost, were a deviation off."""
    spread = math.exp(chosen.log_sd)
    reach = chosen.predicted_usd * spread
    close = [o for o in options if o.predicted_usd <= reach and o.predicted_latency < limit]
    close += [o for o in (choose(options, limit / spread), choose(options, limit * spread)) if o]
    return tuple(dict.fromkeys(option.name for option in close if option is not chosen))
