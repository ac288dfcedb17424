"""A day of scaling: machines are launched when load grows, and serve only `start_s` later.

    start_s = detection + provisioning + image + weights + compile and graphs + warm-up

Capacity counts from launch + start_s, cost from launch. Load above the capacity waits, and requests
that arrive meanwhile miss the SLO. So target tracking keeps each machine at C_slo / (1 + g *
start_s), with the steepest relative growth g of the load. Load is a fluid, without single requests.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lmi_bench.analysis.fleet.money import NO_SPARES, Availability
from lmi_bench.analysis.fleet.start_up import StartUp
from lmi_bench.core.durable import read_text, table_rows
from lmi_bench.core.errors import InputError
from lmi_bench.core.units import SECONDS_PER_HOUR

DAY_S = 86_400.0
_HOUR_S = 3_600.0
_NOTHING, _SHORTEST_S, _MOST_PER_S = 1e-9, 1e-7, 1e9
SHAPES = ("flat", "office", "sine")


@dataclass(frozen=True, slots=True)
class LoadCurve:
    """Points of a day: rising seconds since midnight, and requests each second there."""

    times_s: tuple[float, ...]
    rates_per_s: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.times_s) != len(self.rates_per_s) or not self.times_s:
            raise InputError("a load curve needs at least one point, each a time and a rate")
        if any(not a + _SHORTEST_S <= b for a, b in pairwise(self.times_s)):
            raise InputError("the times of a load curve must rise")
        if not (self.times_s[0] >= 0 and self.times_s[-1] <= DAY_S):
            raise InputError("a load curve covers one day: hours 0 to 24")
        if any(not 0 <= rate <= _MOST_PER_S for rate in self.rates_per_s) or not self.peak_per_s:
            raise InputError("the rates of a load curve must be 0 or more, and one above 0")

    @property
    def peak_per_s(self) -> float:
        """Highest rate of the day."""
        return max(self.rates_per_s)

    def rates_at(self, times_s: NDArray[np.float64]) -> NDArray[np.float64]:
        """Requests each second, in the shape of the times."""
        return np.interp(times_s, self.times_s, self.rates_per_s, period=DAY_S)

    def scaled_to(self, peak_per_s: float) -> "LoadCurve":
        """The same shape with another peak."""
        factor = peak_per_s / self.peak_per_s
        return LoadCurve(self.times_s, tuple(rate * factor for rate in self.rates_per_s))

    def steepest_growth_per_s(self) -> float:
        """Largest relative growth a second, (dr/dt) / r; from 0 it is relative to the next rate."""
        rates, times = np.array(self.rates_per_s), np.array(self.times_s)
        rise, gaps_s = np.diff(rates, append=rates[0]), np.diff(times, append=times[0] + DAY_S)
        grows = rise > 0
        growth = rise[grows] / np.where(rates > _NOTHING, rates, rise)[grows]
        return float(max(growth / np.maximum(gaps_s[grows], _SHORTEST_S), default=0.0))


def load_curve_file(path: Path) -> LoadCurve:
    """A CSV with the columns `hour` (0 to 24) and `rate_per_s`. Raises InputError."""
    rows = table_rows(read_text(path), path)
    try:
        times = [float(row["hour"]) * _HOUR_S for row in rows]
        rates = [float(row["rate_per_s"]) for row in rows]
    except (KeyError, TypeError, ValueError) as exc:
        raise InputError(
            f"{path}: a load curve is a CSV with the columns hour and rate_per_s, numbers below them ({exc})"
        ) from exc
    return LoadCurve(tuple(times), tuple(rates))


def shaped(shape: str, *, peak_per_s: float, least_share: float = 0.2) -> LoadCurve:
    """A day of one of the `SHAPES`.

    flat    the peak all day
    office  the least share at night, rising from 7 to 9, the peak until 17, falling until 20
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
        points = [(hour / 2, middle + swing * math.cos(2 * math.pi * (hour / 2 - 14) / 24)) for hour in range(48)]
    else:
        raise InputError(f"--shape {shape}: use {', '.join(SHAPES)}")
    return LoadCurve(tuple(hour * _HOUR_S for hour, _ in points), tuple(rate for _, rate in points))


STEP_S = 10.0
_SCALE_IN_S = 300.0


@dataclass(frozen=True, slots=True)
class Scaling:
    """Target tracking of the number of machines.

    capacity_per_s  of a machine within the SLOs, in requests each second
    target_per_s    load of a machine to keep; capacity_per_s without head-room
    least           machines; fewer after five minutes of lower demand without waiting load
    availability    spare machines beside these, which are paid but not loaded
    """

    capacity_per_s: float
    target_per_s: float
    least: int = 1
    availability: Availability = NO_SPARES

    def wanted(self, rate_per_s: float) -> int:
        """Machines that a load needs."""
        return max(self.least, math.ceil(rate_per_s / self.target_per_s - 1e-9))


@dataclass(frozen=True, slots=True)
class DayResult:
    """A simulated day.

    slo_share      share of the day's requests that found capacity, 0 to 1
    machine_hours  billed from launch; peak_machines: at once
    worst_wait_s   longest time to work off the waiting load
    paid           billed machines in each step of the day
    """

    slo_share: float
    machine_hours: float
    peak_machines: int
    launches: int
    worst_wait_s: float
    paid: tuple[int, ...]

    def cost_usd(self, price_usd_per_hour: float | None) -> float | None:
        """Cost of the day; None without a price."""
        return None if price_usd_per_hour is None else self.machine_hours * price_usd_per_hour


def play_day(curve: LoadCurve, scaling: Scaling, start_up: StartUp, *, step_s: float = STEP_S) -> DayResult:
    """Simulate one day, after an uncounted day that gives it its first state."""
    start_s, paid_after_s = start_up.total_s, start_up.detection_s
    times = np.arange(0.0, 2 * DAY_S, step_s)
    rates = curve.rates_at(times + step_s / 2)
    ready = scaling.wanted(float(rates[0]))
    coming: deque[tuple[float, int]] = deque()  # when launched machines serve, and how many
    fewer_since_s: float | None = None
    waiting = good = arrived = worst_wait_s = 0.0
    launches, history = 0, []
    for now_s, rate in zip(times.tolist(), rates.tolist(), strict=True):
        counted = now_s >= DAY_S
        wanted = scaling.wanted(rate)
        if (more := wanted - ready - sum(number for _, number in coming)) > 0:
            coming.append((now_s + start_s, more))
            launches += more * counted
        while coming and coming[0][0] <= now_s + 1e-9:
            ready += coming.popleft()[1]
        if wanted < ready and waiting <= _NOTHING:
            fewer_since_s = now_s if fewer_since_s is None else fewer_since_s
            if now_s - fewer_since_s >= _SCALE_IN_S:
                ready, fewer_since_s = wanted, None
        else:
            fewer_since_s = None
        capacity = ready * scaling.capacity_per_s
        before = waiting
        waiting = max(0.0, waiting + (rate - capacity) * step_s)
        if counted:
            paid_s = now_s + start_s - paid_after_s + 1e-9
            arrived += rate * step_s
            if before <= _NOTHING and waiting <= _NOTHING:
                good += rate * step_s
            worst_wait_s = max(worst_wait_s, waiting / capacity)
            paid = ready + sum(n for serves_s, n in coming if serves_s <= paid_s)
            history.append(scaling.availability.machines(paid))
    if not arrived:
        raise InputError(f"the load's peaks are shorter than a step of {step_s:g} s")
    return DayResult(
        slo_share=good / arrived,
        machine_hours=sum(history) * step_s / SECONDS_PER_HOUR,
        peak_machines=max(history),
        launches=launches,
        worst_wait_s=worst_wait_s,
        paid=tuple(history),
    )


@dataclass(frozen=True, slots=True)
class DayPlan:
    """Scaling against a flat fleet; `scales`: scaling is better, for the reason `why`."""

    scaled: DayResult
    scaling: Scaling
    flat: DayResult
    flat_machines: int
    scales: bool
    why: str

    @property
    def chosen(self) -> DayResult:
        """The better of the two."""
        return self.scaled if self.scales else self.flat


def plan_day(
    curve: LoadCurve,
    start_up: StartUp,
    *,
    capacity_per_s: float,
    least_slo_share: float = 0.99,
    availability: Availability = NO_SPARES,
) -> DayPlan:
    """Whether to scale over the day or to keep the peak's machines all day.

    capacity_per_s   of one machine within the SLOs: the lower end of its interval
    least_slo_share  of the day's requests that must meet the SLOs, ramps included
    """
    if not 0 < least_slo_share <= 1:
        raise InputError(f"the SLO share must be above 0 and at most 1, got {least_slo_share:g}")
    target = capacity_per_s / (1 + curve.steepest_growth_per_s() * start_up.total_s)
    scaling = Scaling(capacity_per_s, target, availability=availability)
    flat_machines = max(1, math.ceil(curve.peak_per_s / capacity_per_s - 1e-9))
    fixed = replace(scaling, target_per_s=capacity_per_s, least=flat_machines)
    scaled = play_day(curve, scaling, start_up)
    flat = play_day(curve, fixed, start_up)
    flat_machines = availability.machines(flat_machines)
    kept = f"{scaled.slo_share:.2%} of the day's requests"
    saved = 1 - scaled.machine_hours / flat.machine_hours
    scales = False
    if scaled.slo_share < least_slo_share:
        why = f"scaling keeps the SLOs for {kept}, below {least_slo_share:.2%}: a machine serves "
        why += f"{start_up.total_s:,.0f} s after it is needed"
    elif scaled.machine_hours >= flat.machine_hours:
        why = f"scaling pays for {scaled.machine_hours:,.1f} machine hours, a flat fleet of "
        why += f"{flat_machines} for {flat.machine_hours:,.1f}"
    else:
        scales = True
        why = f"scaling saves {saved:.0%} of the machine hours and keeps the SLOs for {kept}"
    return DayPlan(scaled, scaling, flat, flat_machines, scales, why)
