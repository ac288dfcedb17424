"""Fits the time of an all-reduce by its size: a start-up latency and a rate."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class CollectiveFit:
    """The two constants and the largest relative error over the measured sizes.

    bytes_per_s  infinite where larger arrays took no longer
    """

    latency_s: float
    bytes_per_s: float
    worst_error_frac: float


def fit_all_reduce(sizes_bytes: Sequence[int], times_s: Sequence[float]) -> CollectiveFit:
    """The constants with the least squared relative error, over two sizes or more.

    >>> fit = fit_all_reduce([1000, 1000000], [1.1e-5, 1.01e-3])
    >>> round(fit.latency_s * 1e6, 3), round(fit.bytes_per_s / 1e9, 3)
    (10.0, 1.0)
    """
    from scipy.optimize import nnls  # 0.4 s to load

    sizes, times = np.array(sizes_bytes, dtype=np.float64), np.array(times_s, dtype=np.float64)
    scale = sizes.max()  # brings both columns to one order of magnitude
    weighted = np.stack((1 / times, sizes / scale / times), axis=1)
    (latency_s, whole_s), _ = nnls(weighted / weighted.max(), np.ones(len(sizes)) / weighted.max())
    rate = scale / whole_s if whole_s > 0 else math.inf
    errors = np.abs((latency_s + sizes / rate) / times - 1)
    return CollectiveFit(float(latency_s), float(rate), float(errors.max()))
