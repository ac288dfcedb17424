"""One day from its flags to its table: load curve, start-up, scaling against a flat fleet."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lmi_bench.analysis.fleet.day import STEP_S, DayPlan, DayResult, parse_start_up, plan_day
from lmi_bench.analysis.fleet.load_curve import DAY_S, LoadCurve, load_curve_file, shaped
from lmi_bench.analysis.fleet.purchase import best_commitment, cost_of_hours
from lmi_bench.cli.console import print_table, say
from lmi_bench.core.durable import write_text
from lmi_bench.core.errors import InputError
from lmi_bench.core.units import HOURS_PER_MONTH, SECONDS_PER_HOUR
from lmi_bench.jobs.saved_recommendation import load_recommendation

_HOURS_A_DAY = 24


@dataclass(frozen=True, slots=True)
class DayQuestion:
    """The command's flags; None and "" are what was left out."""

    recommendation: Path | None
    load: Path | None
    shape: str | None
    peak_per_s: float | None
    least_share: float
    start_up: str
    capacity_per_s: float | None
    price_usd_per_hour: float | None
    commit_discount: float | None
    least_slo_share: float


def run(question: DayQuestion, *, json_file: Path | None) -> None:
    """Play the day, print, save. Raises InputError for what is missing."""
    content: Mapping[str, Any] = {}
    capacity, price = question.capacity_per_s, question.price_usd_per_hour
    machine = "a machine"
    if question.recommendation is not None:
        content = load_recommendation(question.recommendation)
        best = content["recommended"]
        machine = str(best["instance"])
        if capacity is None:
            capacity = best["capacity_rate_per_s"]["low"] / best["instances"]
        if price is None:
            price = best["cost"]["machine_price_usd_per_hour"]
    if capacity is None or not capacity > 0:
        raise InputError("plan-day needs REC.json or --capacity, req/s of one machine above 0")
    if not question.start_up:
        raise InputError(
            "--start-up is missing: the seconds from a load that grows to a machine that serves, "
            "as a whole (460) or by part; measure it, it decides whether scaling works"
        )
    if question.commit_discount is not None and not 0 <= question.commit_discount < 1:
        raise InputError("--commit-discount must be at least 0 and below 1")
    if price is not None and price < 0:
        raise InputError(f"--price-per-hour must be 0 USD or more, got {price:g}")
    if question.commit_discount is not None and price is None:
        raise InputError("--commit-discount is off a price that is not known: add --price-per-hour")
    curve = _curve(question, content)
    start_up = parse_start_up(question.start_up)
    plan = plan_day(
        curve, start_up, capacity_per_s=capacity, least_slo_share=question.least_slo_share
    )
    say(
        f"load {min(curve.rates_per_s):.4g} to {curve.peak_per_s:.4g} req/s, {machine} carries "
        f"{capacity:.4g} req/s and serves {start_up.total_s:,.0f} s after it is needed"
    )
    rows = [
        _row(f"scaled at {plan.scaling.target_per_s:.3g} req/s a machine", plan.scaled, price),
        _row(f"flat, {plan.flat_machines} machine(s)", plan.flat, price),
    ]
    print_table("A day", rows, left=("fleet",))
    say(f"chosen: {'scaling' if plan.scales else 'the flat fleet'}: {plan.why}")
    committed = _commitment(question, plan, price)
    if committed is not None:
        say(
            f"commit to {committed['machines']} machine(s) at {question.commit_discount:.0%} off: "
            f"USD {committed['usd_per_day']:,.2f} a day, {committed['unused_usd']:,.2f} of it "
            "unused"
        )
    if json_file is not None:
        write_text(json_file, json.dumps(_content(plan, price, committed), indent=2) + "\n")
        say(f"day: {json_file}")


def _curve(question: DayQuestion, content: Mapping[str, Any]) -> LoadCurve:
    if question.load is not None:
        if question.shape is not None:
            raise InputError("give either --load FILE.csv or --shape, not both")
        curve = load_curve_file(question.load)
        return curve if question.peak_per_s is None else curve.scaled_to(question.peak_per_s)
    peak = content.get("rate_per_s") if question.peak_per_s is None else question.peak_per_s
    if peak is None:
        raise InputError("--peak is missing: the highest load of the day, req/s")
    return shaped(
        question.shape or "office", peak_per_s=float(peak), least_share=question.least_share
    )


def _row(fleet: str, day: DayResult, price: float | None) -> dict[str, Any]:
    cost = day.cost_usd(price)
    return {
        "fleet": fleet,
        "SLO kept": f"{day.slo_share:.2%}",
        "most machines": day.peak_machines,
        "launches": day.launches,
        "machine hours": f"{day.machine_hours:,.1f}",
        "longest wait s": f"{day.worst_wait_s:,.0f}",
        "USD a day": "" if cost is None else f"{cost:,.2f}",
        "USD a month": ("" if cost is None else f"{cost * HOURS_PER_MONTH / _HOURS_A_DAY:,.0f}"),
    }


def _commitment(
    question: DayQuestion, plan: DayPlan, price: float | None
) -> dict[str, float] | None:
    """How many machines to commit to over such days, and what the day then costs."""
    discount = question.commit_discount
    if discount is None or price is None:
        return None
    needed = plan.chosen.paid
    machines = best_commitment(needed, discount=discount)
    step_price = price * (DAY_S / len(needed)) / SECONDS_PER_HOUR
    cost = cost_of_hours(needed, step_price, discount=discount, committed=machines)
    return {
        "machines": machines,
        "usd_per_day": cost.total_usd,
        "unused_usd": cost.unused_usd,
    }


def _content(
    plan: DayPlan, price: float | None, committed: dict[str, float] | None
) -> dict[str, Any]:
    def day(result: DayResult) -> dict[str, Any]:
        values = asdict(result)
        values["paid"] = list(result.paid)
        return {**values, "usd_per_day": result.cost_usd(price)}

    return {
        "schema_version": 1,
        "chosen": "scaled" if plan.scales else "flat",
        "why": plan.why,
        "step_s": STEP_S,
        "target_rate_per_s": plan.scaling.target_per_s,
        "flat_machines": plan.flat_machines,
        "scaled": day(plan.scaled),
        "flat": day(plan.flat),
        "commitment": committed,
    }
