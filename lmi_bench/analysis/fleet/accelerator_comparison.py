"""Accelerators compared in four steps, then by a model's predicted figures on their machines.

    1  B* = (bytes per weight / 2) * F / BW: the critical batch size
    2  KV cache of B* sequences at full length
    3  devices that hold the weights and that cache
    4  price per hour for each GB/s of memory bandwidth

These need only data sheets and prices. The step-time model then predicts the least latency, highest
throughput and least cost of each machine, and its best layout against one copy over all devices.
Beside them: measured serving configurations, the cheapest and the fastest of each model.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lmi_bench.analysis.fleet.money import usd_per_1m_tokens
from lmi_bench.analysis.level.layouts import Layout, Rejection, Workload, split_layouts
from lmi_bench.analysis.model.memory import kv_bytes_per_sequence, min_devices, weight_bytes
from lmi_bench.analysis.model.profiles import EngineProfile
from lmi_bench.analysis.model.roofline import FLOP_PER_PARAMETER
from lmi_bench.analysis.model.step_costs import compute_dtype
from lmi_bench.catalog.instances import Instance
from lmi_bench.catalog.published import PublishedCell
from lmi_bench.core.json_value import JsonValue, key_of
from lmi_bench.core.units import bytes_to_gib, s_to_ms

_GB_PER_S = 1e9


@dataclass(frozen=True, slots=True)
class FourSteps(JsonValue):
    """One accelerator, on the machine where it is cheapest; None is not known.

    devices            that hold weights and the cache of B* sequences; None: more than 64
    usd_per_hour_gb_s  price of one accelerator's hour over its GB/s
    machine            one with that many devices where there is one
    """

    accelerator: str
    critical_batch: float | None
    kv_gib: float | None = field(metadata=key_of("kv_gib_at_critical_batch"))
    devices: int | None
    usd_per_hour_device: float | None
    usd_per_hour_gb_s: float | None = field(metadata=key_of("usd_per_hour_per_gb_s"))
    machine: Instance

    @property
    def holds(self) -> bool:
        """Whether the machine has all the devices."""
        return self.devices is not None and self.devices <= self.machine.num_accelerators

    def to_json(self) -> dict[str, Any]:
        content = super(FourSteps, self).to_json()
        machine: Instance = content.pop("machine")
        prices = {"estimated": machine.is_estimated, "price_source": machine.price_provenance}
        return {**content, "price_of": machine.instance_type, **prices}


def four_steps(instances: Sequence[Instance], workload: Workload) -> list[FourSteps]:
    """Every accelerator of the machines, the cheapest bandwidth first, without a price last."""
    best: dict[str, FourSteps] = {}
    for row in (_steps_of(instance, workload) for instance in instances):
        known = best.get(row.accelerator, row)
        # machines that hold the model first, then the cheapest device
        best[row.accelerator] = min((known, row), key=lambda each: (not each.holds, _device_price(each.machine)))
    return sorted(best.values(), key=lambda row: math.inf if row.usd_per_hour_gb_s is None else row.usd_per_hour_gb_s)


def _device_price(instance: Instance) -> float:
    price = instance.price_usd_per_hour
    return math.inf if price is None else price / instance.num_accelerators


def _steps_of(instance: Instance, workload: Workload) -> FourSteps:
    device, shape = instance.accelerator, workload.shape
    bandwidth = device.bandwidth_bytes_per_s
    peak = device.peak_flop_per_s(compute_dtype(device, workload.dtype))
    batch = kv_bytes = devices = None
    if bandwidth is not None and peak is not None:
        # a large batch reads all experts, and each token computes with few of them
        bytes_per_weight = weight_bytes(shape, workload.dtype) / shape.params_active
        batch = bytes_per_weight / FLOP_PER_PARAMETER * (peak / bandwidth)
        kv_bytes = batch * kv_bytes_per_sequence(shape, workload.total_tokens)
        devices = min_devices(
            shape,
            memory_bytes=device.memory_bytes,
            batch=math.ceil(batch),
            tokens_per_sequence=workload.total_tokens,
            dtype=workload.dtype,
        )
    price = _device_price(instance)
    priced = math.isfinite(price)
    return FourSteps(
        accelerator=device.name,
        critical_batch=batch,
        kv_gib=None if kv_bytes is None else bytes_to_gib(kv_bytes),
        devices=devices,
        usd_per_hour_device=price if priced else None,
        usd_per_hour_gb_s=(price / (bandwidth / _GB_PER_S) if priced and bandwidth is not None else None),
        machine=instance,
    )


@dataclass(frozen=True, slots=True)
class MachineFigures:
    """Predicted figures of one layout of a machine.

    latency_ms_per_token     of a lone request
    throughput_tokens_per_s  output of the machine with every slot busy
    """

    layout: Layout
    latency_ms_per_token: float
    throughput_tokens_per_s: float

    @property
    def usd_per_1m_output(self) -> float | None:
        """Cost at saturation, on demand; None without a price."""
        price = self.layout.instance.price_usd_per_hour
        return usd_per_1m_tokens(price, self.throughput_tokens_per_s)

    def to_json(self) -> dict[str, Any]:
        layout = self.layout
        return {
            "instance": layout.instance.instance_type,
            "tensor_parallel": layout.tensor_parallel,
            "copies": layout.copies,
            "latency_ms_per_token": self.latency_ms_per_token,
            "throughput_tokens_per_s": self.throughput_tokens_per_s,
            "usd_per_1m_output_tokens": self.usd_per_1m_output,
            "estimated": layout.instance.is_estimated,
            "price_source": layout.instance.price_provenance,
        }


def machine_figures(
    instances: Sequence[Instance], workload: Workload, profile: EngineProfile
) -> tuple[list[MachineFigures], list[Rejection]]:
    """Every layout that can run, in closed form, and the others with their reasons."""
    possible, rejected = split_layouts(instances, workload, profile, degrees=None, open_loop=False)
    figures = [
        MachineFigures(
            layout,
            s_to_ms(plan.steady.latency_s("latency_per_token", "p50", 1.0)),
            layout.copies * plan.steady.saturated_rate_per_s * plan.steady.output_tokens,
        )
        for layout, plan in possible
    ]
    return figures, rejected


def best_by_machine(figures: Sequence[MachineFigures], *, by: str) -> list[MachineFigures]:
    """The best layout of each machine, the best machine first.

    by  latency, throughput or cost; machines without a price have no cost and are left out
    """

    def key(each: MachineFigures) -> float:
        if by == "latency":
            return each.latency_ms_per_token
        if by == "throughput":
            return -each.throughput_tokens_per_s
        cost = each.usd_per_1m_output
        return math.inf if cost is None else cost

    best: dict[str, MachineFigures] = {}
    for each in sorted(figures, key=key):
        best.setdefault(each.layout.instance.instance_type, each)
    return [each for each in best.values() if math.isfinite(key(each))]


def sharding(figures: Sequence[MachineFigures]) -> list[tuple[MachineFigures, MachineFigures]]:
    """For each machine of several devices: its best layout by throughput, and one copy over all."""
    best = {each.layout.instance: each for each in best_by_machine(figures, by="throughput")}
    return [
        (best[each.layout.instance], each)
        for each in figures
        if each.layout.tensor_parallel == each.layout.instance.num_accelerators > 1
    ]


LOWER_COST, LOWER_LATENCY = "lower cost", "lower latency"


@dataclass(frozen=True, slots=True)
class Preset:
    """The best measured cell for a goal.

    usd_per_1m_output  of all instances of the endpoint; None without a price or throughput
    """

    goal: str
    cell: PublishedCell
    usd_per_1m_output: float | None


def presets(cells: Iterable[PublishedCell], price_usd_per_hour: Mapping[str, float | None]) -> list[Preset]:
    """Two for each (model, input, output), in order of first appearance.

    price_usd_per_hour  of one instance, by its type
    """
    found: list[Preset] = []
    groups: dict[tuple[str, int, int], list[PublishedCell]] = {}
    for cell in cells:
        groups.setdefault((cell.model, cell.input_tokens, cell.output_tokens), []).append(cell)
    for group in groups.values():
        priced = [(usd, cell) for cell in group if (usd := _usd(cell, price_usd_per_hour))]
        if priced:
            usd, cheapest = min(priced, key=lambda each: each[0])
            found.append(Preset(LOWER_COST, cheapest, usd))
        timed = [
            (latency, cell.replicas * (price_usd_per_hour.get(cell.instance_type) or 0.0), cell)
            for cell in group
            if (latency := cell.latency_s_per_token) is not None
        ]
        if timed:  # if equal, the cheaper machine
            _, _, fastest = min(timed, key=lambda each: each[:2])
            found.append(Preset(LOWER_LATENCY, fastest, _usd(fastest, price_usd_per_hour)))
    return found


def _usd(cell: PublishedCell, prices: Mapping[str, float | None]) -> float | None:
    price = prices.get(cell.instance_type)
    fleet = None if price is None else cell.replicas * price
    return usd_per_1m_tokens(fleet, cell.throughput_tokens_per_s)
