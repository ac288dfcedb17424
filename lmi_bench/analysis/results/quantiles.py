"""Quantiles of samples that may hold infinite values, and intervals of bootstrap draws."""

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]


def upper_quantile(values: FloatArray, quantile: float) -> float:
    """Linear quantile of values, shape (n,), of which some may be infinite.

    Infinite as soon as an infinite value takes part in it, where numpy would give NaN.
    """
    ordered = np.sort(values)
    position = quantile * (len(ordered) - 1)
    low, high = int(np.floor(position)), int(np.ceil(position))
    if low == high or not np.isfinite(ordered[high]):
        return float(ordered[high])
    return float(ordered[low] + (position - low) * (ordered[high] - ordered[low]))


def central_interval(draws: FloatArray, confidence: float = 0.90) -> tuple[float, float]:
    """The middle share of the draws; the edges are draws, not values between two of them.

    Requests of one batch depend on each other, so an interval of a bootstrap over requests is a
    lower bound of the spread between runs, which `--repeat` measures.
    """
    tail = (1 - confidence) / 2
    low = np.quantile(draws, tail, method="inverted_cdf")
    high = np.quantile(draws, 1 - tail, method="inverted_cdf")
    return float(low), float(high)
