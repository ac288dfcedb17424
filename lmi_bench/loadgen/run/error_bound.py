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
class QuantileBound:
    """A reported quantile and the interval of the true one; seconds."""

    reported_s: float
    low_s: float
    high_s: float

    @property
    def error_s(self) -> float:
        """Largest distance of the true quantile from the reported one."""
        return max(self.reported_s - self.low_s, self.high_s - self.reported_s)

    @property
    def error_frac(self) -> float:
        """The same as a share of the reported one."""
        return self.error_s / self.reported_s if self.reported_s > 0 else 0.0


def quantile_bound(
    values_s: FloatArray, low_s: FloatArray, high_s: FloatArray, q: float
) -> QuantileBound | None:
    """The quantile of values that lie in [low, high]; None if it is not known.

    values_s, low_s, high_s  shape (n,), seconds; -inf and inf where an end is not known
    """
    if not values_s.size:
        return None
    low, high = _quantile(low_s, q), _quantile(high_s, q)
    if not math.isfinite(low) or not math.isfinite(high):
        return None
    reported = float(np.quantile(values_s, q))
    return QuantileBound(reported, min(low, reported), max(high, reported))


def _quantile(values: FloatArray, q: float) -> float:
    """The linear quantile; without interpolation if a value is infinite."""
    if np.isfinite(values).all():
        return float(np.quantile(values, q))
    return float(np.quantile(values, q, method="inverted_cdf"))


def ttft_bound(
    ttft_s: Sequence[float], bounds_s: Sequence[float | None], q: float
) -> QuantileBound | None:
    """The bound of a TTFT quantile.

    bounds_s  by how much each TTFT may be too long, at most; None: not known
    """
    values = np.asarray(ttft_s, dtype=np.float64)
    late = np.asarray([math.inf if b is None else b for b in bounds_s], dtype=np.float64)
    return quantile_bound(values, values - late, values, q)


def mean_bound(ttft_s: Sequence[float], bounds_s: Sequence[float | None]) -> QuantileBound | None:
    """The bound of the mean TTFT, over the answers whose bound is known; None if there is none.

    A TTFT is never below zero, however late its read was.
    """
    known = [
        (ttft, late)
        for ttft, late in zip(ttft_s, bounds_s, strict=True)
        if late is not None and math.isfinite(late)
    ]
    if not known:
        return None
    mean = sum(ttft for ttft, _ in known) / len(known)
    low = sum(max(0.0, ttft - late) for ttft, late in known) / len(known)
    return QuantileBound(mean, low, mean)


def supported_quantile(n: int) -> float:
    """The highest of p50, p90, p95 and p99 that n values can support: q ** n <= 0.05 above p50."""
    return next((q for q in (0.99, 0.95, 0.9) if q**n <= 0.05), 0.5)


@dataclass(frozen=True, slots=True)
class Gaps:
    """Gaps between the token events of each stream, with what is known of them; shape (gaps,)."""

    gap_s: FloatArray
    low_s: FloatArray
    high_s: FloatArray

    def bound(self, q: float) -> QuantileBound | None:
        """The bound of an ITL quantile."""
        return quantile_bound(self.gap_s, self.low_s, self.high_s, q)


def gaps(signals: ReceiveSignals) -> Gaps:
    """The gaps of all streams: a gap is too long by its end, too short by its beginning."""
    times = np.asarray(signals.times_s)
    late = np.asarray(signals.late_s)
    within = _within(signals)
    gap = np.diff(times)[within]
    return Gaps(gap, gap - late[1:][within], gap + late[:-1][within])


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
