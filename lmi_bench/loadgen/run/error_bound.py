"""By how much the reported latencies may be wrong because of the generator itself.

Each time is known to lie in an interval: a send between the clock before and after the system call,
a receive between the last moment at which nothing had come and its stamp. So each latency has a
lowest and a highest value, and a quantile of the true ones lies between the quantiles of the two:
a bound, not an estimate, of what the generator adds. What it cannot see is outside it: queueing in
the network and in the server before the request is read.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lmi_bench.loadgen.http.receive_signals import ReceiveSignals

UNSURE_S = 0.001
"""A token whose time may be further off than this because a later one was read with it counts as
merged by the reader; below it the server sent both at once."""

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Bound:
    """A reported quantile or mean and the interval of the true one; seconds."""

    reported_s: float
    low_s: float
    high_s: float

    @property
    def error_s(self) -> float:
        """Largest distance of the true figure from the reported one."""
        return max(self.reported_s - self.low_s, self.high_s - self.reported_s)

    @property
    def error_frac(self) -> float:
        """The same as a share of the reported one."""
        return self.error_s / self.reported_s if self.reported_s > 0 else 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Latencies:
    """Latencies as reported, and the interval of each true one; shape (n,), seconds.

    low_s, high_s  -inf and inf where an end is not known
    """

    values_s: FloatArray
    low_s: FloatArray
    high_s: FloatArray

    def quantile(self, q: float) -> Bound | None:
        """The bound of a quantile; None if it is not known."""
        if not self.values_s.size:
            return None
        low, high = _quantile(self.low_s, q), _quantile(self.high_s, q)
        if not math.isfinite(low) or not math.isfinite(high):
            return None
        reported = float(np.quantile(self.values_s, q))
        return Bound(reported, min(low, reported), max(high, reported))

    def mean(self) -> Bound | None:
        """The bound of the mean of those with a known lowest value; None if there is none.

        No value is below zero, however late its read was, and none above the reported one.
        """
        known = np.isfinite(self.low_s)
        values_s = self.values_s[known].tolist()
        if not values_s:
            return None
        mean = sum(values_s) / len(values_s)
        low = sum(np.maximum(0.0, self.low_s[known]).tolist()) / len(values_s)
        return Bound(mean, low, mean)


def _quantile(values: FloatArray, q: float) -> float:
    """The linear quantile; without interpolation if a value is infinite."""
    if np.isfinite(values).all():
        return float(np.quantile(values, q))
    return float(np.quantile(values, q, method="inverted_cdf"))


def ttfts(ttft_s: Sequence[float], bounds_s: Sequence[float | None]) -> Latencies:
    """The TTFT of each answer; `bounds_s`: by how much it may be too long, None: not known."""
    values = np.asarray(ttft_s, dtype=np.float64)
    late = np.asarray([math.inf if b is None else b for b in bounds_s], dtype=np.float64)
    return Latencies(values, values - late, values)


def gaps(signals: ReceiveSignals) -> Latencies:
    """The gaps between the token events of each stream.

    A gap is too long by its end, too short by its beginning.
    """
    times = np.asarray(signals.times_s)
    late = np.asarray(signals.late_s)
    within = _within(signals)
    gap = np.diff(times)[within]
    return Latencies(gap, gap - late[1:][within], gap + late[:-1][within])


def unsure_shares(signals: ReceiveSignals) -> tuple[float, float]:
    """Shares of the tokens, and of the first tokens, whose time a later token's read hides."""
    if not signals.tokens:
        return 0.0, 0.0
    times = np.asarray(signals.times_s)
    late = np.asarray(signals.late_s)
    hidden = np.zeros(times.size, dtype=bool)
    hidden[:-1] = _within(signals) & (np.diff(times) == 0)
    hidden &= (late > UNSURE_S) & np.isfinite(late)
    events = np.asarray(signals.events, dtype=np.int64)
    starts = np.cumsum(events) - events
    first = hidden[starts[events > 0]]
    return float(hidden.mean()), float(first.mean())


def _within(signals: ReceiveSignals) -> NDArray[np.bool_]:
    """Which neighbours in `times_s` belong to one stream; shape (tokens - 1,)."""
    within = np.ones(max(0, signals.tokens - 1), dtype=bool)
    ends = np.cumsum(np.asarray(signals.events, dtype=np.int64)) - 1
    within[ends[(ends >= 0) & (ends < within.size)]] = False
    return within
