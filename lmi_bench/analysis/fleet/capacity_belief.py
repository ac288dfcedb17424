"""What one copy carries within the SLOs: a prediction with its doubt, cut off by measurements.

The logarithm of the capacity is normal around the prediction, and in some worlds, which have an
effect that the model lacks, several times as wide:

    P(capacity >= rate) = (1 - ODD) * F(x / sd) + ODD * F(x / wide)      x = ln(median / rate)

A level that was measured and kept the SLOs cuts off all capacities below its rate, one that did
not those above:

    P(capacity >= rate | levels) = (P(rate) - P(missed)) / (P(kept) - P(missed))

A level that came out on the line says more than either: the share of slow requests doubles within
some ten per cent of rate there, so the capacity is that level's rate within a few per cent,
whatever was predicted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import NormalDist

CONFIDENCE = 0.9
"""With which a load is to stay within its SLOs."""

_NORMAL = NormalDist()
_LEAST_LOG_SD = 0.01
_ODD, _WIDER, _WIDER_BY = 0.15, 3.0, 0.1
_HALVINGS = 50
_NEAR_LOG_SD = 0.06  # of the capacity around the rate of a level on the line


@dataclass(frozen=True, slots=True)
class CapacityBelief:
    """A capacity in requests each second.

    low_per_s     carried with 90 % confidence before anything is measured; 0: none is
    median_per_s  carried with even odds, at least low_per_s
    kept_per_s    highest rate that was measured and kept; missed_per_s: lowest that was not
    """

    low_per_s: float
    median_per_s: float
    kept_per_s: float = 0.0
    missed_per_s: float = math.inf

    @classmethod
    def after(
        cls,
        low_per_s: float,
        median_per_s: float,
        measured: Iterable[tuple[float, bool]],
        *,
        near_per_s: Iterable[float] = (),
    ) -> CapacityBelief:
        """The belief after levels at these rates, each with whether it kept the SLOs.

        near_per_s  rates of levels on the line; the lowest replaces the prediction

        Where levels contradict each other, the one that was not kept counts.
        """
        levels = list(measured)
        missed_per_s = min((rate for rate, kept in levels if not kept), default=math.inf)
        kept = (rate for rate, was_kept in levels if was_kept and rate < missed_per_s)
        kept_per_s = max(kept, default=0.0)
        near = [rate for rate in near_per_s if kept_per_s < rate < missed_per_s]
        if near:
            median_per_s = min(near)
            low_per_s = median_per_s * math.exp(-_NORMAL.inv_cdf(CONFIDENCE) * _NEAR_LOG_SD)
        return cls(low_per_s, median_per_s, kept_per_s, missed_per_s)

    @property
    def _log_sd(self) -> float:
        ratio = max(self.median_per_s, self.low_per_s) / self.low_per_s
        return max(_LEAST_LOG_SD, math.log(ratio) / _NORMAL.inv_cdf(CONFIDENCE))

    def _above(self, rate_per_s: float) -> float:
        """P(capacity >= rate) before anything is measured."""
        if rate_per_s <= 0:
            return 1.0
        if rate_per_s == math.inf or self.median_per_s <= 0:
            return 0.0
        if self.low_per_s <= 0:  # even odds at most, and no way to tell how far below
            return 0.5 if rate_per_s <= self.median_per_s else 0.0
        room, sd = math.log(max(self.median_per_s, self.low_per_s) / rate_per_s), self._log_sd
        wide = _WIDER * sd + _WIDER_BY
        return (1 - _ODD) * _NORMAL.cdf(room / sd) + _ODD * _NORMAL.cdf(room / wide)

    def chance(self, rate_per_s: float) -> float:
        """P(capacity >= rate), given what was measured."""
        if rate_per_s <= self.kept_per_s:
            return 1.0
        if rate_per_s >= self.missed_per_s:
            return 0.0
        most, least = self._above(self.kept_per_s), self._above(self.missed_per_s)
        if most - least < 1e-9:  # the measurements contradict the prediction: straight between
            if self.missed_per_s == math.inf:
                return 0.0
            span = self.missed_per_s - self.kept_per_s
            return (self.missed_per_s - rate_per_s) / span
        return (self._above(rate_per_s) - least) / (most - least)

    @property
    def sure_per_s(self) -> float:
        """The highest rate that is carried with 90 % confidence; 0 if none is.

        >>> round(CapacityBelief(4.0, 5.0).sure_per_s, 3)
        4.0
        >>> CapacityBelief(4.0, 5.0, missed_per_s=3.0).sure_per_s < 3.0
        True
        """
        if self.low_per_s <= 0:
            return self.kept_per_s
        low = self.kept_per_s
        if self.missed_per_s == math.inf:
            low = max(low, self.low_per_s)
        high = min(self.missed_per_s, max(low, self.median_per_s))
        if high <= low:
            return low
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            if self.chance(middle) >= CONFIDENCE:
                low = middle
            else:
                high = middle
        return low
