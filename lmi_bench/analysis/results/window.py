"""The steady part of a level, without ramp and drain, found from the token events.

The rate of tokens over time is divided into equal bins. The window is the one with the least
squared standard error of its mean, sum((y - mean)^2) / n^2 (MSER, White 1997, applied to both
ends). Times are seconds since the level's start.
"""

import numpy as np
from numpy.typing import NDArray

from lmi_bench.analysis.results.columns import Columns
from lmi_bench.core.level import SteadyWindow

# A bin of ten distinct moments averages over the lockstep of a decode batch; a window shorter
# than a third of the level may be steady by chance.
_MOMENTS_PER_BIN = 10
_MIN_BINS, _MAX_BINS = 8, 100
_MIN_SHARE = 1 / 3
_BATCHES = 8
_T_95 = 2.365  # Student's t, 97.5 %, seven degrees of freedom: _BATCHES - 1


def steady_window(columns: Columns) -> SteadyWindow:
    """The steady window of the completed requests of a level."""
    answered = columns.ok & ~np.isnan(columns.last_s)
    if not answered.any():
        return SteadyWindow(reason="no tokens arrived")
    times, counts = columns.times_s[answered[columns.owner]], _tokens_by_event(columns, answered)
    moments = int(np.unique(times).size)
    bins = min(_MAX_BINS, moments // _MOMENTS_PER_BIN)
    if bins < _MIN_BINS:
        needed = _MIN_BINS * _MOMENTS_PER_BIN
        return SteadyWindow(reason=f"needs {needed} moments with tokens, has {moments}")
    first_s = float(columns.sent_s[answered].min())
    tokens, edges = np.histogram(
        times, bins=bins, range=(first_s, float(times.max())), weights=counts
    )
    start, end = _least_standard_error(tokens)
    start_s, end_s = float(edges[start]), float(edges[end])
    rate = float(tokens[start:end].sum()) / (end_s - start_s)
    batches = np.array_split(tokens[start:end], min(_BATCHES, end - start))
    low = high = None
    if len(batches) == _BATCHES:
        width_s = float(edges[1] - edges[0])
        rates = np.array([batch.mean() / width_s for batch in batches])
        half = _T_95 * float(rates.std(ddof=1)) / _BATCHES**0.5
        low, high = max(0.0, rate - half), rate + half
    return SteadyWindow(start_s, end_s, rate, low, high, (end - start) / bins)


def _tokens_by_event(columns: Columns, answered: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Tokens of each event of the answered requests; shape (events,).

    They are scaled to the server's count, which may differ (a chunk may hold several tokens), so
    that the throughputs of window and level count the same tokens.
    """
    owner = columns.owner
    shown = np.bincount(owner, weights=columns.counts, minlength=len(answered))
    scale = np.where(shown * columns.tokens > 0, columns.tokens / np.maximum(shown, 1), 1.0)
    return np.asarray((columns.counts * scale[owner])[answered[owner]])


def _least_standard_error(values: NDArray[np.float64]) -> tuple[int, int]:
    """Start and end (exclusive) of the window with the least standard error; longest on ties."""
    n = len(values)
    least = max(2, int(np.ceil(n * _MIN_SHARE)))
    sums = np.concatenate([[0.0], np.cumsum(values)])
    squares = np.concatenate([[0.0], np.cumsum(values**2)])
    best = (np.inf, 0, n)
    for length in range(n, least - 1, -1):
        starts = np.arange(n - length + 1)
        total = sums[starts + length] - sums[starts]
        error = squares[starts + length] - squares[starts] - total**2 / length
        errors = np.maximum(error, 0.0) / length**2
        start = int(np.argmin(errors))
        if errors[start] < best[0] - 1e-12:
            best = (float(errors[start]), start, start + length)
    return best[1], best[2]
