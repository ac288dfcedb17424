"""Whether a level was steady, by its token events: the part without ramp and drain, and a step.

Steady part: the rate of tokens over time is divided into equal bins. The window is the one with the
least squared standard error of its mean, sum((y - mean)^2) / n^2 (MSER, White 1997, applied to both
ends). Times are seconds since the level's start.

Step: the time between tokens changed at some moment, and stayed changed. The level is divided into
equal bins of time; the value of a bin is the logarithm of the median gap between two tokens of a
stream. Gaps follow the number of streams that decode, which changes with arrivals and ends, so its
logarithm is fitted first. The moment is the one at which a step removes most of the squares that
are left (CUSUM with a covariate); its chance is that of as large a step after the rest is put
together anew in blocks, which keeps the likeness of neighbouring bins. And whole requests have to
differ on both sides of it.

A level without one may have a step of the time to first token alone, as a cold cache makes: bins of
equally many requests in the order of their sends, fitted first to the length of the prompt and the
requests in flight and without a token.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lmi_bench.analysis.results.columns import Columns
from lmi_bench.analysis.results.quantiles import FloatArray
from lmi_bench.core.steadiness import SpeedStep, SteadyWindow

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
    tokens, edges = np.histogram(times, bins=bins, range=(first_s, float(times.max())), weights=counts)
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


LEAST_CHANGE, LEAST_TTFT_CHANGE = 0.05, 0.2
"""Smaller steps are not named: repeats of one level differ by as much."""
_BINS, _LEAST_BINS, _EDGE_BINS = 40, 16, 4
_LEAST_GAPS, _LEAST_REQUESTS = 8, 3  # of a bin
_LEAST_APART = 0.3  # of a step's spread that the load does not explain
# of a level, in seconds and in requests one after the other: in a shorter one the way in which
# users begin and end looks like a step
_LEAST_S, _LEAST_ROUNDS = 10.0, 8
_BLOCK_BINS, _DRAWS, _MOST_CHANCE, _LEAST_ERRORS = 3, 500, 0.01, 3.5


def speed_step(columns: Columns, *, seed: int = 0) -> SpeedStep | str | None:
    """The largest step of the level's speed; None if chance would give as large a one, a text for a
    level that is too short to tell: what it needs."""
    took_s, _ = columns.values_s("e2e", open_loop=False, counted_only=False)
    if not took_s.size:
        return None
    needed_s = max(_LEAST_S, _LEAST_ROUNDS * float(np.median(took_s)))
    if columns.wall_s < needed_s:
        return f"needs {needed_s:.3g} s, took {columns.wall_s:.3g} s"
    ends_s, gaps_s, streams = _bins(columns)
    if len(gaps_s) < _LEAST_BINS:
        return f"needs tokens in {_LEAST_BINS} of {_BINS} parts of its time, has {len(gaps_s)}"
    found = _step(np.log(gaps_s), [np.log(streams)], LEAST_CHANGE, seed)
    if found is None:
        return None
    place, change = found
    at_s = float(ends_s[place])
    tpot_s, rows = columns.values_s("tpot", open_loop=False, counted_only=False)
    pace = np.log(np.maximum(tpot_s, 1e-9))
    is_real = _differ(pace[columns.last_s[rows] <= at_s], pace[columns.sent_s[rows] >= at_s])
    return SpeedStep(at_s=at_s, change=change) if is_real else None


def first_token_step(columns: Columns, input_tokens: FloatArray, *, seed: int = 0) -> SpeedStep | None:
    """The largest step of the time to first token; None if chance would give as large a one.

    input_tokens  shape (n,), of each request
    """
    ttft_s, rows = columns.values_s("ttft_from_sent", open_loop=False)
    bins = min(_BINS, len(rows) // _LEAST_REQUESTS)
    if bins < _LEAST_BINS:
        return None
    order = np.argsort(columns.sent_s[rows], kind="stable")
    ttft_s, rows, sent_s = ttft_s[order], rows[order], columns.sent_s[rows][order]
    first_s = columns.sent_s + columns.each_s(open_loop=False)["ttft_from_sent"]
    before = np.searchsorted(np.sort(columns.sent_s), sent_s, side="right")
    ahead = [before - np.searchsorted(np.sort(each), sent_s, side="right") for each in (columns.last_s, first_s)]
    causes = [np.log(np.maximum(each, 1)) for each in (*ahead, input_tokens[rows])]
    log_s, place = np.log(np.maximum(ttft_s, 1e-9)), np.arange(len(rows)) * bins // len(rows)
    level, *causes = (np.bincount(place, each) / np.bincount(place) for each in (log_s, *causes))
    found = _step(level, causes, LEAST_TTFT_CHANGE, seed)
    if found is None:
        return None
    at, change = int(np.searchsorted(place, found[0], side="right")), found[1]
    is_real = _differ(log_s[:at], log_s[at:])
    return SpeedStep(at_s=float(sent_s[at]), change=change, of="ttft") if is_real else None


def _step(level: FloatArray, causes: Sequence[FloatArray], least: float, seed: int) -> tuple[int, float] | None:
    """The last bin before the largest step of the values, and its size as a share; None if it is
    smaller than `least`, or chance would give as large a one. All are logarithms, shape (bins,)."""
    steps = np.tri(len(level), k=-1)[:, _EDGE_BINS - 1 : -_EDGE_BINS]
    spread = np.sqrt(((steps - steps.mean(axis=0)) ** 2).sum(axis=0))
    fitted = np.column_stack([np.ones(len(level)), *causes])
    axes, weights, _ = np.linalg.svd(fitted, full_matrices=False)
    own = axes[:, weights > 1e-9 * weights[0]]  # what mean and causes explain is taken out of both
    left, steps = (each - own @ (own.T @ each) for each in (level, steps))
    lengths = np.sqrt((steps**2).sum(axis=0))
    apart = lengths > _LEAST_APART * spread  # else the load changed in that moment, too
    steps = np.where(apart, steps / np.where(apart, lengths, 1.0), 0.0)
    sizes = left @ steps
    at = int(np.abs(sizes).argmax())
    change = float(np.expm1(sizes[at] / lengths[at])) if apart[at] else 0.0
    if abs(change) < least:
        return None
    drawn = _in_blocks(left, np.random.default_rng(seed))
    drawn -= drawn @ own @ own.T
    chance = float((np.abs(drawn @ steps).max(axis=1) >= abs(sizes[at])).mean())
    return None if chance > _MOST_CHANCE else (at + _EDGE_BINS - 1, change)


def _differ(*sides: FloatArray) -> bool:
    """Whether requests sent later differ in their own pace from those that ended before: those of
    two replicas or adapters differ among themselves, and each moment mixes them anew."""
    if min(map(len, sides)) < 2:
        return True
    error = np.sqrt(sum(side.var(ddof=1) / side.size for side in sides))
    return bool(abs(sides[1].mean() - sides[0].mean()) > _LEAST_ERRORS * error)


def _bins(columns: Columns) -> tuple[FloatArray, FloatArray, FloatArray]:
    """End, median gap and mean number of decoding streams of each bin that has enough of both."""
    times_s, owner = columns.times_s, columns.owner
    within = (owner[1:] == owner[:-1]) & columns.ok[owner[1:]]
    gaps_s, at_s = np.diff(times_s)[within], times_s[1:][within]
    if not at_s.size:
        return gaps_s, gaps_s, gaps_s
    edges_s = np.linspace(float(times_s.min()), float(times_s.max()), _BINS + 1)
    places = np.clip(np.searchsorted(edges_s, at_s, side="right") - 1, 0, _BINS - 1)
    streams = np.bincount(places, weights=gaps_s, minlength=_BINS) / (edges_s[1] - edges_s[0])
    enough = np.bincount(places, minlength=_BINS) >= _LEAST_GAPS
    kept = np.flatnonzero(enough & (streams > np.median(streams) / 2))  # no ramp, no drain
    medians_s = np.array([float(np.median(gaps_s[places == place])) for place in kept])
    full = medians_s > 0  # tokens that came together have no time between them
    return edges_s[1:][kept[full]], medians_s[full], streams[kept[full]]


def _in_blocks(values: FloatArray, rng: np.random.Generator) -> NDArray[np.float64]:
    """The values in another order of their blocks, cut anew each time; shape (draws, bins)."""
    starts = range(0, len(values), _BLOCK_BINS)

    def draw() -> FloatArray:
        rolled = np.roll(values, rng.integers(len(values)))
        blocks = [rolled[start : start + _BLOCK_BINS] for start in starts]
        return np.concatenate([blocks[place] for place in rng.permutation(len(blocks))])

    return np.array([draw() for _ in range(_DRAWS)])
