"""A step in a level's speed: the time between tokens changed at some moment, and stayed changed.

A level is divided into equal bins of time; the value of a bin is the logarithm of the median gap
between two tokens of a stream. Gaps follow the number of streams that decode, which changes with
arrivals and ends, so its logarithm is fitted first. The moment is the one at which a step removes
most of the squares that are left (CUSUM with a covariate); its chance is that of as large a step
after the rest is put together anew in blocks, which keeps the likeness of neighbouring bins.
"""

import numpy as np
from numpy.typing import NDArray

from lmi_bench.analysis.results.columns import Columns, FloatArray
from lmi_bench.core.level import SpeedStep

LEAST_CHANGE = 0.05
"""Smaller steps are not named: repeats of one level differ by as much."""
_BINS, _LEAST_BINS, _EDGE_BINS = 40, 16, 4
_LEAST_GAPS = 8  # of a bin
_LEAST_APART = 0.3  # of a step's spread that the load does not explain
# of a level, in seconds and in requests one after the other: in a shorter one the way in which
# users begin and end looks like a step
_LEAST_S, _LEAST_ROUNDS = 10.0, 8
_BLOCK_BINS, _DRAWS, _MOST_CHANCE = 3, 500, 0.01


def speed_step(columns: Columns, *, seed: int = 0) -> SpeedStep | None:
    """The largest step of the level's speed; None if chance would give as large a one, and for a
    level that is too short to tell."""
    took_s, _ = columns.values_s("e2e", open_loop=False, counted_only=False)
    if not took_s.size or columns.wall_s < max(_LEAST_S, _LEAST_ROUNDS * float(np.median(took_s))):
        return None
    ends_s, gaps_s, streams = _bins(columns)
    if len(gaps_s) < _LEAST_BINS:
        return None
    level, steps = np.log(gaps_s), np.tri(len(gaps_s), k=-1)[:, _EDGE_BINS - 1 : -_EDGE_BINS]
    spread = np.sqrt(((steps - steps.mean(axis=0)) ** 2).sum(axis=0))
    fitted = np.column_stack([np.ones(len(level)), np.log(streams)])
    own = np.linalg.qr(fitted)[0]  # what mean and load explain is taken out of values and steps
    left, steps = (each - own @ (own.T @ each) for each in (level, steps))
    lengths = np.sqrt((steps**2).sum(axis=0))
    apart = lengths > _LEAST_APART * spread  # else the load changed in that moment, too
    steps = np.where(apart, steps / np.where(apart, lengths, 1.0), 0.0)
    sizes = left @ steps
    at = int(np.abs(sizes).argmax())
    change = float(np.expm1(sizes[at] / lengths[at])) if apart[at] else 0.0
    if abs(change) < LEAST_CHANGE:
        return None
    drawn = _in_blocks(left, np.random.default_rng(seed))
    drawn -= drawn @ own @ own.T
    chance = float((np.abs(drawn @ steps).max(axis=1) >= abs(sizes[at])).mean())
    if chance > _MOST_CHANCE:
        return None
    return SpeedStep(at_s=float(ends_s[at + _EDGE_BINS - 1]), change=change)


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
