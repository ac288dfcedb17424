"""`lmi-bench optimize`: techniques applied in combination, then judged on the user's data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from lmi_bench.cli.options.spread import spread_options
from lmi_bench.core.option import Option
from lmi_bench.jobs.settings.optimize import OptimizeSettings

if TYPE_CHECKING:
    from lmi_bench.jobs.optimize.plan import JobPlan
    from lmi_bench.jobs.optimize.run import Optimized


@spread_options
def optimize(
    settings: OptimizeSettings,
    listed: Annotated[
        bool, Option("List of the techniques and where each one works; then end.", ("--list",))
    ] = False,
    plan: Annotated[
        bool,
        Option(
            "Memory that each variant needs and the cheapest machine for it; then end. --model may "
            "be a catalog name.",
            ("--plan",),
        ),
    ] = False,
) -> None:
    """Apply a recipe's techniques and measure each: quality, speed, memory and price.

    Every variant is loaded, scored on a text, held against the baseline's greedy output and swept;
    the folder gets optimize.json, report.html, a run folder for each variant, and the quantized
    weights of variants that say `save: true`, ready for `lmi-bench serve --model`.
    """
    from lmi_bench.cli.console import print_table, terminal

    if listed:
        from lmi_bench.jobs.optimize.run import TECHNIQUES

        titles = ("recipe", "technique", "works on")
        rows = [dict(zip(titles, row, strict=True)) for row in TECHNIQUES]
        print_table("Techniques; a variant combines any of them", rows, left=titles)
    elif plan:
        from lmi_bench.jobs.optimize.plan import plan_job

        _print_plan(plan_job(settings))
    else:
        from lmi_bench.jobs.optimize.run import optimize as run

        with terminal() as listener:
            found = run(settings, listener)
        _print(found)


def _print(found: Optimized) -> None:
    from lmi_bench.cli.console import note, print_table, say
    from lmi_bench.report.optimization import optimization_tables

    for table in optimization_tables(found.variants):
        titles = [column.title for column in table.columns]
        rows = [dict(zip(titles, (c.text for c in row.cells), strict=True)) for row in table.rows]
        print_table(table.caption, rows, left=titles[:1])
        if table.note:
            note(table.note)
    say(f"report: {found.folder / 'report.html'}   numbers: {found.folder / 'optimize.json'}")


def _print_plan(plan: JobPlan) -> None:
    from lmi_bench.cli.console import note, print_table
    from lmi_bench.core.units import bytes_to_gib

    rows = [
        {
            "variant": need.name,
            "prepare GiB": f"{bytes_to_gib(need.prepare_bytes):.1f}",
            "measure GiB": f"{bytes_to_gib(need.measure_bytes):.1f}",
            "cheapest machine": "none" if machine is None else machine.instance_type,
            "USD/h": "" if machine is None else f"{machine.price_usd_per_hour:.2f}",
        }
        for need, machine in plan.needs
    ]
    print_table(f"{plan.model}: what the job needs", rows, left=("variant", "cheapest machine"))
    best = plan.machine
    if best is None:
        note("no machine of the catalog holds the largest variant: take it out, or split the model")
        return
    note(
        f"one machine for all of it: {best.instance_type} ({best.num_accelerators} x "
        f"{best.accelerator.name}), {best.price_usd_per_hour:.2f} USD/h ({best.price_provenance})"
    )
