"""What a search found: the highest load that meets the SLOs, and how sure that is.

The interval is that of the load at which measured / limit becomes 1. Requests of every level are
resampled; through each draw goes a rising curve (isotonic regression of log ratio over log load,
weighted by requests), and the middle share of the crossings is the interval, never narrower than
the bracket itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lmi_bench.analysis.level_sizes import LoadAxis
from lmi_bench.analysis.slo_search import SEARCH_KEY, SloSearch, bracket
from lmi_bench.analysis.slo_values import request_values_ms, statistic_ms
from lmi_bench.analysis.uncertainty import central_interval
from lmi_bench.records import RequestRecord
from lmi_bench.slo import Slo

Boundary = Literal["smooth", "cliff"]
FloatArray = NDArray[np.float64]
Records = Sequence[RequestRecord]

BOUNDARY_CONFIDENCE = 0.95
_RESAMPLES = 400
_ENDLESS_RATIO = 10.0  # stands for an infinite ratio in a curve through logarithms
# The search stops where the noise happens to close its bracket, which a bootstrap of the levels it
# chose cannot see: on made-up servers of known knees the plain interval held 87 % of them.
_WIDENING = 2**0.5
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


def slo_answer(
    search: SloSearch,
    levels: Sequence[Mapping[str, Any]],
    records: Sequence[Records],
    *,
    seed: int = 0,
) -> SloAnswer:
    """What the levels of a search say; `records` holds one sequence a level.

    endpoint_seconds  is the sum of the levels' wall times, warm-ups left out
    """
    trials = search.trials(levels)
    found = bracket(trials)
    low = high = None
    if found.high is not None and found.low is not None:
        low, high = boundary_interval(search, levels, records, seed=seed)
        low, high = min(low, found.low.load), max(high, found.high.load)
    elif found.low is not None:
        low = found.low.load
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
        boundary=_boundary(search, levels),
        endpoint_seconds=math.fsum(float(line.get("wall_s") or 0) for line in levels),
    )


def _boundary(search: SloSearch, levels: Sequence[Mapping[str, Any]]) -> Boundary | None:
    found = bracket(search.trials(levels))
    if found.low is None or found.high is None:
        return None
    if not math.isfinite(found.high.ratio):
        return "cliff"
    jump = found.high.ratio / found.low.ratio
    growth = math.log(jump) / math.log(found.high.load / found.low.load)
    return "cliff" if jump > _CLIFF_JUMP and growth > _CLIFF_GROWTH else "smooth"


def boundary_interval(
    search: SloSearch,
    levels: Sequence[Mapping[str, Any]],
    records: Sequence[Records],
    *,
    seed: int = 0,
) -> tuple[float, float]:
    """95 % interval of the load at which measured / limit becomes 1, by request bootstrap.

    A level that time-outs or errors ended counts as endless: what it kept are its fastest answers.
    """
    rng = np.random.default_rng(seed)
    loads, weights, draws = [], [], []
    for line, kept in zip(levels, records, strict=True):
        if not kept:
            continue
        loads.append(float(line[search.axis]))
        weights.append(float(len(kept)))
        endless = line[SEARCH_KEY]["ratio"] is None
        ratios = ratio_draws(kept, search.slos, search.axis == "rate_per_s", rng)
        draws.append(np.full(_RESAMPLES, _ENDLESS_RATIO) if endless else ratios)
    order = np.argsort(loads, kind="stable")
    load = np.array(loads)[order]
    weight = np.array(weights)[order]
    ratio = np.clip(np.array(draws)[order], 1 / _ENDLESS_RATIO**3, _ENDLESS_RATIO)
    crossings = np.array(
        [_crossing(np.log(load), np.log(ratio[:, draw]), weight) for draw in range(_RESAMPLES)]
    )
    low, high = central_interval(crossings, BOUNDARY_CONFIDENCE)
    middle = float(np.median(crossings))
    return (
        math.exp(middle + _WIDENING * (low - middle)),
        math.exp(middle + _WIDENING * (high - middle)),
    )


def ratio_draws(
    records: Records, slos: Sequence[Slo], open_loop: bool, rng: np.random.Generator
) -> FloatArray:
    """Largest measured / limit of resampled requests, shape (resamples,)."""
    worst = np.zeros(_RESAMPLES)
    for slo in slos:
        values = request_values_ms(records, slo.metric, open_loop=open_loop, failures="infinite")
        if not values:
            continue
        drawn = rng.integers(0, len(values), size=(_RESAMPLES, len(values)))
        if slo.metric == "itl":
            samples = [np.concatenate([values[i] for i in row]) for row in drawn]
        else:
            samples = list(np.concatenate(values)[drawn])
        measured = np.array([statistic_ms(sample, slo.statistic) for sample in samples])
        worst = np.maximum(worst, measured / slo.limit_ms)
    return worst


def _crossing(log_load: FloatArray, log_ratio: FloatArray, weight: FloatArray) -> float:
    """Where the rising curve through the points is zero; the end where it never is."""
    rising = isotonic(log_ratio, weight)
    above = np.flatnonzero(rising > 0)
    if not above.size:
        return float(log_load[-1])
    first = int(above[0])
    if first == 0:
        return float(log_load[0])
    before, after = rising[first - 1], rising[first]
    share = -before / (after - before)
    return float(log_load[first - 1] + share * (log_load[first] - log_load[first - 1]))


def isotonic(values: FloatArray, weight: FloatArray) -> FloatArray:
    """The rising sequence nearest to the values in weighted squares (pool adjacent violators)."""
    means: list[float] = []
    weights: list[float] = []
    sizes: list[int] = []
    for value, mass in zip(values, weight, strict=True):
        means.append(float(value))
        weights.append(float(mass))
        sizes.append(1)
        while len(means) > 1 and means[-2] > means[-1]:
            total = weights[-2] + weights[-1]
            merged = (means[-2] * weights[-2] + means[-1] * weights[-1]) / total
            means[-2:], weights[-2:], sizes[-2:] = [merged], [total], [sizes[-2] + sizes[-1]]
    return np.repeat(means, sizes)
