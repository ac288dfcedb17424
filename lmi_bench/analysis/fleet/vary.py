"""Changes of the answer: the cheapest layout at every load, and other prices and SLO limits.

A layout of planned capacity u (the lower end of its interval) needs ceil(rate / u) machines, so its
cost is a staircase and the winner changes only at stairs: it is found exactly. A crossover has the
interval of the capacity whose stair it is.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from lmi_bench.analysis.fit.uncertainty import Estimate
from lmi_bench.analysis.fleet.answer import Candidate, LoadInterval, Recommendation, Variation
from lmi_bench.analysis.fleet.candidates import CopyCapacity, machines_needed, with_capacity
from lmi_bench.analysis.fleet.ranking import cost_of
from lmi_bench.analysis.fleet.recommender import best_copies, best_fleets, prepare, simulate_capacity
from lmi_bench.analysis.fleet.request import RecommendRequest
from lmi_bench.analysis.level.layouts import Layout
from lmi_bench.catalog.instances import Instance
from lmi_bench.core.errors import InputError
from lmi_bench.core.load import Load

_MOST_STAIRS = 2000  # limit on a layout's machines
_SPAN = 2.0  # the load is halved and doubled
_MARGIN = 1.25
_RIVALS = 6


@dataclass(frozen=True, slots=True)
class Stairs:
    """A layout's staircase of cost.

    unit       capacity of one machine in requests each second; the lower end is planned with
    usd_per_h  cost of the fleet for k units, k from 1
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


def vary_rate(request: RecommendRequest, low: float, high: float) -> Variation:
    """The cheapest layout for each load between two rates; raises InputError if there is none."""
    lowest = replace(request, load=Load(rate_per_s=low))
    layouts, _ = prepare(lowest)
    for rate in (math.sqrt(low * high), high):  # the finalists of higher loads
        for key, copy in best_copies(replace(lowest, load=Load(rate_per_s=rate)), layouts).items():
            if not copy.simulated:
                layouts = with_capacity(layouts, key, simulate_capacity(lowest, copy))
    stairs = [each for layout, copy in layouts if (each := _stairs_of(lowest, layout, copy, high)) is not None]
    return compare_stairs(stairs, low, high)


def _stairs_of(request: RecommendRequest, layout: Layout, copy: CopyCapacity, most_per_s: float) -> Stairs | None:
    """The staircase up to a load; None for a layout without a price or capacity."""
    least = machines_needed(replace(request, load=Load(rate_per_s=1e-9)), layout, copy)
    if least is None or request.fleet_usd_per_hour(layout, 1) is None:
        return None
    planned = copy.belief(keeps_slos=bool(request.slos)).sure_per_s * layout.copies
    steps = math.ceil(most_per_s / planned - 1e-9)
    if steps > _MOST_STAIRS:
        return None
    central = copy.central_per_s * layout.copies
    unit = Estimate(max(planned, central), planned, max(planned, central) * copy.factors.shorter)
    machines = tuple(request.availability.machines(max(least, k)) for k in range(1, steps + 1))
    prices = [request.fleet_usd_per_hour(layout, count) for count in machines]
    return Stairs(layout, unit, machines, tuple(price for price in prices if price is not None))


def compare_stairs(stairs: Sequence[Stairs], low: float, high: float) -> Variation:
    """Winners between two rates; on equal cost the larger machine. Raises InputError if none."""
    if not stairs:
        raise InputError("no priced layout carries this load within its limits")
    ordered = sorted(stairs, key=lambda each: -each.unit.low)
    bounds: dict[float, tuple[Stairs, int]] = {}
    for each in ordered:
        for k in range(1, len(each.machines) + 1):
            bounds.setdefault(k * each.unit.low, (each, k))
    inside = sorted(rate for rate in bounds if low < rate < high)
    ends = np.array([*inside, high])
    units = np.array([np.ceil(ends / each.unit.low - 1e-9).astype(int) for each in ordered])
    units = np.maximum(units, 1) - 1
    costs = [np.array(each.usd_per_h)[own] for each, own in zip(ordered, units, strict=True)]
    winners = np.argmin(costs, axis=0)
    starts = np.flatnonzero(np.diff(winners, prepend=-1)).tolist()
    intervals: list[LoadInterval] = []
    crossovers: list[Estimate] = []
    for start, end in pairwise([*starts, len(ends)]):
        winner = winners[start]
        layout, won = ordered[winner].layout, slice(start, end)
        counts = [ordered[winner].machines[k] for k in units[winner, won]]
        usd = costs[winner][won]
        intervals.append(
            LoadInterval(
                from_per_s=float(ends[start - 1]) if start else low,
                to_per_s=float(ends[end - 1]),
                instance=layout.instance.instance_type,
                tensor_parallel=layout.tensor_parallel,
                copies=layout.copies,
                fewest_machines=counts[0],
                most_machines=max(counts),
                least_usd_per_hour=float(usd[0]),
                most_usd_per_hour=float(usd.max()),
            )
        )
        if start:
            exhausted, k = bounds[intervals[-1].from_per_s]
            crossovers.append(exhausted.unit.times(k))
    return Variation(tuple(intervals), tuple(crossovers))


class AnswerChange(NamedTuple):
    """A change of price, load or SLO limit, and what it does to the answer, for people."""

    what: str
    change: Mapping[str, float]
    text: str


def sensitivity(request: RecommendRequest, answer: Recommendation) -> list[AnswerChange]:
    """The changes of price, load or SLO limit that change the answer.

    Empty without a recommendation. Considers only machine types of the best candidates.
    """
    if answer.recommended is None:
        return []
    names = list(dict.fromkeys(candidate.instance for candidate in answer.candidates))[:_RIVALS]
    rivals = tuple(each for each in request.instances if each.instance_type in names)
    return [
        *_by_price(request, answer),
        *_by_load(request, answer.recommended, rivals),
        *_by_limits(request, answer.recommended, rivals),
    ]


def _by_price(request: RecommendRequest, answer: Recommendation) -> Iterator[AnswerChange]:
    best = answer.candidates[0]
    cost = cost_of(request, best)
    if not request.objective.startswith("cost") or cost is None:
        return
    for rival in answer.candidates[1:]:
        other = cost_of(request, rival)
        if rival.instance != best.instance and other is not None:
            up, down = other / cost - 1, 1 - cost / other
            yield AnswerChange(
                "price",
                {"winner_up": up, "rival_down": down},
                f"price: {rival.instance} (TP {rival.tensor_parallel}) wins if {best.instance} "
                f"becomes {up:.0%} dearer, or itself {down:.0%} cheaper",
            )
            return


def _by_load(request: RecommendRequest, best: Candidate, rivals: tuple[Instance, ...]) -> Iterator[AnswerChange]:
    rate = request.rate_per_s
    if rate is None or best.price_usd_per_hour is None or request.objective == "latency":
        return
    found = vary_rate(replace(request, instances=rivals), rate / _SPAN, rate * _SPAN)
    index = next(i for i, each in enumerate(found.intervals) if rate <= each.to_per_s)
    here = found.intervals[index]
    text = f"load: {here.instance} (TP {here.tensor_parallel}) stays cheapest from "
    text += f"{here.from_per_s:.3g} to {here.to_per_s:.3g} req/s"
    if index + 1 < len(found.intervals):
        after = found.intervals[index + 1]
        crossover = found.crossovers[index]
        text += f", then {after.fewest_machines} x {after.instance} (if the capacity is as "
        text += f"predicted, from {crossover.value:.3g} req/s)"
    if index:
        text += f"; below, {found.intervals[index - 1].instance}"
    yield AnswerChange("load", {"from_per_s": here.from_per_s, "to_per_s": here.to_per_s}, text)


def _by_limits(request: RecommendRequest, best: Candidate, rivals: tuple[Instance, ...]) -> Iterator[AnswerChange]:
    for index, slo in enumerate(request.slos):
        for factor in (1 / _MARGIN, _MARGIN):
            changed = replace(slo, limit_ms=slo.limit_ms * factor)
            slos = (*request.slos[:index], changed, *request.slos[index + 1 :])
            other = replace(request, slos=slos, instances=rivals)
            layouts, _ = prepare(other)
            fleets = best_fleets(other, layouts, [])
            if not fleets:
                outcome = "nothing among the best candidates' machines keeps it"
            else:
                layout, _, machines = fleets[0]
                name, degree = layout.instance.instance_type, layout.tensor_parallel
                price = other.fleet_usd_per_hour(layout, machines)
                cost = "" if price is None else f", USD {price:,.2f} per hour"
                outcome = f"{machines} x {name}, TP {degree}{cost}"
                same = (best.instance, best.tensor_parallel, best.instances)
                if (name, degree, machines) == same:
                    outcome = "the same answer"
            text = f"{slo.metric}_{slo.statistic}<={changed.limit_ms:.4g}ms: {outcome}"
            yield AnswerChange(str(slo), {"limit_ms": changed.limit_ms}, text)
