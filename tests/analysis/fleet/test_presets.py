"""Measured configurations, chosen for cost or for latency."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lmi_bench.analysis.fleet.accelerator_comparison import LOWER_COST, LOWER_LATENCY, presets
from lmi_bench.catalog.instances import find_instance
from lmi_bench.catalog.published import jumpstart_cells

CELLS = jumpstart_cells("concurrency", "min_latency", "max_throughput")
G5 = ("ml.g5.2xlarge", "ml.g5.12xlarge", "ml.g5.48xlarge")
PRICES = {name: find_instance(name).price_usd_per_hour for name in G5}


def chosen(cells, prices=PRICES):
    return {preset.goal: preset for preset in presets(cells, prices)}


def test_low_cost_is_a_full_machine_and_low_latency_an_idle_one():
    """Llama 2 7B, 256 in and 256 out: 492 tok/s of a g5.2xlarge for 1.515 USD an hour are 0.855
    USD a million; the least latency published is 17 ms a token, on one g5.12xlarge."""
    cells = [
        cell
        for cell in CELLS
        if cell.model == "Llama 2 7B"
        and (cell.input_tokens, cell.output_tokens) == (256, 256)
        and cell.instance_type in G5
        and cell.replicas == 1
    ]
    cheap, fast = chosen(cells)[LOWER_COST], chosen(cells)[LOWER_LATENCY]
    assert (cheap.cell.instance_type, cheap.cell.concurrency) == ("ml.g5.2xlarge", 64)
    assert cheap.usd_per_1m_output == pytest.approx(1.515e6 / 3600 / 492, rel=1e-3)
    assert (fast.cell.instance_type, fast.cell.concurrency) == ("ml.g5.12xlarge", 1)
    assert fast.cell.latency_s_per_token == pytest.approx(0.017)


def test_every_instance_behind_an_endpoint_is_paid_for():
    one = next(cell for cell in CELLS if cell.throughput_tokens_per_s)
    prices = {one.instance_type: 2.0}
    alone = chosen([one], prices)[LOWER_COST].usd_per_1m_output
    two = chosen([replace(one, replicas=2)], prices)[LOWER_COST].usd_per_1m_output
    assert two == pytest.approx(2 * alone)


def test_without_a_price_no_cost_is_claimed():
    one = next(cell for cell in CELLS if cell.latency_s_per_token)
    assert LOWER_COST not in chosen([one], {})
    assert chosen([one], {})[LOWER_LATENCY].usd_per_1m_output is None
