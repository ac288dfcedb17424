"""The tables of `compare-accelerators`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lmi_bench.analysis.fleet.accelerator_comparison import (
    FourSteps,
    MachineFigures,
    best_by_machine,
    four_steps,
    machine_figures,
    sharding,
)
from lmi_bench.analysis.level.layouts import Workload
from lmi_bench.analysis.model.checkpoint_dtype import dtype_note, planned_dtype
from lmi_bench.catalog.instances import all_instances
from lmi_bench.catalog.models import find_model
from lmi_bench.cli.console import note, print_table, say, warn
from lmi_bench.core.durable import write_text
from lmi_bench.jobs.money import Money
from lmi_bench.targets.profiles import find_profile

_TABLES = (
    ("latency", "Least latency: one request, predicted"),
    ("throughput", "Most throughput of one machine, predicted"),
    ("cost", "Least cost of 1M output tokens at saturation, predicted"),
)


def run(
    *,
    model: str,
    input_tokens: int,
    output_tokens: int,
    dtype: str | None,
    profile: str | None,
    money: Money,
    top: int,
    json_file: Path | None,
) -> None:
    """Compare, print, save."""
    shape, weights = find_model(model), planned_dtype(model, dtype)
    workload = Workload(shape, weights, input_tokens, output_tokens)
    instances = money.reprice(all_instances())
    steps = four_steps(instances, workload)
    engine = find_profile(profile)
    figures, rejected = machine_figures(instances, workload, engine)
    say(f"{shape.name}, {weights}, {input_tokens} in / {output_tokens} out")
    if (told := dtype_note(model, dtype)) is not None:
        note(told)
    print_table(
        "Accelerators in four steps, the cheapest bandwidth first",
        [_step_row(row) for row in steps],
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
    if not figures and rejected:
        warn(f"the model runs on none of these machines: {rejected[0].reason}")
    say(f"predictions: {engine.provenance}; they are estimates until a sweep is calibrated on")
    if json_file is not None:
        content = {
            "schema_version": 1,
            "model": shape.name,
            "dtype": weights,
            "profile": engine.provenance,
            "four_steps": [row.to_json() for row in steps],
            "layouts": [each.to_json() for each in figures],
        }
        write_text(json_file, json.dumps(content, indent=2) + "\n")
        say(f"comparison: {json_file}")


def _shown(value: float | None, digits: str = ",.4g") -> str:
    return "" if value is None else format(value, digits)


def _step_row(row: FourSteps) -> dict[str, Any]:
    machine = row.machine
    return {
        "accelerator": row.accelerator,
        "1: B*": _shown(row.critical_batch),
        "2: KV at B* GiB": _shown(row.kv_gib),
        "3: devices": row.devices,
        "4: USD/h per TB/s": _shown(
            None if row.usd_per_hour_gb_s is None else 1e3 * row.usd_per_hour_gb_s
        ),
        "USD/h a device": _shown(row.usd_per_hour_device),
        "price of": (
            ""
            if row.usd_per_hour_device is None
            else f"{machine.instance_type}, {machine.price_region}, {machine.price_date}"
        ),
    }


def _machine_row(each: MachineFigures) -> dict[str, Any]:
    layout = each.layout
    return {
        "instance": layout.instance.instance_type,
        "TP": layout.tensor_parallel,
        "copies": layout.copies,
        "ms/token alone": _shown(each.latency_ms_per_token),
        "tok/s full": _shown(each.throughput_tokens_per_s, ",.0f"),
        "USD/1M out": _shown(each.usd_per_1m_output),
        "USD/h": _shown(layout.instance.price_usd_per_hour),
    }


def _sharding_row(best: MachineFigures, whole: MachineFigures) -> dict[str, Any]:
    layout = best.layout
    return {
        "instance": layout.instance.instance_type,
        "best layout": f"TP {layout.tensor_parallel} x {layout.copies}",
        "tok/s": _shown(best.throughput_tokens_per_s, ",.0f"),
        "tok/s of one copy": _shown(whole.throughput_tokens_per_s, ",.0f"),
        "gain": f"{best.throughput_tokens_per_s / whole.throughput_tokens_per_s:.2f}",
        "ms/token alone": _shown(best.latency_ms_per_token),
        "of one copy": _shown(whole.latency_ms_per_token),
    }
