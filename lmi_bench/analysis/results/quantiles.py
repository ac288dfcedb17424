"""Quantiles of samples that may hold infinite values, and intervals of bootstrap draws."""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]


def upper_quantile(values: FloatArray, quantile: float) -> float:
    """Linear quantile of values, shape (n,), of which some may be infinite.

    Infinite as soon as an infinite value takes part in it, where numpy would give NaN.
    """
    return counted_quantile(values, np.ones(len(values)), quantile)


def counted_quantile(values: FloatArray, counts: NDArray[Any], quantile: float) -> float:
    """The (linear) quantile of values that occur `counts` times each, without repeating them.

    >>> round(counted_quantile(np.array([3.0, 1.0]), np.array([1.0, 3.0]), 0.9), 9)
    2.4
    """
    order = np.argsort(values, kind="stable")  # fast for values that are in order
    ends = np.cumsum(counts[order])
    place = quantile * float(ends[-1] - 1)
    around = np.searchsorted(ends, (math.floor(place), math.ceil(place)), side="right")
    low, high = (float(value) for value in values[order[around]])
    return high if math.isinf(high) else low + (high - low) * (place - math.floor(place))


def central_interval(draws: FloatArray, confidence: float = 0.90) -> tuple[float, float]:
    """The middle share of the draws; the edges are draws, not values between two of them.

    Requests of one batch depend on each other, so an interval of a bootstrap over requests is a
    lower bound of the spread between runs, which `--repeat` measures.
    """
    tail = (1 - confidence) / 2
    low, high = np.quantile(draws, (tail, 1 - tail), method="inverted_cdf")
    return float(low), float(high)
