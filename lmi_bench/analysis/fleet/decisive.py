"""Which level to measure next: the one that may save most, or that confirms what is recommended.

A cheaper fleet is worth a measurement by chance * saving: the probability that a copy carries its
share of the load within the SLOs, and what an hour would cost less. One copy under that share,
measured on one machine, decides it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from lmi_bench.analysis.fleet.answer import Probe
from lmi_bench.analysis.fleet.candidates import CopyCapacity, Planned
from lmi_bench.analysis.fleet.request import RecommendRequest
from lmi_bench.analysis.level.layouts import EngineKey, Layout

MOST_MACHINES = 1000  # of a fleet that is worth planning
_DECIDES_LATER = 0.3  # odds that a level on the line turns out to keep its SLOs
_LEAST_CHANCE = 0.02
_LEAST_SAVING = 0.005  # of the recommended fleet's cost, times its chance


def decisive_probes(
    request: RecommendRequest,
    layouts: Sequence[Planned],
    best: tuple[Layout, CopyCapacity, int] | None,
) -> list[Probe]:
    """Levels worth measuring, the most telling first.

    best  the recommended fleet, its machines with the spare ones; None where nothing is

    Only for a rate under SLOs, ranked by cost: elsewhere nothing is decided by one level.
    """
    if request.rate_per_s is None or not request.slos or not request.objective.startswith("cost"):
        return []
    cost = math.inf
    if best is not None:
        known = request.fleet_usd_per_hour(best[0], best[2])
        if known is None:
            return []
        cost = known
    cheaper: list[tuple[float, Probe]] = []
    for layout, copy in layouts:
        cheaper += _cheaper_fleets(request, layout, copy, cost)
        cheaper += _undecided(request, layout, copy, cost)
    cheaper.sort(key=lambda pair: -pair[0])
    by_engine: dict[EngineKey, Probe] = {}
    for _, probe in cheaper:  # one copy tells the same of every machine that it can be had on
        by_engine.setdefault(probe.layout.engine_key, probe)
    probes = list(by_engine.values())
    if best is not None:
        probes += _confirming(request, *best)
    return probes


def _cheaper_fleets(
    request: RecommendRequest, layout: Layout, copy: CopyCapacity, cost: float
) -> Iterator[tuple[float, Probe]]:
    """The fleet of the layout that is best worth a measurement, with what it is worth."""
    assert request.rate_per_s is not None
    belief = copy.belief(keeps_slos=True)
    on_the_line = [rate for rate, verdict in copy.measured if verdict in ("near", "open")]
    best: tuple[float, Probe] | None = None
    for machines in range(1, MOST_MACHINES + 1):
        price = request.fleet_usd_per_hour(layout, request.availability.machines(machines))
        rate = request.rate_per_s / (machines * layout.copies)
        if price is None or price >= cost * (1 - 1e-9):
            break
        if any(math.isclose(rate, each) for each in on_the_line):
            continue  # once more tells little of one that is near; `_undecided` has the others
        chance = belief.chance(rate)
        saving = 1.0 / price if cost == math.inf else (cost - price) / cost
        worth = chance * saving
        if chance >= _LEAST_CHANCE and (best is None or worth > best[0]):
            saved = 0.0 if cost == math.inf else cost - price
            best = (worth, Probe(layout, rate, machines, chance, saved))
        if chance > 0.99:
            break
    if best is not None and (cost == math.inf or best[0] >= _LEAST_SAVING):
        yield best


def _undecided(
    request: RecommendRequest, layout: Layout, copy: CopyCapacity, cost: float
) -> Iterator[tuple[float, Probe]]:
    """Levels that were too short to tell: once more at the same rate, to be pooled."""
    assert request.rate_per_s is not None
    for rate, verdict in copy.measured:
        machines = max(1, round(request.rate_per_s / (rate * layout.copies)))
        price = request.fleet_usd_per_hour(layout, request.availability.machines(machines))
        serves = request.rate_per_s / (machines * layout.copies) <= rate * (1 + 1e-9)
        if (
            verdict not in ("near", "open")
            or price is None
            or not serves
            or price >= cost * (1 - 1e-9)
        ):
            continue
        saved = 0.0 if cost == math.inf else cost - price
        worth = 1.0 / price if cost == math.inf else saved / cost
        yield _DECIDES_LATER * worth, Probe(layout, rate, machines, _DECIDES_LATER, saved)


def _confirming(
    request: RecommendRequest, layout: Layout, copy: CopyCapacity, machines: int
) -> Iterator[Probe]:
    """The recommended fleet's own load, unless as much was measured."""
    assert request.rate_per_s is not None
    serving = request.availability.surviving(machines)
    rate = request.rate_per_s / (serving * layout.copies)
    if rate > copy.kept_per_s * (1 + 1e-9):
        chance = copy.belief(keeps_slos=True).chance(rate)
        yield Probe(layout, rate, serving, chance, 0.0)
