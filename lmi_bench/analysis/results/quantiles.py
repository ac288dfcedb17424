"""Quantiles of samples that may hold infinite values, and intervals of bootstrap draws."""

import math

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


def counted_quantile(values: FloatArray, counts: FloatArray, quantile: float) -> float:
    """The (linear) quantile of values that occur `counts` times each, without repeating them.

    >>> round(counted_quantile(np.array([3.0, 1.0]), np.array([1.0, 3.0]), 0.9), 9)
    2.4
    """
    order = np.argsort(values)
    ends = np.cumsum(counts[order])
    place = quantile * (ends[-1] - 1)
    around = np.searchsorted(ends, (math.floor(place), math.ceil(place)), side="right")
    low, high = values[order[around]]
    return float(low + (high - low) * (place - math.floor(place)))


def central_interval(draws: FloatArray, confidence: float = 0.90) -> tuple[float, float]:
    """The middle share of the draws; the edges are draws, not values between two of them.

    Requests of one batch depend on each other, so an interval of a bootstrap over requests is a
    lower bound of the spread between runs, which `--repeat` measures.
    """
    tail = (1 - confidence) / 2
    low, high = np.quantile(draws, (tail, 1 - tail), method="inverted_cdf")
    return float(low), float(high)
