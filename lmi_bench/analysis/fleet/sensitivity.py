"""What would change the answer: the price, the load, or an SLO's limit, and by how much."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from lmi_bench.analysis.fleet.answer import Candidate, Recommendation
from lmi_bench.analysis.fleet.ranking import cost_of
from lmi_bench.analysis.fleet.recommender import best_fleets, prepare
from lmi_bench.analysis.fleet.request import RecommendRequest
from lmi_bench.analysis.fleet.vary import vary_rate
from lmi_bench.catalog.instances import Instance

_SPAN = 2.0  # the load is halved and doubled
_MARGIN = 1.25
_RIVALS = 6


def sensitivity(request: RecommendRequest, answer: Recommendation) -> list[dict[str, Any]]:
    """Each thing that could change the answer: `what`, `change`, and `text` for people.

    Empty where nothing is recommended. Loads and limits are tried among the machine types of the
    best candidates.
    """
    if answer.recommended is None:
        return []
    rivals = _rivals(request, answer)
    return [
        *_by_price(request, answer),
        *_by_load(request, answer.recommended, rivals),
        *_by_limits(request, answer.recommended, rivals),
    ]


def _rivals(request: RecommendRequest, answer: Recommendation) -> tuple[Instance, ...]:
    names = list(dict.fromkeys(candidate.instance for candidate in answer.candidates))[:_RIVALS]
    return tuple(each for each in request.considered if each.instance_type in names)


def _by_price(request: RecommendRequest, answer: Recommendation) -> Iterator[dict[str, Any]]:
    best = answer.candidates[0]
    cost = cost_of(request, best)
    if not request.objective.startswith("cost") or cost is None:
        return
    for rival in answer.candidates[1:]:
        other = cost_of(request, rival)
        if rival.instance != best.instance and other is not None:
            yield {
                "what": "price",
                "change": {"winner_up": other / cost - 1, "rival_down": 1 - cost / other},
                "text": (
                    f"price: {rival.instance} (TP {rival.tensor_parallel}) wins if "
                    f"{best.instance} becomes {other / cost - 1:.0%} dearer, or itself "
                    f"{1 - cost / other:.0%} cheaper"
                ),
            }
            return


def _by_load(
    request: RecommendRequest, best: Candidate, rivals: tuple[Instance, ...]
) -> Iterator[dict[str, Any]]:
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
    yield {
        "what": "load",
        "change": {"from_per_s": here.from_per_s, "to_per_s": here.to_per_s},
        "text": text,
    }


def _by_limits(
    request: RecommendRequest, best: Candidate, rivals: tuple[Instance, ...]
) -> Iterator[dict[str, Any]]:
    for index, slo in enumerate(request.slos):
        for factor in (1 / _MARGIN, _MARGIN):
            changed = replace(slo, limit_ms=slo.limit_ms * factor)
            slos = (*request.slos[:index], changed, *request.slos[index + 1 :])
            other = replace(request, slos=slos, instances=rivals)
            layouts, _ = prepare(other, lambda _text, _share: None)
            fleets = best_fleets(other, layouts, [])
            if not fleets:
                outcome = "nothing among the best candidates' machines keeps it"
            else:
                layout, _, machines = fleets[0]
                name = layout.instance.instance_type
                same = (name, layout.tensor_parallel, machines) == (
                    best.instance,
                    best.tensor_parallel,
                    best.instances,
                )
                price = other.fleet_usd_per_hour(layout, machines)
                cost = "" if price is None else f", USD {price:,.2f} per hour"
                outcome = "the same answer" if same else f"{machines} x {name}, TP "
                outcome += "" if same else f"{layout.tensor_parallel}{cost}"
            yield {
                "what": str(slo),
                "change": {"limit_ms": changed.limit_ms},
                "text": f"{slo.metric}_{slo.statistic}<={changed.limit_ms:.4g}ms: {outcome}",
            }
