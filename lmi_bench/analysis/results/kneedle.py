"""Kneedle: where a curve bends most against the line between its ends.

Source: Satopaa et al. 2011, "Finding a 'Kneedle' in a Haystack". Used without smoothing, since a
sweep has a handful of points, each a mean over many requests.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def kneedle_index(x: NDArray[np.float64], y: NDArray[np.float64]) -> int | None:
    """Index of the knee of a rising, concave curve; None if it has none.

    difference = (y - y_0) / (y_max - y_0) - (x - x_0) / (x_n - x_0), the knee is its maximum

    x  shape (n,), strictly increasing; y: shape (n,)

    A curve that never stands above its chord (throughput still grows as fast as the load), or
    whose maximum is at an end, has no knee.
    """
    if len(x) < 3:
        return None
    rise = float(y.max() - y[0])
    if rise <= 0:
        return None
    difference = (y - y[0]) / rise - (x - x[0]) / (x[-1] - x[0])
    index = int(np.argmax(difference))
    if index in (0, len(x) - 1) or difference[index] <= 1e-9:
        return None
    return index
