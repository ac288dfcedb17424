"""The catalog's machines compared for one model, and a day of load on a fleet."""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from lmi_bench.analysis.fleet import accelerator_comparison as comparison
from lmi_bench.analysis.fleet import autoscaling, money
from lmi_bench.analysis.fleet import day as days
from lmi_bench.analysis.fleet.start_up import DOUBT, StartUp, estimated_start_up, parse_start_up
from lmi_bench.analysis.level.layouts import Rejection, Workload
from lmi_bench.analysis.level.steady_state import LATENCY_LOAD_LIMIT
from lmi_bench.analysis.model.profiles import EngineProfile
from lmi_bench.catalog.instances import all_instances, find_instance
from lmi_bench.catalog.models import find_model
from lmi_bench.catalog.published import jumpstart_cells
from lmi_bench.core.errors import InputError
from lmi_bench.core.listener import SILENT, Listener
from lmi_bench.core.traces import Trace, read_trace
from lmi_bench.core.units import GIB, SECONDS_PER_HOUR, ms_to_s
from lmi_bench.engine.router import make_router
from lmi_bench.jobs.files import SavedRecommendation, load_recommendation
from lmi_bench.jobs.planned import model_notes, planned_workload, repriced
from lmi_bench.jobs.settings.plan import AcceleratorSettings, DaySettings
from lmi_bench.targets.profiles import find_profile

_MOST_PLAYED: Final = 3_000_000
"""Requests of a day that are played one by one."""
_PEAK_TOLERANCE, _MOST_STRETCHES = 0.005, 30
_MOST_REQUESTS = 200_000_000  # of a day: 1.6 GB of times


@dataclass(frozen=True, slots=True)
class AcceleratorComparison:
    """The four steps of each accelerator, and the predicted figures of each layout.

    rejected  layouts that the model does not run on, with the reason
    """

    workload: Workload
    profile: EngineProfile
    steps: list[comparison.FourSteps]
    figures: list[comparison.MachineFigures]
    rejected: list[Rejection]

    def to_json(self) -> dict[str, Any]:
        """As `compare-accelerators --json` writes it."""
        return {
            "schema_version": 1,
            "model": self.workload.shape.name,
            "dtype": self.workload.dtype,
            "profile": self.profile.provenance,
            "four_steps": [row.to_json() for row in self.steps],
            "layouts": [each.to_json() for each in self.figures],
        }


def compare_accelerators(settings: AcceleratorSettings, listener: Listener = SILENT) -> AcceleratorComparison:
    """Predict the model on each machine. Raises InputError for an unknown model or profile."""
    workload = planned_workload(settings.model, settings.dtype, settings.input_tokens, settings.output_tokens)
    instances = repriced(None, settings.price_list)
    profile = find_profile(settings.profile)
    figures, rejected = comparison.machine_figures(instances, workload, profile)
    for text in model_notes(settings.model, settings.dtype):
        listener.note(text)
    return AcceleratorComparison(workload, profile, comparison.four_steps(instances, workload), figures, rejected)


def measured_presets(model: str | None) -> list[comparison.Preset]:
    """Measured configurations of one model, or of all; raises InputError for an unknown model."""
    cells = jumpstart_cells("concurrency", "min_latency", "max_throughput")
    names = sorted({cell.model for cell in cells})
    if model is not None:
        wanted = "".join(filter(str.isalnum, model.lower()))
        chosen = [name for name in names if "".join(filter(str.isalnum, name.lower())) == wanted]
        if not chosen:
            raise InputError(f"model {model!r} was not measured; use one of {', '.join(names)}")
        cells = tuple(cell for cell in cells if cell.model in chosen)
    prices = {each.instance_type: each.price_usd_per_hour for each in all_instances()}
    return list(comparison.presets(cells, prices))


@dataclass(frozen=True, slots=True)
class PlayedPolicy:
    """A policy by the name that it was given, and its day."""

    name: str
    played: autoscaling.Played

    def to_json(self, price: float | None) -> dict[str, Any]:
        """The figures and the changes of the number of machines."""
        played = self.played
        hours = played.machine_hours
        return {
            "policy": self.name,
            "attainment": played.attainment,
            "wait_p99_s": float(np.quantile(played.waits_s, 0.99)),
            "worst_wait_s": float(played.waits_s.max()),
            "machine_hours": hours,
            "usd_per_day": None if price is None else price * hours,
            "peak_machines": played.peak_machines,
            "events": [list(event) for event in played.events],
        }


@dataclass(frozen=True, slots=True)
class PlannedDay:
    """The simulated day.

    machine         its type, if a recommendation names one
    capacity_per_s  load that one machine carries
    price           of a machine in USD per hour, if known; discount: d off it in the commitment
    caveats         what was not known when the machine was recommended
    policies        played request by request, the flat fleet first
    """

    plan: days.DayPlan
    load: days.LoadCurve
    start_up: StartUp
    machine: str
    capacity_per_s: float
    price: float | None
    commitment: money.Commitment | None
    discount: float | None = None
    caveats: tuple[str, ...] = ()
    policies: tuple[PlayedPolicy, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """As `plan-day --json` writes it."""

        def day(result: days.DayResult) -> dict[str, Any]:
            values = {**asdict(result), "paid": list(result.paid)}
            return {**values, "usd_per_day": result.cost_usd(self.price)}

        policies = [each.to_json(self.price) for each in self.policies]
        return {
            "schema_version": 1,
            "chosen": "scaled" if self.plan.scales else "flat",
            "why": self.plan.why,
            **({"caveats": list(self.caveats)} if self.caveats else {}),
            "step_s": days.STEP_S,
            "target_rate_per_s": self.plan.scaling.target_per_s,
            "flat_machines": self.plan.flat_machines,
            "scaled": day(self.plan.scaled),
            "flat": day(self.plan.flat),
            "commitment": None if self.commitment is None else asdict(self.commitment),
            **({"policies": policies} if policies else {}),
        }


def plan_day(settings: DaySettings, listener: Listener = SILENT) -> PlannedDay:
    """Simulate the day, with a recommendation's spare machines and discount. Raises InputError."""
    planned_per_s: float | None = None
    capacity, price, machine = settings.capacity, settings.machine_price, "a machine"
    discount, availability = settings.commit_discount, money.NO_SPARES
    saved: SavedRecommendation | None = None
    if settings.recommendation is not None:
        saved = load_recommendation(settings.recommendation)
        best, planned_per_s = saved.best, saved.answer.question.rate_per_s
        machine = best.instance
        carried = best.figures["capacity_rate_per_s"]
        if capacity is None and carried is not None:
            capacity = carried.low / best.instances
        availability = money.parse_availability(best.cost.availability)
        if price is None:
            price = best.cost.machine_price_usd_per_hour
            if price is not None and best.cost.purchase.startswith("spot"):
                price *= 1 - (best.cost.discount or 0.0)
            elif price is not None and discount is None:
                discount = best.cost.discount or None
    if capacity is None or not capacity > 0:
        raise InputError("plan-day needs REC.json or --capacity, req/s of one machine above 0")
    if discount is not None and price is None:
        raise InputError("--commit-discount needs a machine's price: add --machine-price-per-hour")
    recorded_s: NDArray[np.float64] | None = None
    if settings.trace is None:
        curve = _curve(settings, planned_per_s)
    else:
        recorded_s, curve = _recorded_day(read_trace(settings.trace), settings.peak)
    start_up = _start_up(settings, saved, listener)
    least = settings.least_slo_share
    day = days.plan_day(curve, start_up, capacity_per_s=capacity, least_slo_share=least, availability=availability)
    committed = None
    if discount is not None and price is not None:
        needed = day.chosen.paid
        count = money.best_commitment(needed, discount=discount)
        step_price = price * (days.DAY_S / len(needed)) / SECONDS_PER_HOUR
        committed = money.commitment_of(count, needed, step_price, discount=discount)
    caveats = () if saved is None else saved.answer.caveats
    found = PlannedDay(day, curve, start_up, machine, capacity, price, committed, discount, caveats)
    played = _played(settings, saved, found, recorded_s, listener) if settings.policy else ()
    return replace(found, policies=tuple(played))


def _recorded_day(trace: Trace, peak_per_s: float | None) -> tuple[NDArray[np.float64], days.LoadCurve]:
    """A trace repeated until the day is over, and its curve, stretched until that has the peak: a
    burst fills more of the curve's five minutes the longer it is."""
    times_s = np.array([each.at_s for each in trace.requests])
    times_s *= 1.0 if peak_per_s is None else trace.rate_per_s / peak_per_s
    for _ in range(_MOST_STRETCHES):
        length_s = float(times_s[-1]) * len(times_s) / (len(times_s) - 1)
        repeats = math.ceil(days.DAY_S / length_s)
        if repeats * len(times_s) > _MOST_REQUESTS:
            raise InputError(
                f"--trace: repeated over a day it has {repeats * len(times_s):.3g} requests, more than "
                f"{_MOST_REQUESTS:,}: state a lower --peak"
            )
        whole_s = np.concatenate([times_s + number * length_s for number in range(repeats)])
        whole_s = whole_s[whole_s < days.DAY_S]
        curve = autoscaling.binned(whole_s)
        if peak_per_s is None or abs(curve.peak_per_s - peak_per_s) < _PEAK_TOLERANCE * peak_per_s:
            break
        times_s *= curve.peak_per_s / peak_per_s
    return whole_s, curve


def _played(
    settings: DaySettings,
    saved: SavedRecommendation | None,
    day: PlannedDay,
    recorded_s: NDArray[np.float64] | None,
    listener: Listener,
) -> Iterator[PlayedPolicy]:
    """The flat fleet and each policy on the same requests.

    A machine is saturated at its capacity over `LATENCY_LOAD_LIMIT`, the share up to which the
    planner loads one. Of a long day one request in n is played, by as many slots that take n times
    as long: waits are then n times as long, too.
    """
    answer_s = settings.answer_time
    if answer_s is None:
        told = None if saved is None else saved.best.figures.get("e2e_p50_ms")
        answer_s = 10.0 if told is None else ms_to_s(told.value)
    arrivals_s = autoscaling.day_arrivals_s(day.load, settings.seed) if recorded_s is None else recorded_s
    if not len(arrivals_s):
        raise InputError("no request arrives in the whole day, so there is nothing to play: raise --peak")
    nth = -(-len(arrivals_s) // _MOST_PLAYED)
    if nth > 1:
        listener.note(
            f"of {len(arrivals_s):,} requests one in {nth} is played, with answers and a wait "
            f"limit {nth} times as long: overloads shorter than minutes look milder"
        )
        draw = np.random.default_rng(settings.seed)
        arrivals_s = arrivals_s[nth * draw.random(len(arrivals_s)) < 1]
    saturated_per_s = day.capacity_per_s / LATENCY_LOAD_LIMIT
    slots = max(1, round(saturated_per_s * answer_s))
    start_s = day.start_up.total_s - day.start_up.detection_s
    fleet = autoscaling.Fleet(saturated_per_s / nth, slots, start_s, nth * settings.wait_limit)
    usual, availability = day.plan.scaling.target_per_s, day.plan.scaling.availability
    for text in ("flat", *settings.policy):
        policy, machines = None, availability.surviving(day.plan.flat_machines)
        if text != "flat":
            policy = autoscaling.parse_policy(text)
            by_rate = policy.metric == "rate"
            target = policy.target or (usual if by_rate else usual * answer_s)
            policy = replace(policy, target=target / nth if by_rate else target)
            at_start_per_s = float(day.load.rates_at(np.zeros(1))[0])
            machines = policy.within(at_start_per_s / (target if by_rate else target / answer_s))
        router = make_router(settings.router, settings.seed)
        play = partial(autoscaling.play, arrivals_s, fleet, router, seed=settings.seed, until_s=days.DAY_S)
        run = play(machines=machines, policy=policy)
        changes = ((0.0, 0, machines), *run.events, (days.DAY_S, 0, 0))
        spare_s = sum((availability.machines(n) - n) * (end - at) for (at, _, n), (end, *_) in pairwise(changes))
        hours = run.machine_hours + spare_s / SECONDS_PER_HOUR
        peak = availability.machines(run.peak_machines)
        yield PlayedPolicy(text, replace(run, waits_s=run.waits_s / nth, machine_hours=hours, peak_machines=peak))


def _start_up(settings: DaySettings, saved: SavedRecommendation | None, listener: Listener) -> StartUp:
    """The stated start-up, or an estimate for the recommended machine."""
    if settings.start_up is not None:
        return parse_start_up(settings.start_up)
    if saved is None:
        raise InputError(
            "--start-up is missing: the seconds from rising load until a new machine serves, in "
            "total (460) or by part; it is estimated only for a recommendation"
        )
    best = saved.best
    try:
        machine = find_instance(best.instance)
    except InputError as exc:
        raise InputError(f"{exc} Its start-up is not estimated: add --start-up.") from exc
    start_up = estimated_start_up(
        machine,
        weight_bytes=best.memory.weights_gib * GIB * best.tensor_parallel,
        num_layers=find_model(saved.model).num_layers,
        tensor_parallel=best.tensor_parallel,
        workers=best.copies,
        compiles=best.setting.cuda_graphs is not False,
    )
    parts = ", ".join(
        f"{name.removesuffix('_s').replace('_', '-')} {seconds:,.0f}"
        for name, seconds in asdict(start_up).items()
        if seconds
    )
    listener.note(
        f"start-up estimated at {start_up.total_s:,.0f} s ({parts}), perhaps {DOUBT:g} times as "
        "long or as short: measure it, then give --start-up"
    )
    return start_up


def _curve(settings: DaySettings, planned_per_s: float | None) -> days.LoadCurve:
    if settings.load is not None:
        curve = days.load_curve_file(settings.load)
        return curve if settings.peak is None else curve.scaled_to(settings.peak)
    peak = planned_per_s if settings.peak is None else settings.peak
    if peak is None:
        raise InputError("--peak is missing: the highest load of the day, req/s; no rate is known")
    return days.shaped(settings.shape or "office", peak_per_s=peak, least_share=settings.least_share)
