"""The four steps by hand, and the tables that the published figures agree with."""

from __future__ import annotations

import pytest

from lmi_bench.analysis.fleet.accelerator_comparison import best_by_machine, four_steps, machine_figures, sharding
from lmi_bench.analysis.level.layouts import Workload
from lmi_bench.analysis.model.builtin_profiles import TGI_2023
from lmi_bench.catalog.instances import all_instances, find_instance
from lmi_bench.catalog.models import find_model

LLAMA = Workload(find_model("llama-2-7b"), "float16", 256, 256)


@pytest.fixture(scope="module")
def steps():
    return {row.accelerator: row for row in four_steps(all_instances(), LLAMA)}


def test_a10g_by_hand(steps):
    """70e12 / 600e9 = 116.7; 512 tokens take 0.25 GiB; 117 of them and 12.55 GiB of weights need
    two times 22.35 GiB, which g5.12xlarge has: a quarter of 7.09 USD / 600 GB/s."""
    row = steps["A10G"]
    assert row.critical_batch == pytest.approx(116.7, abs=0.1)
    assert row.kv_gib == pytest.approx(116.67 * 0.25, rel=1e-3)
    assert row.devices == 2
    assert row.machine.instance_type == "ml.g5.12xlarge"
    assert row.usd_per_hour_gb_s == pytest.approx(7.09 / 4 / 600)


def test_a_device_is_priced_in_the_cheapest_machine_that_holds_the_model(steps):
    large = Workload(find_model("llama-3-70b"), "float16", 256, 256)
    rows = {row.accelerator: row for row in four_steps(all_instances(), large)}
    assert steps["L40S"].machine.instance_type == "ml.g6e.12xlarge"  # for 4 of them
    assert rows["L40S"].machine.instance_type == "ml.g6e.48xlarge"  # for 8
    assert rows["L40S"].usd_per_hour_device == pytest.approx(4.708, abs=1e-3)
    assert not rows["T4"].holds  # 16 of them, and no machine has so many
    assert rows["T4"].machine.instance_type == "ml.g4dn.xlarge"


def test_a100_by_hand(steps):
    """312e12 / 1555e9 = 200.6; 50.2 GiB of cache and 12.55 of weights on two of 40 GiB; an eighth
    of p4d's 25.251286 USD over 1555 GB/s."""
    row = steps["A100-40"]
    assert row.critical_batch == pytest.approx(200.6, abs=0.1)
    assert row.kv_gib == pytest.approx(50.2, abs=0.1)
    assert row.devices == 2
    assert row.usd_per_hour_gb_s == pytest.approx(25.251286 / 8 / 1555)


def test_a_mixture_reads_all_its_experts_and_computes_with_two():
    """B* = (W / BW) / (2 P / F): 46.70e9 * 2 bytes, 12.88e9 active parameters, 312e12 / 2039e9."""
    mixtral = Workload(find_model("mixtral-8x7b"), "float16", 256, 256)
    (row,) = four_steps([find_instance("ml.p4de.24xlarge")], mixtral)
    assert row.critical_batch == pytest.approx(153.0 * 46.70 / 12.88, rel=1e-3)


def test_the_cheapest_bandwidth_stands_first_and_the_unpriced_last(steps):
    prices = [row.usd_per_hour_gb_s for row in steps.values()]
    known = [price for price in prices if price is not None]
    assert known == sorted(known)
    assert prices[len(known) :] == [None] * (len(prices) - len(known))


@pytest.fixture(scope="module")
def figures():
    names = ("ml.g5.2xlarge", "ml.g5.12xlarge", "ml.g5.48xlarge", "ml.p4d.24xlarge")
    return machine_figures([find_instance(name) for name in names], LLAMA, TGI_2023)[0]


def test_least_latency_agrees_with_the_published_table(figures):
    """Published, one request: g5.2xlarge 33 ms/token, g5.12xlarge and p4d 16 and less."""
    order = [each.layout.instance.instance_type for each in best_by_machine(figures, by="latency")]
    assert order[-1] == "ml.g5.2xlarge"
    slowest = best_by_machine(figures, by="latency")[-1]
    assert slowest.latency_ms_per_token == pytest.approx(33, rel=0.1)


def test_eight_copies_on_p4d_beat_one_over_all_devices(figures):
    pairs = {best.layout.instance.instance_type: (best, whole) for best, whole in sharding(figures)}
    best, whole = pairs["ml.p4d.24xlarge"]
    assert (best.layout.tensor_parallel, best.layout.copies) == (1, 8)
    assert best.throughput_tokens_per_s > 3 * whole.throughput_tokens_per_s
    assert "ml.g5.2xlarge" not in pairs


def test_the_cost_is_the_price_over_the_tokens_of_an_hour(figures):
    best = best_by_machine(figures, by="cost")[0]
    tokens_an_hour = 3600 * best.throughput_tokens_per_s
    price = best.layout.instance.price_usd_per_hour
    assert best.usd_per_1m_output == pytest.approx(price / tokens_an_hour * 1e6)
    costs = [each.usd_per_1m_output for each in best_by_machine(figures, by="cost")]
    assert costs == sorted(costs)
