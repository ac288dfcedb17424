"""`lmi-bench compare-accelerators`: accelerators in four steps, machines by latency and cost."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from lmi_bench.cli.options.spread import spread_options
from lmi_bench.core.option import Option
from lmi_bench.core.units import format_figure
from lmi_bench.jobs.settings.accelerators import AcceleratorSettings
from lmi_bench.jobs.settings.planning import check_at_least_one

if TYPE_CHECKING:
    from lmi_bench.analysis.fleet.accelerator_comparison import FourSteps, MachineFigures
    from lmi_bench.jobs.accelerators import AcceleratorComparison

_TABLES = (
    ("latency", "Least latency: one request, predicted"),
    ("throughput", "Most throughput of one machine, predicted"),
    ("cost", "Least cost of 1M output tokens at saturation, predicted"),
)


@spread_options
def compare_accelerators(
    settings: AcceleratorSettings,
    top: Annotated[int, Option("Rows of each table.")] = 12,
    json_file: Annotated[Path | None, Option("File for the comparison.", ("--json",))] = None,
) -> None:
    """B*, KV at B*, devices needed, price per GB/s; then predicted latency, throughput and cost.

    The predictions are the engine profile's until you measure: `sweep`, then `recommend RUN_DIR`.
    """
    from lmi_bench.cli.console import say, terminal, write_json
    from lmi_bench.jobs.accelerators import compare_accelerators as run

    check_at_least_one(top=top)
    with terminal() as listener:
        comparison = run(settings, listener)
    _print(comparison, top)
    if json_file is not None:
        write_json(json_file, comparison.to_json())
        say(f"comparison: {json_file}")


def _print(comparison: AcceleratorComparison, top: int) -> None:
    from lmi_bench.analysis.fleet.accelerator_comparison import best_by_machine, sharding
    from lmi_bench.cli.console import print_table, say, warn

    workload, figures = comparison.workload, comparison.figures
    say(
        f"{workload.shape.name}, {workload.dtype}, {workload.input_tokens} in / "
        f"{workload.output_tokens} out"
    )
    print_table(
        "Accelerators in four steps, the cheapest bandwidth first",
        [_step_row(row) for row in comparison.steps],
        left=("accelerator", "price of"),
    )
    for by, title in _TABLES:
        rows = [_machine_row(each) for each in best_by_machine(figures, by=by)[:top]]
        print_table(title, rows, left=("instance",))
    print_table(
        "Copies against one copy over all devices, predicted",
        [_sharding_row(best, whole) for best, whole in sharding(figures)[:top]],
        left=("instance", "best layout"),
    )
    if not figures and comparison.rejected:
        warn(f"the model runs on none of these machines: {comparison.rejected[0].reason}")
    say(
        f"predictions: {comparison.profile.provenance}; they are estimates until a sweep is "
        "calibrated on"
    )


def _step_row(row: FourSteps) -> dict[str, Any]:
    machine, price = row.machine, row.usd_per_hour_device
    bandwidth_price = None if row.usd_per_hour_gb_s is None else 1e3 * row.usd_per_hour_gb_s
    source = f"{machine.instance_type}, {machine.price_region}, {machine.price_date}"
    return {
        "accelerator": row.accelerator,
        "1: B*": format_figure(row.critical_batch),
        "2: KV at B* GiB": format_figure(row.kv_gib),
        "3: devices": row.devices,
        "4: USD/h per TB/s": format_figure(bandwidth_price),
        "USD/h a device": format_figure(price),
        "price of": "" if price is None else source,
    }


def _machine_row(each: MachineFigures) -> dict[str, Any]:
    layout = each.layout
    return {
        "instance": layout.instance.instance_type,
        "TP": layout.tensor_parallel,
        "copies": layout.copies,
        "ms/token alone": format_figure(each.latency_ms_per_token),
        "tok/s full": f"{each.throughput_tokens_per_s:,.0f}",
        "USD/1M out": format_figure(each.usd_per_1m_output),
        "USD/h": format_figure(layout.instance.price_usd_per_hour),
    }


def _sharding_row(best: MachineFigures, whole: MachineFigures) -> dict[str, Any]:
    layout = best.layout
    return {
        "instance": layout.instance.instance_type,
        "best layout": f"TP {layout.tensor_parallel} x {layout.copies}",
        "tok/s": f"{best.throughput_tokens_per_s:,.0f}",
        "tok/s of one copy": f"{whole.throughput_tokens_per_s:,.0f}",
        "gain": f"{best.throughput_tokens_per_s / whole.throughput_tokens_per_s:.2f}",
        "ms/token alone": format_figure(best.latency_ms_per_token),
        "of one copy": format_figure(whole.latency_ms_per_token),
    }
