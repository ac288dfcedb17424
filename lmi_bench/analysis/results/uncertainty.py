"""How sure a number is: bootstrap over the requests of a level.

Requests of one batch move together, so these intervals are a lower bound on the spread between
runs; `--repeat` is what measures that. Seeded, so that the same records give the same interval.
"""

from __future__ import annotations

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


def central_interval(draws: FloatArray, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """The middle share of the draws, by their own order statistics (no value in between)."""
    tail = (1 - confidence) / 2
    low = np.quantile(draws, tail, method="inverted_cdf")
    high = np.quantile(draws, 1 - tail, method="inverted_cdf")
    return float(low), float(high)
