"""How sure a number is: bootstrap over the requests of a level.

Requests of one batch move together, so these intervals are a lower bound on the spread between
runs; `--repeat` is what measures that. Seeded, so that the same records give the same interval.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]

DEFAULT_RESAMPLES = 400
CONFIDENCE = 0.90


def resample_indices(
    n: int, *, resamples: int = DEFAULT_RESAMPLES, rng: np.random.Generator
) -> NDArray[np.int64]:
    """Indices of bootstrap samples, shape (resamples, n)."""
    return rng.integers(0, n, size=(resamples, n))


def bootstrap_interval(
    values: FloatArray,
    statistic: Callable[[FloatArray], float],
    *,
    resamples: int = DEFAULT_RESAMPLES,
    confidence: float = CONFIDENCE,
    seed: int = 0,
) -> tuple[float, float]:
    """Percentile-bootstrap interval of a statistic of independent values.

    values  shape (n,), n at least 1
    """
    rng = np.random.default_rng(seed)
    drawn = values[resample_indices(len(values), resamples=resamples, rng=rng)]
    return central_interval(np.array([statistic(sample) for sample in drawn]), confidence)


def central_interval(draws: FloatArray, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """The middle share of the draws, by their own order statistics (no value in between)."""
    tail = (1 - confidence) / 2
    low = np.quantile(draws, tail, method="inverted_cdf")
    high = np.quantile(draws, 1 - tail, method="inverted_cdf")
    return float(low), float(high)
