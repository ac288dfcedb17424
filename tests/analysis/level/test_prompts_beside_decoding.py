"""The closed form of prompts that join decode steps, against the engine's scheduler."""

from __future__ import annotations

from statistics import fmean

import pytest

from lmi_bench.analysis.level.layouts import Workload, layouts_of, plan_copy
from lmi_bench.analysis.model.builtin_profiles import VLLM_0_12
from lmi_bench.analysis.results.latency import request_latency
from lmi_bench.catalog.instances import find_instance
from lmi_bench.catalog.models import find_model
from lmi_bench.core.load import Load
from lmi_bench.core.workload import LevelSpec

CELLS = [
    ("mixtral-8x7b", "ml.g6e.12xlarge", 4, 128, 64),
    ("llama-3.1-8b", "ml.p5.4xlarge", 1, 512, 128),
    ("llama-3-70b", "ml.p5.48xlarge", 8, 2000, 200),
]


@pytest.mark.parametrize("users", [8, 64, 200])
@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell[0])
def test_rate_and_time_per_token_of_spread_users_are_the_scheduler_s(cell, users):
    """Before, each prompt took a step of its own that read all weights again: with 200 users of
    Mixtral half the rate."""
    model, machine, degree, prompt, output = cell
    (layout,) = layouts_of(find_instance(machine), [degree])
    workload = Workload(find_model(model), "float16", prompt, output)
    plan = plan_copy(layout, workload, VLLM_0_12, open_loop=False)
    steady = plan.steady
    spec = LevelSpec(0, Load(concurrency=users), num_requests=4 * users)
    level = plan.simulate(spec, spacing_s=1 / steady.rate_per_s(users))
    seen = [request_latency(each, open_loop=False) for each in level.records[users : 3 * users]]
    assert steady.rate_per_s(users) == pytest.approx(
        users / fmean(each.e2e_s for each in seen), rel=0.05
    )
    tpot_s = fmean(each.tpot_s for each in seen)
    assert steady.latency_s("tpot", "mean", users) == pytest.approx(tpot_s, rel=0.05)
