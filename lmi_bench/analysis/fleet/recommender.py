"""The planner: screens every layout of the catalog, simulates the best ones and ranks fleets.

    layouts -> memory fit or reason -> closed form of one copy -> machines and cost of all
    -> capacity of the best dozen by bisection over the simulator -> figures, intervals, ranking

The number of machines keeps the load within the lower end of the capacity's interval. SLOs hold at
the upper end of their interval if possible (`sure`), else as predicted (`likely`).
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import islice

from lmi_bench.analysis.fit.fit import Fit, fit_of_profile
from lmi_bench.analysis.fit.uncertainty import TimeFactors, under_load
from lmi_bench.analysis.fleet import operating_point, ranking
from lmi_bench.analysis.fleet.answer import Candidate, Question, Recommendation, SloOutlook
from lmi_bench.analysis.fleet.attainment import LongSimulation, fleet_of
from lmi_bench.analysis.fleet.candidates import (
    CopyCapacity,
    Fleet,
    Planned,
    build_candidate,
    machines_needed,
    set_up,
    with_capacity,
)
from lmi_bench.analysis.fleet.measured_load import Verdict, pooled
from lmi_bench.analysis.fleet.money import NO_REQUIREMENTS, NO_SPARES
from lmi_bench.analysis.fleet.operating_point import closed_ratio
from lmi_bench.analysis.fleet.request import LONE_REQUEST, RecommendRequest
from lmi_bench.analysis.level.layouts import CopyPlan, EngineKey, Layout, Rejection, split_layouts
from lmi_bench.analysis.level.steady_state import LATENCY_LOAD_LIMIT
from lmi_bench.analysis.model.engine_setting import AS_STATED
from lmi_bench.analysis.model.profiles import as_set
from lmi_bench.core.load import Load
from lmi_bench.core.units import s_to_ms

Progress = Callable[[str, float], None]
"""Takes the present step and the share that is done."""

Prepared = tuple[Sequence[Planned], Sequence[Rejection]]
"""Layouts with the capacity of a copy, and those that are out with the reason."""

_FAR = 2.0  # times the cost of the cheapest that was simulated
_MOST_ROUNDS = 4
_OTHER_HOST = "the hosts of {device.name} are {device.host}: the server needs an image that is built for it"


def no_progress(text: str, share: float) -> None:
    """The progress that nobody sees."""


def recommend(
    request: RecommendRequest,
    *,
    progress: Progress = no_progress,
    prepared: Prepared | None = None,
    intervals: bool = True,
) -> Recommendation:
    """The recommendation for a request; raises InputError.

    progress   called with the present step and the share that is done
    prepared   layouts of the same request with fewer measured levels, not to simulate them twice
    intervals  of latencies from the profile's parameters; False: in closed form, much faster
    """
    layouts, out = prepared or prepare(request, progress)
    if prepared is not None:
        layouts = [(one, replace(copy, measured=_measured(request, one))) for one, copy in layouts]
    look = LongSimulation(request)

    @cache  # a round changes few fleets
    def build(fleet: Fleet, simulate: bool, is_near: bool) -> Candidate:
        return build_candidate(request, fleet, simulate=simulate, intervals=intervals and is_near)

    for again in range(_MOST_ROUNDS):
        fleets, met, in_time, too_weak = _ranked(request, build, layouts, progress)
        if not (met and request.simulate_long and request.slos):
            break
        progress("the planned load for fifteen minutes", 0.9 + 0.02 * again)
        overloaded = look.overloaded(fleet_of(met[0], fleets))
        if overloaded is None or again + 1 == _MOST_ROUNDS:
            _add_attainment(met, fleets, look)
            break
        layouts = with_capacity(layouts, *overloaded)
    nearest: Candidate | None = None
    missed: str | None = None
    if met:
        met = ranking.with_winning_prices(request, met)
        met[0] = replace(met[0], reason=ranking.why_first(request, met))
    elif in_time:
        nearest, missed = ranking.nearest_to_budget(request, in_time), "the budget"
    else:
        nearest = _nearest(request, layouts)
        alone_in_time = nearest is not None and nearest.meets_slos
        missed = "the load" if alone_in_time else "the SLOs"
    progress("done", 1.0)
    chosen = fleet_of(met[0], fleets) if met else None
    return Recommendation(
        recommended=met[0] if met else None,
        nearest=nearest,
        candidates=tuple(met),
        rejected=(*out, *too_weak),
        question=_question(request),
        warnings=tuple(_warnings(request, met, nearest)),
        measure_next=tuple(ranking.decisive_measurements(request, layouts, chosen)),
        missed=missed if nearest is not None else None,
    )


def _add_attainment(met: list[Candidate], fleets: Sequence[Fleet], look: LongSimulation) -> None:
    """Add the attainment of the best fleet, and of those after it until one is not fragile."""
    for place, candidate in enumerate(met[:_MOST_ROUNDS]):
        found = look.at(fleet_of(candidate, fleets))
        met[place] = replace(candidate, attainment=found)
        if not found.fragile_slos:
            return


def _ranked(
    request: RecommendRequest,
    build: Callable[[Fleet, bool, bool], Candidate],
    layouts: Sequence[Planned],
    tell: Progress,
) -> tuple[list[Fleet], list[Candidate], list[Candidate], list[Rejection]]:
    """Every layout as a fleet for the load; as candidates, the best simulated: those within limits
    and budget, the best first, those within the limits, and what is out.

    build  the candidate of a fleet, simulated or not, with intervals from its parameters or not
    """
    rejected = list[Rejection]()
    fleets = best_fleets(request, layouts, rejected)
    candidates, most = list[Candidate](), request.simulated_copies
    by_cost = request.rate_per_s is not None and request.objective == "cost"
    for index, fleet in enumerate(fleets):
        tell("latencies at the planned load", 0.6 + 0.3 * index / len(fleets))
        met_usd = [each.price_usd_per_hour or math.inf for each in candidates if each.meets_slos]
        price_usd = request.fleet_usd_per_hour(fleet.layout, fleet.machines) or 0.0
        is_far = by_cost and price_usd > _FAR * min(met_usd, default=math.inf)
        comparable = fleet.copy.simulated or not request.slos  # by its capacity, too
        candidates.append(build(fleet, comparable and index < most, not is_far))
    for each in (each for each in candidates if not each.meets_slos):
        broken = _predicted(outlook for outlook in each.slos if outlook.confidence == "missed")
        rejected.append(each.rejected(broken or "the SLO cannot be foreseen at the planned rate"))
    in_time = [candidate for candidate in candidates if candidate.meets_slos]
    met, too_dear = ranking.split_by_budget(request, in_time)
    return fleets, ranking.ranked(request, met), in_time, [*rejected, *too_dear]


def prepare(request: RecommendRequest, tell: Progress = no_progress) -> Prepared:
    """Every layout that can run with the capacity of a copy, the best ones simulated."""
    layouts, rejected = screen(request, tell)
    for begin in (0.1, 0.5):  # what is simulated may give way to others
        best = best_copies(request, layouts).items()
        finalists = [(key, copy) for key, copy in best if not copy.simulated]
        for index, (key, copy) in enumerate(finalists):
            tell(f"simulating {len(finalists)} finalists", begin + 0.1 * index / len(finalists))
            layouts = with_capacity(layouts, key, simulate_capacity(request, copy))
    return layouts, rejected


def screen(request: RecommendRequest, tell: Progress = no_progress) -> tuple[list[Planned], list[Rejection]]:
    """Every layout that can run, with the capacity of a copy in closed form."""
    tell("fitting the model into machines", 0.0)
    allowed, elsewhere = request.requirements.split_by_region(request.instances)
    possible, rejected = split_layouts(
        allowed,
        request.workload,
        request.profile,
        degrees=request.degrees,
        open_loop=request.open_loop,
        settings=request.settings,
    )
    rejected.extend(elsewhere)
    tell(f"screening {len(possible)} layouts", 0.05)
    copies: dict[EngineKey, CopyCapacity] = {}
    fits: dict[tuple[object, ...], Fit] = {}
    factors: dict[tuple[object, ...], TimeFactors] = {}
    for layout, plan in possible:
        key = layout.engine_key
        if key not in copies:
            (device, link, degree, setting), host_copies = key
            is_doubtful = link.kind == "pcie" and link.is_shared is None  # by more, the higher the degree
            fitted = (device, setting, degree if is_doubtful else None)
            if fitted not in fits:
                profile, own = request.profile, layout.setting
                if own != AS_STATED:
                    shape = plan.workload.shape
                    profile = own.profile(as_set(profile, shape, layout.instance.accelerator))
                fits[fitted] = fit_of_profile(profile, [set_up(layout, plan.workload)])
            fit = fits[fitted]
            same_steps = (device, link, degree, setting.of_a_step, host_copies)
            if same_steps not in factors:
                lone = under_load(set_up(layout, plan.workload), fit.profile, Load(1))
                factors[same_steps] = TimeFactors.at(fit, lone)
            copies[key] = _screened(request, layout, plan, fit, factors[same_steps])
    return [(layout, copies[layout.engine_key]) for layout, _ in possible], rejected


def _screened(
    request: RecommendRequest, layout: Layout, plan: CopyPlan, fit: Fit, factors: TimeFactors
) -> CopyCapacity:
    """The capacity of one copy within the SLOs in closed form, with its uncertainty."""
    steady, device = plan.steady, layout.instance.accelerator
    held = operating_point.held_slos(steady, request.slos, factors)
    batch = central = float(steady.slots)
    if request.slos:
        batch = operating_point.screen_batch(steady, held)
        central = operating_point.screen_batch(steady, request.slos)
    limited_by = steady.limiting_part(batch)
    if request.slos and batch < 0.9 * steady.slots:
        limited_by = f"SLO ({limited_by})"
    return CopyCapacity(
        plan=plan,
        simulation=operating_point.CopySimulation(plan, request.slos, request.seed),
        fit=fit,
        factors=factors,
        rate_per_s=steady.rate_per_s(batch),
        central_per_s=steady.rate_per_s(central),
        concurrency=math.floor(batch + 1e-6),
        limited_by=limited_by,
        warnings=(
            *([] if device.host == "x86_64" else [_OTHER_HOST.format(device=device)]),
            *request.profile.warnings_for(accelerator=device.name, engine_version=request.engine_version),
            *layout.setting.caveats(),
        ),
        measured=_measured(request, layout),
    )


def _measured(request: RecommendRequest, layout: Layout) -> tuple[tuple[float, Verdict], ...]:
    """The measured rates of such a copy, each with its verdict."""
    mine = [load for load in request.measured if load.copy_key == layout.copy_key]
    return tuple((load.rate_per_s, load.verdict(request.slos)) for load in pooled(mine))


def best_copies(request: RecommendRequest, layouts: Sequence[Planned]) -> dict[EngineKey, CopyCapacity]:
    """The copies of the best layouts in closed form."""
    best = {fleet.layout.engine_key: fleet.copy for fleet in best_fleets(request, layouts, [])}
    return dict(islice(best.items(), request.simulated_copies))


def simulate_capacity(request: RecommendRequest, copy: CopyCapacity) -> CopyCapacity:
    """The copy with the rate of simulated levels in place of the closed form's.

    Only random arrivals need it: with evenly spread users the closed form is exact.
    """
    if not (request.open_loop and request.slos):
        return replace(copy, simulated=True)
    held = operating_point.held_slos(copy.plan.steady, request.slos, copy.factors)
    rate_per_s = copy.simulation.sustained_rate(
        copy.rate_per_s, held, most_share=LATENCY_LOAD_LIMIT * copy.factors.steps
    )
    central = copy.simulation.sustained_rate(copy.central_per_s, request.slos)
    return replace(copy, simulated=True, rate_per_s=rate_per_s, central_per_s=max(central, rate_per_s))


def best_fleets(request: RecommendRequest, layouts: Sequence[Planned], rejected: list[Rejection]) -> list[Fleet]:
    """Layouts with the machines for the load, the best first; the others go to `rejected`."""
    fleets = []
    for layout, copy in layouts:
        machines = machines_needed(request, layout, copy)
        if machines is not None:
            machines = request.availability.machines(machines)
        if machines is None:
            rejected.append(layout.rejected(_slo_reason(request, copy)))
        elif machines > ranking.MOST_MACHINES:
            reason = f"{machines:,} machines needed, more than {ranking.MOST_MACHINES:,}"
            rejected.append(layout.rejected(reason))
        else:
            fleets.append(Fleet(layout, copy, machines))
    fleets.sort(key=lambda fleet: ranking.screen_order(request, fleet))
    return fleets


def _slo_reason(request: RecommendRequest, copy: CopyCapacity) -> str:
    """The SLO that a lone request misses, or that no load keeps them all."""
    steady = operating_point.alone_of(copy.plan.steady)
    for slo in request.slos:
        alone_ms = s_to_ms(steady.latency_s(slo.metric, slo.statistic, 1.0))
        if alone_ms > slo.limit_ms:
            return (
                f"{slo} cannot be kept: {alone_ms:,.0f} ms already with one request ({steady.limiting_part(1.0)} binds)"
            )
    return f"no load keeps {', '.join(str(slo) for slo in request.slos)} as simulated"


def _predicted(outlooks: Iterable[SloOutlook]) -> str:
    return "; ".join(
        f"{outlook.slo} predicted {outlook.predicted_ms:,.0f} ms"
        for outlook in outlooks
        if outlook.predicted_ms is not None
    )


def _nearest(request: RecommendRequest, layouts: Sequence[Planned]) -> Candidate | None:
    """The layout closest to the SLOs with one request at a time, on one machine."""
    if not layouts:
        return None
    layout, copy = min(
        layouts,
        key=lambda pair: (
            closed_ratio(operating_point.alone_of(pair[1].plan.steady), request.slos, 1.0),
            pair[0].instance.price_usd_per_hour or math.inf,
        ),
    )
    alone = replace(request, load=LONE_REQUEST, availability=NO_SPARES, requirements=NO_REQUIREMENTS)
    lone = replace(copy, concurrency=1, rate_per_s=copy.plan.steady.rate_per_s(1.0))
    candidate = build_candidate(alone, Fleet(layout, lone, 1), simulate=False)
    reasons = ("one machine, one request at a time", _predicted(candidate.slos))
    return replace(candidate, reason=": ".join(filter(None, reasons)))


def _question(request: RecommendRequest) -> Question:
    lengths = ("dtype", "input_tokens", "output_tokens", "kinds", "burstiness")
    load = ("rate_per_s", "users", "think_time_s", "objective", "calibrated", "blended_ratio")
    return Question(
        model=request.workload.shape.name,
        **{name: getattr(request.workload, name) for name in lengths},
        **{name: getattr(request, name) for name in load},
        load=request.describe_load(),
        slos=tuple(str(slo) for slo in request.slos),
        purchase=request.purchase.describe(),
        availability=request.availability.describe(),
        profile=request.profile.provenance,
        measured_loads=len(request.measured),
    )


def _warnings(request: RecommendRequest, met: list[Candidate], nearest: Candidate | None) -> Iterator[str]:
    yield from ranking.price_caveats(request, met)
    if request.workload.shape.doubt:
        yield request.workload.shape.doubt
    shown = met if nearest is None else [*met, nearest]
    yield from dict.fromkeys(warning for candidate in shown[:1] for warning in candidate.warnings)
    yield from request.profile.notes
    if shown and shown[0].slos and any(o.confidence == "likely" for o in shown[0].slos):
        yield "an SLO holds as predicted but not at the upper end of the interval: measure it"
