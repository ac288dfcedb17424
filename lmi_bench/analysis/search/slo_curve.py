"""Where a noisy curve of latency over load reaches its limit, by all loads that a search tried.

The curve is log(measured / limit) over log(load). A priori it rises half as fast as the load, bends
anywhere (an integrated random walk) and may step up once between two loads that were tried. How
much it bends, whether it steps, and whether levels differ by more than the noise of their requests
is weighted by how well it explains the levels. Gaussian-process regression with its evidence:
Rasmussen and Williams 2006, chapters 2 and 5.

Latency does not fall with load, so a level is judged with its neighbours: where a higher load was
faster than a lower one, the two are pooled (isotonic regression, weighted by certainty). The
lowest load that then misses is the first breach.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median

import numpy as np

from lmi_bench.analysis.results.quantiles import FloatArray
from lmi_bench.core.level import Judgement, Level

DRAWS = 400
_LEVEL_SD, _SLOPE, _SLOPE_SD = 5.0, 0.5, 0.5
_BENDS = ((0.3, 0.4), (1.0, 0.4), (3.0, 0.2))  # spread of the slope a factor e further, its chance
_EXTRA_NOISE = ((1.0, 0.5), (1.5, 0.5))
_STEP_SD, _STEP_CHANCE = 1.5, 0.1
_LEAST_NOISE = 0.002
_FLOOR = 1e-10  # variance added to every drawn place, of log latency squared
_PARTS, _COARSEST = 4, 0.15  # of the grid: fewest parts of a gap, and the widest in log load
_NEGLIGIBLE = 0.01
_LEAST_RISING = 0.1


@dataclass(frozen=True, slots=True)
class _Setting:
    """One kind of curve: how much it bends, how noisy the levels are, and where it steps up.

    step  index of the level before the step; None without a step
    """

    bend: float
    extra_noise: float
    step: int | None
    chance: float


class SloCurve:
    """Latency over load by the trials of a search, whose loads are distinct and increasing."""

    def __init__(self, trials: "Sequence[Trial]") -> None:
        self._start = trials[0].log_load
        self._at = np.array([one.log_load - self._start for one in trials])
        self._above_prior = np.array([one.log_ratio for one in trials]) - _SLOPE * self._at
        self._variance = np.maximum([one.noise for one in trials], _LEAST_NOISE) ** 2

    def crossings(self, reach: float = 0.0, *, seed: int = 0) -> FloatArray:
        """Log loads at which drawn curves reach the limit, increasing; at most DRAWS of them.

        reach  how far beyond the highest load to look, in log load. A curve that stays below the
               limit crosses at infinity, one that starts above it at minus infinity
        """
        rng = np.random.default_rng(seed)
        grid = self._grid(reach)
        settings = list(self._settings())
        evidence = np.array([self._log_evidence(setting) for setting in settings])
        weight = np.exp(evidence - evidence.max()) * [setting.chance for setting in settings]
        weight[weight < _NEGLIGIBLE * weight.max()] = 0.0
        counts = np.diff(np.round(np.cumsum(weight) / weight.sum() * DRAWS).astype(int), prepend=0)
        drawn = [
            self._draw(grid, setting, int(count), rng) for setting, count in zip(settings, counts, strict=True) if count
        ]
        return np.sort(self._start + _crossings(grid, np.concatenate(drawn)))

    def _grid(self, reach: float) -> FloatArray:
        """Places to draw at: the levels, points between them, and points up to `reach` beyond."""
        ends = np.append(self._at, self._at[-1] + reach) if reach else self._at
        parts = [
            np.linspace(left, right, max(_PARTS, math.ceil((right - left) / _COARSEST)) + 1)[1:]
            for left, right in pairwise(ends)
        ]
        return np.concatenate([self._at[:1], *parts])

    def _settings(self) -> Iterator[_Setting]:
        gaps = np.diff(self._at)
        steps: list[tuple[int | None, float]] = [(None, 1 - _STEP_CHANCE if gaps.size else 1.0)]
        steps += [(i, _STEP_CHANCE * float(gap / gaps.sum())) for i, gap in enumerate(gaps)]
        for bend, bend_chance in _BENDS:
            for extra, extra_chance in _EXTRA_NOISE:
                for step, chance in steps:
                    yield _Setting(bend, extra, step, bend_chance * extra_chance * chance)

    def _behind_step(self, setting: _Setting) -> FloatArray:
        """1 for levels beyond the step, 0 for the others."""
        if setting.step is None:
            return np.zeros(self._at.size)
        return (np.arange(self._at.size) > setting.step).astype(float)

    def _covariance(self, setting: _Setting) -> FloatArray:
        behind = self._behind_step(setting)
        result = _smooth(self._at, self._at, setting.bend) + _STEP_SD**2 * np.outer(behind, behind)
        result[np.diag_indices_from(result)] += self._variance * setting.extra_noise**2
        return result

    def _log_evidence(self, setting: _Setting) -> float:
        factor = np.linalg.cholesky(self._covariance(setting))
        white = np.linalg.solve(factor, self._above_prior)
        return -0.5 * float(white @ white) - float(np.log(np.diag(factor)).sum())

    def _draw(self, grid: FloatArray, setting: _Setting, count: int, rng: np.random.Generator) -> FloatArray:
        """Curves over the grid, shape (count, grid); the step's place is drawn too."""
        covariance = self._covariance(setting)
        behind = self._behind_step(setting)
        # the smooth part at the grid, then the height of the step
        across = np.vstack([_smooth(grid, self._at, setting.bend), _STEP_SD**2 * behind])
        prior = np.zeros((grid.size + 1, grid.size + 1))
        prior[:-1, :-1] = _smooth(grid, grid, setting.bend)
        prior[-1, -1] = _STEP_SD**2
        gain = np.linalg.solve(covariance, across.T).T
        mean = gain @ self._above_prior
        spread = prior - gain @ across.T
        # the symmetric root is unique (the signs of eigenvectors depend on the processor), and the
        # floor keeps it insensitive to rounding: every machine then draws the same curves
        values, vectors = np.linalg.eigh((spread + spread.T) / 2)
        root = (vectors * np.sqrt(np.maximum(values, 0) + _FLOOR)) @ vectors.T
        drawn = mean + rng.standard_normal((count, grid.size + 1)) @ root
        curves: FloatArray = drawn[:, :-1] + _SLOPE * grid
        if setting.step is not None:
            left, right = self._at[setting.step], self._at[setting.step + 1]
            place = rng.uniform(left, right, size=(count, 1))
            curves += drawn[:, -1:] * (grid >= place)
        return curves


def _smooth(s: FloatArray, t: FloatArray, bend: float) -> FloatArray:
    """Prior covariance of the smooth part at places s and t, all at least 0; shape (s, t)."""
    first, second = s[:, None], t[None, :]
    least, most = np.minimum(first, second), np.maximum(first, second)
    bent = bend**2 * least**2 * (most / 2 - least / 6)
    result: FloatArray = _LEVEL_SD**2 + _SLOPE_SD**2 * first * second + bent
    return result


def _crossings(grid: FloatArray, curves: FloatArray) -> FloatArray:
    """Where each curve crosses zero; curves that cross it more than once are left out.

    Latency does not fall with load. If hardly any curve crosses only once (all levels are within
    their noise of the limit), the mean of the first and the last crossing counts instead.
    """
    above = curves > 0
    passes = above[:, 1:] != above[:, :-1]
    count = passes.sum(axis=1)
    once = (count == 0) | ((count == 1) & above[:, -1])
    if once.mean() > _LEAST_RISING:
        curves, passes, count, above = curves[once], passes[once], count[once], above[once]
    result = np.where(above[:, 0], -math.inf, math.inf)
    rows = np.flatnonzero(count)
    first = passes[rows].argmax(axis=1)
    last = passes.shape[1] - 1 - passes[rows, ::-1].argmax(axis=1)
    ends = []
    for index in (first, last):  # where the line from that grid point to the next is zero
        before, after = curves[rows, index], curves[rows, index + 1]
        ends.append(grid[index] + before / (before - after) * (grid[index + 1] - grid[index]))
    result[rows] = (ends[0] + ends[1]) / 2
    return result


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
