"""A day's load: requests each second over 24 hours, from a file or a shape.

A curve is straight between its points and the same every day.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lmi_bench.core.errors import InputError

DAY_S = 86_400.0
_HOUR_S = 3_600.0
SHAPES = ("flat", "office", "sine")


@dataclass(frozen=True, slots=True)
class LoadCurve:
    """Points of a day: seconds since midnight, rising, and requests each second there."""

    times_s: tuple[float, ...]
    rates_per_s: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.times_s) != len(self.rates_per_s) or not self.times_s:
            raise InputError("a load curve needs at least one point, each a time and a rate")
        if any(b <= a for a, b in zip(self.times_s, self.times_s[1:], strict=False)):
            raise InputError("the times of a load curve must rise")
        if self.times_s[0] < 0 or self.times_s[-1] > DAY_S:
            raise InputError("a load curve covers one day: hours 0 to 24")
        if any(not 0 <= rate < math.inf for rate in self.rates_per_s) or not self.peak_per_s:
            raise InputError("the rates of a load curve must be 0 or more, and one above 0")

    @property
    def peak_per_s(self) -> float:
        """The highest rate of the day."""
        return max(self.rates_per_s)

    def rates_at(self, times_s: NDArray[np.float64]) -> NDArray[np.float64]:
        """Requests each second at any times; shape as given."""
        return np.interp(times_s, self.times_s, self.rates_per_s, period=DAY_S)

    def scaled_to(self, peak_per_s: float) -> LoadCurve:
        """The same shape with another peak."""
        factor = peak_per_s / self.peak_per_s
        return LoadCurve(self.times_s, tuple(rate * factor for rate in self.rates_per_s))

    def steepest_growth_per_s(self) -> float:
        """Largest relative growth a second, (dr/dt) / r, over the rising stretches.

        Where a stretch rises from nothing, the growth is taken over its end.
        """
        steepest = 0.0
        times = (*self.times_s, self.times_s[0] + DAY_S)
        rates = (*self.rates_per_s, self.rates_per_s[0])
        for i in range(len(times) - 1):
            rise = rates[i + 1] - rates[i]
            if rise > 0:
                steepest = max(steepest, rise / (times[i + 1] - times[i]) / (rates[i] or rise))
        return steepest


def load_curve_file(path: Path) -> LoadCurve:
    """A CSV with the columns `hour` (0 to 24) and `rate_per_s`. Raises InputError."""
    try:
        rows = list(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))
        times = [float(row["hour"]) * _HOUR_S for row in rows]
        rates = [float(row["rate_per_s"]) for row in rows]
    except OSError as exc:
        raise InputError(f"cannot read the load curve {path}: {exc.strerror}") from exc
    except (KeyError, TypeError, ValueError) as exc:
        raise InputError(
            f"{path}: a load curve is a CSV with the columns hour and rate_per_s, numbers below "
            f"them ({exc})"
        ) from exc
    return LoadCurve(tuple(times), tuple(rates))


def shaped(shape: str, *, peak_per_s: float, least_share: float = 0.2) -> LoadCurve:
    """A day of a known shape.

    flat    the peak all day
    office  the least share at night, up from 7 to 9, the peak until 17, down until 20
    sine    a wave with its peak at 14 and its trough at 2 o'clock
    """
    if not peak_per_s > 0 or not 0 <= least_share <= 1:
        raise InputError("a load curve needs a peak above 0 req/s and a least share of 0 to 1")
    low = least_share * peak_per_s
    points: Sequence[tuple[float, float]]
    if shape == "flat":
        points = [(0, peak_per_s)]
    elif shape == "office":
        points = [(7, low), (9, peak_per_s), (17, peak_per_s), (20, low)]
    elif shape == "sine":
        middle, swing = (peak_per_s + low) / 2, (peak_per_s - low) / 2
        points = [
            (hour / 2, middle + swing * math.cos(2 * math.pi * (hour / 2 - 14) / 24))
            for hour in range(48)
        ]
    else:
        raise InputError(f"--shape {shape}: use {', '.join(SHAPES)}")
    return LoadCurve(tuple(hour * _HOUR_S for hour, _ in points), tuple(rate for _, rate in points))
