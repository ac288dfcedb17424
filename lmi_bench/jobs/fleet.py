"""The catalog's machines compared for one model, and a day of load on a fleet."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from lmi_bench.analysis.fleet.accelerator_comparison import (
    FourSteps,
    MachineFigures,
    four_steps,
    machine_figures,
)
from lmi_bench.analysis.fleet.day import (
    DAY_S,
    STEP_S,
    DayPlan,
    DayResult,
    LoadCurve,
    load_curve_file,
    shaped,
)
from lmi_bench.analysis.fleet.day import plan_day as plan
from lmi_bench.analysis.fleet.money import best_commitment, cost_of_hours
from lmi_bench.analysis.fleet.presets import Preset, presets
from lmi_bench.analysis.fleet.start_up import (
    DOUBT,
    StartUp,
    estimated_start_up,
    parse_start_up,
)
from lmi_bench.analysis.level.layouts import Rejection, Workload
from lmi_bench.analysis.model.profiles import EngineProfile
from lmi_bench.catalog.instances import all_instances, find_instance
from lmi_bench.catalog.models import find_model
from lmi_bench.catalog.published import jumpstart_concurrency, jumpstart_extremes
from lmi_bench.core.errors import InputError
from lmi_bench.core.listener import SILENT, Listener
from lmi_bench.core.units import GIB, SECONDS_PER_HOUR
from lmi_bench.jobs.files import SavedRecommendation, load_recommendation
from lmi_bench.jobs.planned import model_notes, planned_workload, repriced
from lmi_bench.jobs.settings.plan import AcceleratorSettings, DaySettings
from lmi_bench.targets.profiles import find_profile


@dataclass(frozen=True, slots=True)
class AcceleratorComparison:
    """The four steps of each accelerator, and the predicted figures of each layout.

    rejected  layouts that the model does not run on, with the reason
    """

    workload: Workload
    profile: EngineProfile
    steps: list[FourSteps]
    figures: list[MachineFigures]
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


def compare_accelerators(
    settings: AcceleratorSettings, listener: Listener = SILENT
) -> AcceleratorComparison:
    """Predict the model on each machine. Raises InputError for an unknown model or profile."""
    workload = planned_workload(
        settings.model, settings.dtype, settings.input_tokens, settings.output_tokens
    )
    instances = repriced(None, settings.price_list)
    profile = find_profile(settings.profile)
    figures, rejected = machine_figures(instances, workload, profile)
    for text in model_notes(settings.model, settings.dtype):
        listener.note(text)
    return AcceleratorComparison(
        workload, profile, four_steps(instances, workload), figures, rejected
    )


def measured_presets(model: str | None) -> list[Preset]:
    """Measured configurations of one model, or of all; raises InputError for an unknown model."""
    cells = (*jumpstart_concurrency(), *jumpstart_extremes())
    names = sorted({cell.model for cell in cells})
    if model is not None:
        wanted = "".join(filter(str.isalnum, model.lower()))
        chosen = [name for name in names if "".join(filter(str.isalnum, name.lower())) == wanted]
        if not chosen:
            raise InputError(f"model {model!r} was not measured; use one of {', '.join(names)}")
        cells = tuple(cell for cell in cells if cell.model in chosen)
    prices = {each.instance_type: each.price_usd_per_hour for each in all_instances()}
    return list(presets(cells, prices))


@dataclass(frozen=True, slots=True)
class Commitment:
    """Machines to commit to over such days, and what a day then costs."""

    machines: int
    usd_per_day: float
    unused_usd: float


@dataclass(frozen=True, slots=True)
class PlannedDay:
    """The simulated day.

    machine         its type, if a recommendation names one
    capacity_per_s  load that one machine carries
    price           of a machine in USD per hour, if known
    caveats         what was not known when the machine was recommended
    """

    plan: DayPlan
    load: LoadCurve
    start_up: StartUp
    machine: str
    capacity_per_s: float
    price: float | None
    commitment: Commitment | None
    caveats: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """As `plan-day --json` writes it."""

        def day(result: DayResult) -> dict[str, Any]:
            values = {**asdict(result), "paid": list(result.paid)}
            return {**values, "usd_per_day": result.cost_usd(self.price)}

        return {
            "schema_version": 1,
            "chosen": "scaled" if self.plan.scales else "flat",
            "why": self.plan.why,
            **({"caveats": list(self.caveats)} if self.caveats else {}),
            "step_s": STEP_S,
            "target_rate_per_s": self.plan.scaling.target_per_s,
            "flat_machines": self.plan.flat_machines,
            "scaled": day(self.plan.scaled),
            "flat": day(self.plan.flat),
            "commitment": None if self.commitment is None else asdict(self.commitment),
        }


def plan_day(settings: DaySettings, listener: Listener = SILENT) -> PlannedDay:
    """Simulate the day. Raises InputError for what is missing."""
    planned_per_s: float | None = None
    capacity, price = settings.capacity, settings.machine_price
    machine = "a machine"
    saved: SavedRecommendation | None = None
    if settings.recommendation is not None:
        saved = load_recommendation(settings.recommendation)
        best, planned_per_s = saved.best, saved.answer.question.rate_per_s
        machine = best.instance
        carried = best.figures["capacity_rate_per_s"]
        if capacity is None and carried is not None:
            capacity = carried.low / best.instances
        if price is None:
            price = best.cost.machine_price_usd_per_hour
    if capacity is None or not capacity > 0:
        raise InputError("plan-day needs REC.json or --capacity, req/s of one machine above 0")
    if settings.commit_discount is not None and price is None:
        raise InputError("--commit-discount needs a machine's price: add --machine-price-per-hour")
    curve = _curve(settings, planned_per_s)
    start_up = _start_up(settings, saved, listener)
    day = plan(curve, start_up, capacity_per_s=capacity, least_slo_share=settings.least_slo_share)
    committed = _commitment(settings.commit_discount, day, price)
    caveats = () if saved is None else saved.answer.caveats
    return PlannedDay(day, curve, start_up, machine, capacity, price, committed, caveats)


def _start_up(
    settings: DaySettings, saved: SavedRecommendation | None, listener: Listener
) -> StartUp:
    """The stated start-up, or an estimate for the recommended machine."""
    if settings.start_up is not None:
        return parse_start_up(settings.start_up)
    if saved is None:
        raise InputError(
            "--start-up is missing: the seconds from rising load until a new machine serves, in "
            "total (460) or by part; it is estimated only for a recommendation"
        )
    best = saved.best
    start_up = estimated_start_up(
        find_instance(best.instance),
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


def _curve(settings: DaySettings, planned_per_s: float | None) -> LoadCurve:
    if settings.load is not None:
        curve = load_curve_file(settings.load)
        return curve if settings.peak is None else curve.scaled_to(settings.peak)
    peak = planned_per_s if settings.peak is None else settings.peak
    if peak is None:
        raise InputError("--peak is missing: the highest load of the day, req/s; no rate is known")
    return shaped(settings.shape or "office", peak_per_s=peak, least_share=settings.least_share)


def _commitment(discount: float | None, day: DayPlan, price: float | None) -> Commitment | None:
    if discount is None or price is None:
        return None
    needed = day.chosen.paid
    machines = best_commitment(needed, discount=discount)
    step_price = price * (DAY_S / len(needed)) / SECONDS_PER_HOUR
    cost = cost_of_hours(needed, step_price, discount=discount, committed=machines)
    return Commitment(machines, cost.total_usd, cost.unused_usd)
