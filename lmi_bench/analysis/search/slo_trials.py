"""The loads that a search tried, and what they show together about where the SLOs break.

Latency does not fall with load, so a level is judged with its neighbours: where a higher load was
faster than a lower one, the two are pooled (isotonic regression, weighted by certainty). The
lowest load that then misses is the first breach.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np

from lmi_bench.analysis.search.slo_curve import SloCurve
from lmi_bench.core.level import Judgement, Level

_MOST_LOG_RATIO, _LEAST_LOG_RATIO = math.log(10.0), -6.0  # of infinite and zero latency
_SURE_DEVIATIONS = 2.33  # a normal exceeds them with SURE_CHANCE
_UNKNOWN_NOISE = 0.5  # times 1 / sqrt(requests), of a level without its own


@dataclass(frozen=True, slots=True)
class Trial:
    """A load that was tried.

    log_ratio  log of measured / limit, clipped for the curve
    noise      standard deviation of log_ratio, estimated from its own requests
    requests   number of requests that the level sent and that count
    full       whether it had as many requests as a verdict needs
    """

    load: float
    judgement: Judgement
    log_ratio: float
    noise: float
    requests: int
    full: bool

    @property
    def log_load(self) -> float:
        """Natural logarithm of the load."""
        return math.log(self.load)

    @property
    def ratio(self) -> float:
        """Largest of measured / limit."""
        return self.judgement.ratio


@dataclass(frozen=True, slots=True)
class Bracket:
    """Highest load that passed and lowest that missed; None where there is none yet."""

    low: Trial | None
    high: Trial | None


def trial(line: Level, full_requests: int | None) -> Trial:
    """The trial of a finished level's line; `full_requests` None where a duration ends levels."""
    judgement = line.search
    assert judgement is not None  # a search judges each of its levels
    ratio = max(judgement.ratio, math.exp(_LEAST_LOG_RATIO))
    requests = line.counted or judgement.planned or 1
    planned = judgement.planned
    log_ratio = _MOST_LOG_RATIO if ratio == math.inf else min(_MOST_LOG_RATIO, math.log(ratio))
    noise = judgement.noise
    if noise is None:
        noise = _UNKNOWN_NOISE / math.sqrt(requests)
    if judgement.sure and log_ratio > 0:  # next to a jump the value is uncertain, the miss is not
        noise = min(noise, log_ratio / _SURE_DEVIATIONS)
    return Trial(
        load=line.load.value,
        judgement=judgement,
        log_ratio=log_ratio,
        noise=noise,
        requests=requests,
        full=full_requests is None or planned is None or planned >= full_requests,
    )


def by_load(tried: Sequence[Trial]) -> list[Trial]:
    """One trial a load, increasing: full levels replace probes, later levels replace earlier ones.

    A level's noise is at least that of the median level of the search with as many requests: few
    requests may agree by chance.
    """
    kept: dict[float, Trial] = {}
    for one in tried:
        known = kept.get(one.load)
        if known is None or one.full or not known.full:
            kept[one.load] = one
    trials = [kept[load] for load in sorted(kept)]
    usual = median([one.noise * math.sqrt(one.requests) for one in trials]) if trials else 0.0
    return [replace(one, noise=max(one.noise, usual / math.sqrt(one.requests))) for one in trials]


def bracket(trials: Sequence[Trial]) -> Bracket:
    """Lowest load that misses, judged with its neighbours, and the highest load below it."""
    if not trials:
        return Bracket(None, None)
    from scipy.optimize import isotonic_regression  # 0.2 s to load

    pooled = isotonic_regression(
        [one.log_ratio for one in trials], weights=[1 / max(one.noise, 1e-6) ** 2 for one in trials]
    )
    passing = int(np.searchsorted(pooled.x, 0.0, side="right"))
    low = trials[passing - 1] if passing else None
    return Bracket(low, trials[passing] if passing < len(trials) else None)


def curve(trials: Sequence[Trial]) -> SloCurve:
    """Latency over load by all trials."""
    return SloCurve(
        np.array([one.log_load for one in trials]),
        np.array([one.log_ratio for one in trials]),
        np.array([one.noise for one in trials]),
    )
