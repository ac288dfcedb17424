"""The closed form of the screen against the scheduler's own simulation."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import poisson

from lmi_bench.analysis.level.cells import predict_cell
from lmi_bench.analysis.level.layouts import Layout, Workload, plan_copy
from lmi_bench.analysis.level.simulator import simulate_level
from lmi_bench.analysis.model.builtin_profiles import TGI_2023
from lmi_bench.analysis.model.measured_level import MeasuredLevel
from lmi_bench.analysis.results.columns import columns_of
from lmi_bench.catalog.instances import find_instance
from lmi_bench.catalog.models import find_model
from lmi_bench.core.load import Load
from lmi_bench.core.workload import LevelSpec, PlannedRequest

CASES = [
    ("llama-2-7b", "ml.g5.2xlarge", 1, 256, 256),
    ("llama-2-7b", "ml.p4d.24xlarge", 4, 256, 64),
    ("llama-3-70b", "ml.p4d.24xlarge", 8, 622, 250),
]


JOINS_AT_ONCE = replace(TGI_2023, max_waiting_tokens=0)


def copy(case, *, open_loop, profile=JOINS_AT_ONCE):
    model, instance, tp, input_tokens, output_tokens = case
    workload = Workload(find_model(model), "float16", input_tokens, output_tokens)
    return plan_copy(Layout(find_instance(instance), tp), workload, profile, open_loop=open_loop)


def latencies(plan, spec, **options):
    steady = plan.steady
    level = simulate_level(
        spec,
        lambda i: PlannedRequest(i, 0.0, steady.input_tokens, steady.output_tokens),
        plan.config,
        steady.model,
        **options,
    )
    settled = level.records[len(level.records) // 3 : 2 * len(level.records) // 3]
    columns = columns_of(settled)
    return lambda name: columns.values_s(name, open_loop=spec.concurrency is None)[0]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("users", [2, 9, 20])
def test_waiting_users_take_one_cycle_an_answer(case, users):
    plan = copy(case, open_loop=False)
    cycle_s = plan.steady.cycle_s(users)
    seen = latencies(plan, LevelSpec(0, Load(concurrency=users), num_requests=6 * users), spacing_s=cycle_s / users)
    assert seen("e2e").mean() == pytest.approx(cycle_s, rel=0.02)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("share", [0.3, 0.7])
def test_random_arrivals_are_foreseen_within_fifteen_per_cent(case, share):
    plan = copy(case, open_loop=True)
    steady = plan.steady
    rate = share * steady.saturated_rate_per_s
    batch = steady.batch_at(rate)
    number = max(300, round(6 * batch))  # the middle third is settled
    seen = latencies(plan, LevelSpec(0, Load(rate_per_s=rate), num_requests=number), seed=3)
    gap_s = np.median(seen("itl"))
    assert steady.latency_s("itl", "p50", batch) == pytest.approx(gap_s, rel=0.15)
    e2e_s = np.quantile(seen("e2e"), 0.9)
    assert steady.latency_s("e2e", "p90", batch) == pytest.approx(e2e_s, rel=0.15)


LAYOUTS = [("ml.p4d.24xlarge", 4), ("ml.p4d.24xlarge", 8), ("ml.g5.12xlarge", 4), ("ml.g5.48xlarge", 8)]
"""Published, 256 users: each first of a pair has more throughput than its second."""


def test_sequences_that_run_are_limited_by_how_many_prompts_may_join():
    """16 prompts of 256 fit a step of 4,096, which may pause the others after 19 decode steps: of
    answers with 255 further tokens 16 * 255 / 19 = 214 run at a time. The cache holds 1,000."""
    workload = Workload(find_model("llama-2-7b"), "float16", 256, 256)
    layout = Layout(find_instance("ml.p4d.24xlarge"), 8)
    steady = plan_copy(layout, workload, TGI_2023, open_loop=False).steady
    assert steady.slots == 214
    assert steady.limiting_part(214) == "batch_limit"
    at_once = replace(TGI_2023, max_waiting_tokens=0)
    assert plan_copy(layout, workload, at_once, open_loop=False).steady.slots > 1000


def test_layouts_rank_as_in_the_simulation_where_prompts_wait_to_join():
    """Simulated: 300 users of one copy; its figures are within a tenth of the closed form's."""
    workload = Workload(find_model("llama-2-7b"), "float16", 256, 256)
    screened, simulated = [], []
    for name, degree in LAYOUTS:
        layout = Layout(find_instance(name), degree)
        plan = plan_copy(layout, workload, TGI_2023, open_loop=False)
        screened.append(plan.steady.saturated_rate_per_s)
        level = MeasuredLevel(layout.setup(workload), 256, 256, Load(300), num_requests=3000)
        simulated.append(predict_cell(TGI_2023, level).throughput_tokens_per_s / 256)
    assert np.argsort(screened).tolist() == np.argsort(simulated).tolist()
    assert screened == pytest.approx(simulated, rel=0.1)


@pytest.mark.parametrize("users", [9, 20, 60])
def test_users_who_wait_to_join_take_longer(users):
    plan = copy(CASES[1], open_loop=False, profile=TGI_2023)
    answer_s = users / plan.steady.rate_per_s(users)
    assert answer_s > 1.02 * plan.steady.cycle_s(users)
    spec = LevelSpec(0, Load(concurrency=users), num_requests=6 * users)
    seen = latencies(plan, spec, spacing_s=answer_s / users)
    assert seen("e2e").mean() == pytest.approx(answer_s, rel=0.1)


def test_the_batch_at_a_rate_is_little_s_law():
    """Sequences in service = arrivals a second * seconds of service."""
    steady = copy(CASES[0], open_loop=True).steady
    rate = 0.6 * steady.saturated_rate_per_s
    batch = steady.batch_at(rate)
    assert batch == pytest.approx(rate * steady.cycle_s(batch), rel=1e-6)


@pytest.mark.parametrize("mean", [699.0, 701.0, 2000.0])
@pytest.mark.parametrize("quantile", [0.5, 0.9, 0.99])
def test_any_number_of_prompts_comes_between_two_tokens(mean, quantile):
    """As many as a Poisson count has at that quantile, although exp(-746) is 0."""
    steady = copy(CASES[0], open_loop=True).steady
    found = steady._prompts_between_tokens(mean, quantile)
    assert found == pytest.approx(poisson.ppf(quantile, mean), abs=2)


def test_a_small_cache_is_named_as_the_limit_of_an_a10g():
    """28 sequences fit, and a larger batch would still bring more."""
    steady = copy(CASES[0], open_loop=False).steady
    assert steady.slots == 28
    assert steady.limiting_part(steady.slots) == "kv_memory"
    assert steady.limiting_part(4) == "bandwidth"


def test_an_engine_s_own_limit_is_named_apart_from_the_cache():
    """The same A10G with room for 28 sequences, of which the engine runs 8 at most."""
    workload = Workload(find_model("llama-2-7b"), "float16", 256, 256)
    limited = replace(TGI_2023, max_batch_size=8)
    layout = Layout(find_instance("ml.g5.2xlarge"), 1)
    steady = plan_copy(layout, workload, limited, open_loop=False).steady
    assert steady.slots == 8
    assert steady.limiting_part(8) == "batch_limit"


def test_what_binds_is_where_the_request_s_seconds_go_its_prompt_included():
    """70B over the one bridge of 8 A10G: 622 tokens * 8,192 * 2 bytes * 160 all-reduces are 1.63
    GB, 14 times over 32 GB/s * 0.55 1.3 s a prompt; a decode step reads 5 GB in 10 ms. A lone
    request with few prompt tokens reads weights."""
    workload = Workload(find_model("llama-3-70b"), "int4", 622, 50)
    layout = Layout(find_instance("ml.g5.48xlarge"), 8)
    steady = plan_copy(layout, workload, TGI_2023, open_loop=False).steady
    assert steady.model.explain(steady.prompt_shape()).all_reduce_s == pytest.approx(1.3, rel=0.1)
    assert steady.binding(8) == "link"
    lone = copy(("llama-2-7b", "ml.g5.2xlarge", 1, 16, 256), open_loop=False).steady
    assert lone.binding(1) == "bandwidth"
