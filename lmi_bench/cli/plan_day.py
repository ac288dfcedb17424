"""`lmi-bench plan-day`: whether to scale over the day, and what the day costs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from lmi_bench.cli.options.spread import spread_options
from lmi_bench.core.option import Option
from lmi_bench.core.units import HOURS_PER_MONTH
from lmi_bench.jobs.settings.day import DaySettings

if TYPE_CHECKING:
    from lmi_bench.analysis.fleet.day import DayResult
    from lmi_bench.jobs.day import PlannedDay

_HOURS_A_DAY = 24


@spread_options
def plan_day(
    settings: DaySettings,
    json_file: Annotated[Path | None, Option("File for the day.", ("--json",))] = None,
) -> None:
    """Play 24 hours of load: scaling with its start-up time against a flat fleet.

    A machine costs from its launch and serves only after its start-up. Where scaling cannot keep
    the SLOs over the ramps, the flat fleet wins.
    """
    from lmi_bench.cli.console import say, write_json
    from lmi_bench.jobs.day import plan_day as run

    day = run(settings)
    _print(day, settings.commit_discount)
    if json_file is not None:
        write_json(json_file, day.to_json())
        say(f"day: {json_file}")


def _print(day: PlannedDay, discount: float | None) -> None:
    from lmi_bench.cli.console import print_table, say

    plan = day.plan
    say(
        f"load {min(day.load.rates_per_s):.4g} to {day.load.peak_per_s:.4g} req/s, {day.machine} "
        f"carries {day.capacity_per_s:.4g} req/s and serves {day.start_up.total_s:,.0f} s after "
        "it is needed"
    )
    rows = [
        _row(f"scaled at {plan.scaling.target_per_s:.3g} req/s a machine", plan.scaled, day.price),
        _row(f"flat, {plan.flat_machines} machine(s)", plan.flat, day.price),
    ]
    print_table("A day", rows, left=("fleet",))
    say(f"chosen: {'scaling' if plan.scales else 'the flat fleet'}: {plan.why}")
    committed = day.commitment
    if committed is not None:
        say(
            f"commit to {committed.machines} machine(s) at {discount:.0%} off: USD "
            f"{committed.usd_per_day:,.2f} a day, {committed.unused_usd:,.2f} of it unused"
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
        "USD a month": "" if cost is None else f"{cost * HOURS_PER_MONTH / _HOURS_A_DAY:,.0f}",
    }
