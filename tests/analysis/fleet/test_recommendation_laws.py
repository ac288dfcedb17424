"""What must hold of every recommendation, whatever the numbers.

Short outputs and one degree keep a draw cheap; machines differ by orders of magnitude in price and
speed.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmi_bench.analysis.fleet.operating_point import held_limit
from lmi_bench.analysis.fleet.recommender import recommend
from lmi_bench.analysis.fleet.request import RecommendRequest
from lmi_bench.analysis.level.layouts import Layout, Workload, plan_copy
from lmi_bench.analysis.model.builtin_profiles import TGI_2023
from lmi_bench.catalog.instances import find_instance
from lmi_bench.catalog.models import find_model
from lmi_bench.core.load import Load
from lmi_bench.core.slo import Slo

WORKLOAD = Workload(find_model("llama-2-7b"), "float16", 128, 12)
MACHINES = tuple(
    find_instance(name) for name in ("ml.g5.2xlarge", "ml.g5.12xlarge", "ml.g6e.2xlarge", "ml.p4d.24xlarge")
)
few = settings(max_examples=1)
rates = st.floats(0.5, 60.0)
limits_ms = st.floats(25.0, 150.0)


def ask(rate, limit_ms, instances=MACHINES, **options):
    slos = (Slo("latency_per_token", "p90", limit_ms),)
    return recommend(
        RecommendRequest(
            WORKLOAD, TGI_2023, load=Load(rate_per_s=rate), slos=slos, instances=instances, degrees=(1,), **options
        )
    )


def cost(answer):
    best = answer.recommended
    return float("inf") if best is None else best.price_usd_per_hour


@few
@given(rate=rates, limit=limits_ms, factor=st.floats(1.02, 2.0))
def test_a_stricter_limit_never_costs_less(rate, limit, factor):
    assert cost(ask(rate, limit)) >= cost(ask(rate, limit * factor)) - 1e-9


@few
@given(rate=rates, limit=limits_ms, factor=st.floats(1.02, 4.0))
def test_more_load_never_costs_less(rate, limit, factor):
    assert cost(ask(rate, limit)) <= cost(ask(rate * factor, limit)) + 1e-9


@few
@given(rate=rates, limit=limits_ms, factor=st.floats(0.1, 10.0))
def test_all_prices_times_a_factor_keep_the_order(rate, limit, factor):
    scaled = tuple(replace(m, price_usd_per_hour=m.price_usd_per_hour * factor) for m in MACHINES)
    names = [
        [(c.instance, c.tensor_parallel, c.instances) for c in answer.candidates]
        for answer in (ask(rate, limit), ask(rate, limit, scaled))
    ]
    assert names[0] == names[1]


@few
@given(rate=rates, limit=limits_ms, left_out=st.sampled_from(MACHINES))
def test_one_more_machine_to_choose_from_never_worsens_the_answer(rate, limit, left_out):
    fewer = tuple(machine for machine in MACHINES if machine is not left_out)
    assert cost(ask(rate, limit)) <= cost(ask(rate, limit, fewer)) + 1e-9


@settings(max_examples=25)
@given(
    name=st.sampled_from([machine.instance_type for machine in MACHINES]),
    bandwidth=st.floats(1.0, 3.0),
    memory=st.floats(1.0, 3.0),
    open_loop=st.booleans(),
)
def test_more_bandwidth_or_memory_never_lowers_the_capacity(name, bandwidth, memory, open_loop):
    machine = find_instance(name)
    device = machine.accelerator
    better = replace(
        machine,
        accelerator=replace(
            device,
            bandwidth_bytes_per_s=device.bandwidth_bytes_per_s * bandwidth,
            memory_bytes=int(device.memory_bytes * memory),
        ),
    )

    def capacity(instance):
        plan = plan_copy(Layout(instance, 1), WORKLOAD, TGI_2023, open_loop=open_loop)
        return plan.steady.saturated_rate_per_s

    assert capacity(better) >= capacity(machine) * (1 - 1e-9)


@given(limit=st.floats(1.0, 100.0), more=st.floats(0.0, 50.0), lone=st.floats(1.0, 60.0), factor=st.floats(1.0, 2.5))
def test_of_two_limits_the_stricter_one_is_held_no_higher(limit, more, lone, factor):
    strict, loose = (held_limit(value, lone, factor) for value in (limit, limit + more))
    assert strict <= loose * (1 + 1e-12)
    assert strict <= limit


def test_a_limit_with_room_is_held_at_the_end_of_the_interval():
    """30 ms of 10 ms alone, in a world up to 1.5 times slower: 20 ms."""
    assert held_limit(30.0, 10.0, 1.5) == pytest.approx(20.0)
