"""The level to measure next: the one that may save most, or that confirms the recommendation.

The value of measuring a cheaper fleet is chance * saving: the probability that a copy carries its
share of the load within the SLOs, times the saved USD an hour. One measured copy decides it.
"""

import math
from collections.abc import Iterator, Sequence

from lmi_bench.analysis.fleet.answer import Measurement
from lmi_bench.analysis.fleet.candidates import CopyCapacity, Fleet, Planned
from lmi_bench.analysis.fleet.request import RecommendRequest
from lmi_bench.analysis.level.layouts import EngineKey, Layout

MOST_MACHINES = 1000  # of a planned fleet
_DECIDES_LATER = 0.3  # probability that an undecided level keeps its SLOs in the end
_LEAST_CHANCE = 0.02
_LEAST_SAVING = 0.005  # of the recommended fleet's cost, times its chance


def decisive_measurements(
    request: RecommendRequest, layouts: Sequence[Planned], best: Fleet | None
) -> list[Measurement]:
    """Levels worth measuring, the most informative first; best: the recommended fleet, if any.

    Only for a rate under SLOs, ranked by cost: elsewhere no single level decides.
    """
    if request.rate_per_s is None or not request.slos or not request.objective.startswith("cost"):
        return []
    cost = math.inf
    if best is not None:
        known = request.fleet_usd_per_hour(best.layout, best.machines)
        if known is None:
            return []
        cost = known
    cheaper: list[tuple[float, Measurement]] = []
    for layout, copy in layouts:
        cheaper += _cheaper_fleets(request, layout, copy, cost)
        cheaper += _undecided(request, layout, copy, cost)
    cheaper.sort(key=lambda pair: -pair[0])
    by_engine: dict[EngineKey, Measurement] = {}
    for _, each in cheaper:  # one copy decides for every machine with the same engine
        by_engine.setdefault(each.layout.engine_key, each)
    measurements = list(by_engine.values())
    if best is not None:
        measurements += _confirming(request, best)
    return measurements


def _saving(
    request: RecommendRequest, layout: Layout, machines: int, cost: float
) -> tuple[float, float] | None:
    """USD saved an hour, and their value to rank by; None if the fleet is not cheaper.

    cost  of the recommended fleet in USD an hour, infinite without one: then nothing is saved, and
          the cheapest fleet has the highest value
    """
    price = request.fleet_usd_per_hour(layout, request.availability.machines(machines))
    if price is None or price >= cost * (1 - 1e-9):
        return None
    return (0.0, 1.0 / price) if cost == math.inf else (cost - price, (cost - price) / cost)


def _cheaper_fleets(
    request: RecommendRequest, layout: Layout, copy: CopyCapacity, cost: float
) -> Iterator[tuple[float, Measurement]]:
    """The layout's fleet with the highest value of a measurement, and that value."""
    assert request.rate_per_s is not None
    belief = copy.belief(keeps_slos=True)
    undecided = [rate for rate, verdict in copy.measured if verdict in ("near", "open")]
    best: tuple[float, Measurement] | None = None
    for machines in range(1, MOST_MACHINES + 1):
        saving = _saving(request, layout, machines, cost)
        rate = request.rate_per_s / (machines * layout.copies)
        if saving is None:
            break
        if any(math.isclose(rate, each) for each in undecided):
            continue  # `_undecided` has them
        chance = belief.chance(rate)
        worth = chance * saving[1]
        if chance >= _LEAST_CHANCE and (best is None or worth > best[0]):
            best = (worth, Measurement(layout, rate, machines, chance, saving[0]))
        if chance > 0.99:
            break
    if best is not None and (cost == math.inf or best[0] >= _LEAST_SAVING):
        yield best


def _undecided(
    request: RecommendRequest, layout: Layout, copy: CopyCapacity, cost: float
) -> Iterator[tuple[float, Measurement]]:
    """Undecided levels: measured again at the same rate, to be joined."""
    assert request.rate_per_s is not None
    for rate, verdict in copy.measured:
        machines = max(1, round(request.rate_per_s / (rate * layout.copies)))
        saving = _saving(request, layout, machines, cost)
        serves = request.rate_per_s / (machines * layout.copies) <= rate * (1 + 1e-9)
        if verdict in ("near", "open") and serves and saving is not None:
            saved, worth = saving
            yield _DECIDES_LATER * worth, Measurement(layout, rate, machines, _DECIDES_LATER, saved)


def _confirming(request: RecommendRequest, fleet: Fleet) -> Iterator[Measurement]:
    """The recommended fleet's own load, unless it was measured."""
    assert request.rate_per_s is not None
    layout, copy, machines = fleet
    serving = request.availability.surviving(machines)
    rate = request.rate_per_s / (serving * layout.copies)
    if rate > copy.kept_per_s * (1 + 1e-9):
        chance = copy.belief(keeps_slos=True).chance(rate)
        yield Measurement(layout, rate, serving, chance, 0.0)
