"""The winner at every load between two rates, and the loads at which it changes.

A layout of planned capacity u (the lower end of its interval) needs ceil(rate / u) machines, so its
cost is a staircase; between two stairs of any layout nothing changes. The winner is therefore
found exactly: many cheap machines against one large one included. A crossover has the interval of
the capacity whose stair it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lmi_bench.analysis.fit.uncertainty import Estimate
from lmi_bench.analysis.fleet.candidates import CopyCapacity, machines_needed, with_capacity
from lmi_bench.analysis.fleet.recommender import Progress, best_copies, prepare, simulate_capacity
from lmi_bench.analysis.fleet.request import RecommendRequest
from lmi_bench.analysis.level.layouts import Layout
from lmi_bench.core.errors import InputError

_MOST_STAIRS = 2000  # of one layout; one that needs more machines is no candidate


@dataclass(frozen=True, slots=True)
class LoadInterval:
    """Loads above `from_per_s` up to `to_per_s` for which one layout costs least."""

    from_per_s: float
    to_per_s: float
    instance: str
    tensor_parallel: int
    copies: int
    fewest_machines: int
    most_machines: int
    least_usd_per_hour: float
    most_usd_per_hour: float

    def to_json(self) -> dict[str, Any]:
        """As it stands in the file."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class Variation:
    """Winners by load. crossovers: the rate at which each interval ends and the next begins; its
    low end is planned with, its predicted value expected."""

    intervals: tuple[LoadInterval, ...]
    crossovers: tuple[Estimate, ...]

    def at(self, rate_per_s: float) -> LoadInterval:
        """The interval of a load; raises InputError outside all of them."""
        for interval in self.intervals:
            if interval.from_per_s < rate_per_s <= interval.to_per_s:
                return interval
        raise InputError(f"{rate_per_s:g} req/s is outside the loads that were compared")

    def to_json(self) -> dict[str, Any]:
        """As it stands in the file."""
        return {
            "intervals": [interval.to_json() for interval in self.intervals],
            "crossovers_per_s": [figure.to_json() for figure in self.crossovers],
        }


@dataclass(frozen=True, slots=True)
class Stairs:
    """A layout as its staircase of cost.

    unit        requests each second that one machine carries: predicted, and the planned low end
    usd_per_h   cost of the fleet that carries k units, k from 1
    """

    layout: Layout
    unit: Estimate
    machines: tuple[int, ...]
    usd_per_h: tuple[float, ...]


def parse_range(text: str) -> tuple[float, float]:
    """`rate=A..B` as two rates; raises InputError with the form."""
    name, _, span = text.partition("=")
    low_text, separator, high_text = span.partition("..")
    try:
        low, high = float(low_text), float(high_text)
    except ValueError:
        low, high, separator = 0.0, 0.0, ""
    if name.strip() != "rate" or not separator or not 0 < low < high < math.inf:
        raise InputError(f"--vary {text}: write rate=A..B in requests a second, such as rate=1..50")
    return low, high


def vary_rate(
    request: RecommendRequest, low: float, high: float, *, progress: Progress | None = None
) -> Variation:
    """The cheapest layout for each load between two rates.

    Raises InputError where no priced layout can carry the lower one within its limits.
    """
    tell = progress or (lambda _text, _share: None)
    lowest = replace(request, rate_per_s=low, users=None, think_time_s=None)
    layouts, _ = prepare(lowest, tell)
    for index, rate in enumerate((math.sqrt(low * high), high)):
        tell("simulating the finalists of higher loads", 0.6 + 0.2 * index)
        for key, copy in best_copies(replace(lowest, rate_per_s=rate), layouts).items():
            if not copy.simulated:
                layouts = with_capacity(layouts, key, simulate_capacity(lowest, copy))
    stairs = [
        each
        for layout, copy in layouts
        if (each := _stairs_of(lowest, layout, copy, high)) is not None
    ]
    return compare_stairs(stairs, low, high)


def _stairs_of(
    request: RecommendRequest, layout: Layout, copy: CopyCapacity, most_per_s: float
) -> Stairs | None:
    """The staircase up to a load; None for a layout that is unpriced or cannot carry any."""
    least = machines_needed(replace(request, rate_per_s=1e-9), layout, copy)
    if least is None or request.fleet_usd_per_hour(layout, 1) is None:
        return None
    planned = copy.load_limit_per_s(keeps_slos=bool(request.slos)) * layout.copies
    steps = math.ceil(most_per_s / planned - 1e-9)
    if steps > _MOST_STAIRS:
        return None
    central = copy.central_per_s * layout.copies
    unit = Estimate(max(planned, central), planned, max(planned, central) * copy.factors.shorter)
    machines = tuple(request.availability.machines(max(least, k)) for k in range(1, steps + 1))
    prices = [request.fleet_usd_per_hour(layout, count) for count in machines]
    return Stairs(layout, unit, machines, tuple(price for price in prices if price is not None))


def compare_stairs(stairs: Sequence[Stairs], low: float, high: float) -> Variation:
    """Winners between two rates; on equal cost the layout with the larger machine.

    Raises InputError without any staircase.
    """
    if not stairs:
        raise InputError("no priced layout carries this load within its limits")
    ordered = sorted(stairs, key=lambda each: -each.unit.low)
    bounds: dict[float, tuple[Stairs, int]] = {}
    for each in ordered:
        for k in range(1, len(each.machines) + 1):
            bounds.setdefault(k * each.unit.low, (each, k))
    inside = sorted(rate for rate in bounds if low < rate < high)
    ends = np.array([*inside, high])
    costs = np.empty((len(ordered), len(ends)))
    for row, each in enumerate(ordered):
        units = np.ceil(ends / each.unit.low - 1e-9).astype(int)
        costs[row] = np.array(each.usd_per_h)[np.maximum(units, 1) - 1]
    winners = np.argmin(costs, axis=0)
    intervals: list[LoadInterval] = []
    crossovers: list[Estimate] = []
    from_per_s = low
    for column, winner in enumerate(winners):
        each, end = ordered[winner], float(ends[column])
        count = each.machines[max(1, math.ceil(end / each.unit.low - 1e-9)) - 1]
        cost = float(costs[winner, column])
        if column and winner == winners[column - 1]:
            last = intervals[-1]
            intervals[-1] = replace(
                last,
                to_per_s=end,
                most_machines=max(last.most_machines, count),
                most_usd_per_hour=max(last.most_usd_per_hour, cost),
            )
        else:
            if column:
                exhausted, k = bounds[from_per_s]
                crossovers.append(exhausted.unit.times(k))
            layout = each.layout
            intervals.append(
                LoadInterval(
                    from_per_s=from_per_s,
                    to_per_s=end,
                    instance=layout.instance.instance_type,
                    tensor_parallel=layout.tensor_parallel,
                    copies=layout.copies,
                    fewest_machines=count,
                    most_machines=count,
                    least_usd_per_hour=cost,
                    most_usd_per_hour=cost,
                )
            )
        from_per_s = end
    return Variation(tuple(intervals), tuple(crossovers))
