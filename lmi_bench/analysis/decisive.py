"""Which level to measure next: the one that may save most, or that confirms what is recommended.

A cheaper fleet is worth a measurement by chance * saving: the probability that a copy carries its
share of the load within the SLOs, and what an hour would cost less. One copy under that share,
measured on one machine, decides it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from lmi_bench.analysis.candidates import Engine
from lmi_bench.analysis.layouts import Layout
from lmi_bench.analysis.probe import Probe
from lmi_bench.analysis.recommend_request import RecommendRequest

_LEAST_CHANCE = 0.05
_LEAST_SAVING = 0.01  # of the recommended fleet's cost, times its chance


def decisive_probes(
    request: RecommendRequest,
    layouts: Sequence[tuple[Layout, Engine]],
    best: tuple[Layout, Engine, int] | None,
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
    for layout, engine in layouts:
        cheaper += _cheaper_fleets(request, layout, engine, cost)
    cheaper.sort(key=lambda pair: -pair[0])
    probes = [probe for _, probe in cheaper]
    if best is not None:
        probes += _confirming(request, *best)
    return probes


def _cheaper_fleets(
    request: RecommendRequest, layout: Layout, engine: Engine, cost: float
) -> Iterator[tuple[float, Probe]]:
    """The fleet of the layout that is best worth a measurement, with what it is worth."""
    assert request.rate_per_s is not None
    belief = engine.belief(keeps_slos=True)
    best: tuple[float, Probe] | None = None
    machines = 0
    while True:
        machines += 1
        price = request.fleet_usd_per_hour(layout, request.availability.machines(machines))
        rate = request.rate_per_s / (machines * layout.copies)
        if price is None or price >= cost * (1 - 1e-9):
            break
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


def _confirming(
    request: RecommendRequest, layout: Layout, engine: Engine, machines: int
) -> Iterator[Probe]:
    """The recommended fleet's own load, unless as much was measured."""
    assert request.rate_per_s is not None
    serving = request.availability.surviving(machines)
    rate = request.rate_per_s / (serving * layout.copies)
    if rate > engine.kept_per_s * (1 + 1e-9):
        chance = engine.belief(keeps_slos=True).chance(rate)
        yield Probe(layout, rate, serving, chance, 0.0)
