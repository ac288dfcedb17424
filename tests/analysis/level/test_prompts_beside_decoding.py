"""The closed form of prompts that join decode steps, against the engine's scheduler."""

from __future__ import annotations

import pytest

from lmi_bench.analysis.level.layouts import Workload, layouts_of, plan_copy
from lmi_bench.analysis.model.builtin_profiles import VLLM_0_12
from lmi_bench.analysis.results.columns import columns_of
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
    seen = columns_of(level.records[users : 3 * users])
    e2e_s, tpot_s = (seen.each_s(open_loop=False)[name].mean() for name in ("e2e", "tpot"))
    assert steady.rate_per_s(users) == pytest.approx(users / e2e_s, rel=0.05)
    assert steady.latency_s("tpot", "mean", users) == pytest.approx(tpot_s, rel=0.05)
