"""Order of fleets by the objective, frontier of cost and latency, budget, and what to measure next.

A fleet without a price never wins on cost, nor one without a latency on latency. The value of
measuring a cheaper fleet is chance * saving: the probability that a copy carries its share of the
load within the SLOs, times the saved USD an hour. One measured copy decides it.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from lmi_bench.analysis.fleet.answer import PRICE_ESTIMATED, PRICE_UNKNOWN, Candidate, Measurement
from lmi_bench.analysis.fleet.candidates import CopyCapacity, Fleet, Planned
from lmi_bench.analysis.fleet.request import RecommendRequest
from lmi_bench.analysis.level.layouts import EngineKey, Layout, Rejection
from lmi_bench.core.units import SECONDS_PER_HOUR

_EQUAL = 1.03  # ratio of latencies: measured ones repeat no closer


def screen_order(request: RecommendRequest, fleet: Fleet) -> tuple[float, ...]:
    """The objective in closed form; smaller is better, fleets without a price last."""
    layout, copy, machines = fleet
    copies = machines * layout.copies
    price = request.fleet_usd_per_hour(layout, machines)
    cost = math.inf if price is None else price
    per_token = request.load is None and request.objective != "cost-per-hour"
    if per_token or request.objective == "cost-per-1m":
        cost /= copies * copy.rate_per_s
    if request.objective == "latency":
        batch = copy.concurrency
        if request.rate_per_s is not None:
            batch = math.ceil(copy.plan.steady.batch_at(request.rate_per_s / copies))
        return (copy.plan.steady.latency_s("e2e", "p90", max(1, batch)), cost)
    if request.objective == "throughput":
        return (-layout.copies * copy.rate_per_s, cost)
    return (cost, -layout.copies * copy.rate_per_s)


def ranked(request: RecommendRequest, candidates: Sequence[Candidate]) -> list[Candidate]:
    """The candidates, the best first; for latency, the cheapest of those as fast as the fastest."""
    found = sorted(candidates, key=lambda candidate: final_order(request, candidate))
    if request.objective != "latency" or not found:
        return found
    fastest, _ = final_order(request, found[0])
    equal = [each for each in found if final_order(request, each)[0] <= _EQUAL * fastest]
    equal.sort(key=lambda each: final_order(request, each)[1])
    return equal + found[len(equal) :]


def final_order(request: RecommendRequest, candidate: Candidate) -> tuple[float, ...]:
    """The objective by the finished figures; smaller is better."""

    def figure(name: str) -> float:
        value = candidate.figures.get(name)
        return math.inf if value is None else value.value

    cost = cost_of(request, candidate)
    cost = math.inf if cost is None else cost
    latency = figure("latency_per_token_p90_ms")
    if request.objective == "latency":
        price = candidate.price_usd_per_hour
        return (latency, math.inf if price is None else price)
    if request.objective == "throughput":
        return (-figure("capacity_tokens_per_s") / candidate.instances, cost)
    return (cost, latency)


def cost_of(request: RecommendRequest, candidate: Candidate) -> float | None:
    """The objective's cost in USD: of an hour, or of 1M output tokens."""
    if request.objective == "cost-per-hour":
        return candidate.price_usd_per_hour
    if request.objective == "cost-per-1m":
        return candidate.cost.usd_per_1m_output_tokens_at_capacity
    return candidate.usd_per_1m_output_tokens


def with_winning_prices(request: RecommendRequest, ranked: Sequence[Candidate]) -> list[Candidate]:
    """The candidates; each without a price gets the machine price at which it would win."""
    best = cost_of(request, ranked[0])
    if best is None or request.objective in ("latency", "throughput"):
        return list(ranked)
    return [_with_winning_price(request, candidate, best) for candidate in ranked]


def _with_winning_price(request: RecommendRequest, candidate: Candidate, best: float) -> Candidate:
    """With the on-demand price of one machine at which the fleet costs as much as the best one."""
    paid_hours = candidate.cost.paid_machine_hours_per_hour
    if candidate.price_usd_per_hour is not None or not paid_hours:
        return candidate
    if request.objective != "cost-per-hour":
        at_capacity = request.objective == "cost-per-1m"
        name = "capacity_tokens_per_s" if at_capacity else "throughput_tokens_per_s"
        tokens = candidate.figures[name]
        if tokens is None:
            return candidate
        best = best * tokens.value * SECONDS_PER_HOUR / 1e6
    cost = replace(candidate.cost, wins_below_usd_per_machine_hour=best / paid_hours)
    return replace(candidate, cost=cost)


def price_caveats(request: RecommendRequest, ranked: Sequence[Candidate]) -> Iterator[str]:
    """What the first lines of the answer say about prices.

    A machine without a price matters if its fleet would be the cheapest at a price of its memory
    bandwidth that some other machine has.
    """
    if not ranked or not request.objective.startswith("cost"):
        return
    best, machines = ranked[0], {each.instance_type: each for each in request.instances}
    if best.price_range_usd_per_hour is not None:
        of = str(best.cost.price_component).replace("component not stated", "an unnamed service")
        yield f"{PRICE_ESTIMATED} it is that of {of}; check the hosting price before buying"
    rates = {
        name: each.num_accelerators * (each.accelerator.bandwidth_bytes_per_s or 0.0) for name, each in machines.items()
    }
    least = min(
        (
            each.price_usd_per_hour / rates[name]
            for name, each in machines.items()
            if each.price_usd_per_hour and rates[name]
        ),
        default=math.inf,
    )
    wins: dict[str, float] = {}
    for each in ranked:
        price = each.cost.wins_below_usd_per_machine_hour
        if price is not None and price >= least * rates.get(each.instance, math.inf):
            wins[each.instance] = max(price, wins.get(each.instance, 0.0))
    for name, price in wins.items():
        yield f"{PRICE_UNKNOWN} {name}: below USD {price:,.2f} an hour it would be the cheapest"


def _too_close(best: Candidate, second: Candidate) -> bool:
    """Whether the second may be cheaper at saturation, within the intervals of the capacities."""
    cost = best.usd_per_1m_output_tokens_at_saturation
    other = second.usd_per_1m_output_tokens_at_saturation
    ours, theirs = (c.figures["capacity_rate_per_s"] for c in (best, second))
    if cost is None or other is None or ours is None or theirs is None:
        return False
    dearest = cost * ours.value / ours.low
    return other * theirs.value / theirs.high < dearest


def why_first(request: RecommendRequest, ranked: list[Candidate]) -> str:
    """The reason for the first candidate, against the best one on another accelerator."""
    best = ranked[0]
    measure = {
        "cost": "least cost",
        "cost-per-hour": "least cost an hour",
        "cost-per-1m": "least cost of 1M tokens at capacity",
        "latency": "least latency per token (p90)",
        "throughput": "most tokens a second from one machine",
    }[request.objective]
    text = f"{measure} for {request.describe_load()}"
    if request.slos:
        text += " within the SLOs"
    if request.objective.startswith("cost") and best.price_usd_per_hour is None:
        text = f"no price is known, so ranked by latency for {request.describe_load()}"
    second = next((c for c in ranked[1:] if c.accelerator != best.accelerator), None)
    cost, other = best.usd_per_1m_output_tokens, second and second.usd_per_1m_output_tokens
    if second is not None and cost is not None and other is not None:
        text += f"; best on another accelerator: {second.instances} x {second.instance} at "
        text += f"{other:,.2f} USD against {cost:,.2f} for 1M output tokens"
        if request.load is None and _too_close(best, second):
            text += ", within the intervals: a tie"
    return text


def frontier(request: RecommendRequest, candidates: Sequence[Candidate]) -> list[Candidate]:
    """Candidates on the frontier of cost and ms/token (p90), the cheapest first.

    Candidates without a price or a latency are left out. Of equal points the first stays.
    """
    points: dict[tuple[float, ...], Candidate] = {}
    for candidate in candidates:
        cost = cost_of(request, candidate)
        latency = candidate.figures.get("latency_per_token_p90_ms")
        if cost is not None and latency is not None and math.isfinite(cost):
            points.setdefault((cost, latency.value), candidate)
    front: list[tuple[float, ...]] = []
    for point in sorted(points):  # of those that cost no more, none is as fast
        if not front or point[1] < front[-1][1]:
            front.append(point)
    return [points[point] for point in front]


def _by_limit(request: RecommendRequest, candidate: Candidate) -> Iterator[tuple[float, str]]:
    """The cost as a share of each limit that is given, and why a fleet above it is out."""
    limits, fleet = request.requirements, candidate
    for flag, limit, cost, unit in (
        ("--max-usd-per-hour", limits.max_usd_per_hour, fleet.price_usd_per_hour, "an hour"),
        ("--max-usd-per-month", limits.max_usd_per_month, fleet.usd_per_month, "a month"),
        ("--max-usd-per-1m", limits.max_usd_per_1m_output, fleet.usd_per_1m_output_tokens, "for 1M output"),
    ):
        if limit is not None and cost is None:
            yield math.inf, f"no price is known, so {flag} {limit:g} cannot be checked"
        elif limit is not None and cost is not None:
            text = f"USD {cost:,.2f} {unit}, more than {flag} {limit:g}"
            yield cost / limit, f"over the budget: {text}"


def split_by_budget(
    request: RecommendRequest, candidates: Sequence[Candidate]
) -> tuple[list[Candidate], list[Rejection]]:
    """Candidates within the budget, and the others with their cost."""
    kept, rejected = [], []
    for each in candidates:
        problem = next((why for share, why in _by_limit(request, each) if share > 1), None)
        if problem is None:
            kept.append(each)
        else:
            rejected.append(each.rejected(problem))
    return kept, rejected


def nearest_to_budget(request: RecommendRequest, candidates: Sequence[Candidate]) -> Candidate:
    """The candidate that exceeds the budget by the smallest factor, with the reason."""
    best = min(candidates, key=lambda each: max(share for share, _ in _by_limit(request, each)))
    problem = next(why for share, why in _by_limit(request, best) if share > 1)
    return replace(best, reason=f"nearest to the budget: {problem}")


MOST_MACHINES = 1000  # of a planned fleet
_DECIDES_LATER = 0.3  # probability that an undecided level keeps its SLOs in the end
LEAST_CHANCE = 0.02
LEAST_SAVING = 0.005  # of the recommended fleet's cost, times its chance


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
    if best is not None:  # its own load, unless it was measured
        serving = request.availability.surviving(best.machines)
        rate = request.rate_per_s / (serving * best.layout.copies)
        if rate > best.copy.kept_per_s * (1 + 1e-9):
            chance = best.copy.belief(keeps_slos=True).chance(rate)
            measurements.append(Measurement(best.layout, rate, serving, chance, 0.0))
    return measurements


def _saving(request: RecommendRequest, layout: Layout, machines: int, cost: float) -> tuple[float, float] | None:
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
    """The layout's fleets that are worth a measurement, each behind its value."""
    assert request.rate_per_s is not None
    belief = copy.belief(keeps_slos=True)
    undecided = [rate for rate, verdict in copy.measured if verdict in ("near", "open")]
    for machines in range(1, MOST_MACHINES + 1):
        saving = _saving(request, layout, machines, cost)
        rate = request.rate_per_s / (machines * layout.copies)
        if saving is None:
            break
        if any(math.isclose(rate, each) for each in undecided):
            continue  # `_undecided` has them
        chance = belief.chance(rate)
        worth = chance * saving[1]
        if chance >= LEAST_CHANCE and (cost == math.inf or worth >= LEAST_SAVING):
            yield worth, Measurement(layout, rate, machines, chance, saving[0])
        if chance > 0.99:
            break


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
