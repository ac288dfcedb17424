"""What a recommendation prints below its table: money, availability, unpriced machines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lmi_bench.analysis.fleet_cost import price_line
from lmi_bench.analysis.recommendation import Candidate, Recommendation

_SHOWN_UNPRICED = 5


def money_lines(chosen: Candidate) -> Iterator[str]:
    """The chosen fleet's price, how it is bought, and what availability adds."""
    cost = chosen.cost
    yield f"price: {price_line(cost)}; bought {cost['purchase']}"
    if cost["discount"] and not cost["purchase"].startswith("spot"):
        yield (
            f"  commitment: pays where a machine is needed for more than "
            f"{cost['break_even_utilisation']:.0%} of the hours (break-even utilisation)"
        )
    if cost["availability"] != "none":
        extra = cost["availability_usd_per_hour"]
        added = "price unknown" if extra is None else f"USD {extra:,.2f} per hour"
        yield (
            f"availability {cost['availability']}: {cost['machines_for_the_load']} machine(s) "
            f"carry the load, {cost['spare_machines']} more add {added}"
        )
    yield f"failure unit: {cost['failure_unit']}"


def unpriced_lines(answer: Recommendation) -> Iterator[str]:
    """Candidates without a price, with the price at which each would win."""
    wins = [
        (price, candidate)
        for candidate in answer.candidates
        if (price := candidate.cost.get("wins_below_usd_per_machine_hour")) is not None
    ]
    for price, candidate in wins[:_SHOWN_UNPRICED]:
        yield (
            f"no price known: {candidate.instances} x {candidate.instance}, TP "
            f"{candidate.tensor_parallel} would win below USD {price:,.2f} a machine and hour"
        )
    if len(wins) > _SHOWN_UNPRICED:
        yield f"and {len(wins) - _SHOWN_UNPRICED} more unpriced layouts, in the --json file"


def price_cells(candidate: Candidate) -> dict[str, Any]:
    """Where a row's price is from: component, region, date."""
    cost = candidate.cost
    if cost.get("machine_price_usd_per_hour") is None:
        return {"price of": "unknown"}
    date = str(cost["price_date"]).split(" (")[0]
    component = str(cost["price_component"]).replace("component not stated", "")
    return {"price of": f"{cost['price_region']} {date} {component}".strip()}
