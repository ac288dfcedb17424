"""The highest rate of a copy against the engine's own scheduler, beyond the closed form's range."""

from __future__ import annotations

import pytest

from lmi_bench.analysis.fleet import operating_point
from lmi_bench.analysis.fleet.operating_point import CopySimulation
from lmi_bench.analysis.level.layouts import Layout, Workload, plan_copy
from lmi_bench.analysis.model.builtin_profiles import VLLM_0_12, VLLM_0_19
from lmi_bench.analysis.results.latency import summarise_level
from lmi_bench.catalog.instances import find_instance
from lmi_bench.catalog.models import find_model
from lmi_bench.core.load import Load
from lmi_bench.core.slo import parse_slo
from lmi_bench.core.workload import LevelSpec

REQUESTS = 600  # enough for a queue that grows to be seen; benchmarks/first_hour.py sends 1,500


@pytest.fixture
def _short(monkeypatch):
    monkeypatch.setattr(operating_point, "_SETTLED_REQUESTS", REQUESTS)


def copy_of(profile, model, machine, degree, lengths, slos):
    workload = Workload(find_model(model), "float16", *lengths)
    plan = plan_copy(Layout(find_instance(machine), degree), workload, profile, open_loop=True)
    return CopySimulation(plan, tuple(map(parse_slo, slos)), seed=0)


def keeps(copy, rate_per_s):
    spec = LevelSpec(0, Load(rate_per_s=rate_per_s), num_requests=REQUESTS)
    level = summarise_level(copy.plan.simulate(spec, seed=1))
    return all(level.of(slo.metric).value(slo.statistic) <= slo.limit_ms for slo in copy.slos)


@pytest.mark.usefixtures("_short")
@pytest.mark.parametrize(
    ("profile", "model", "machine", "degree", "lengths", "slos", "times"),
    [
        # 85 prompt tokens take a step of 53 ms alone, as 2,048 tokens of many prompts nearly do: a
        # closed form with a step for each prompt saturates at less than half of what is carried
        (VLLM_0_12, "mistral-7b", "ml.g6.xlarge", 1, (85, 19), ("ttft_p90<=516ms",), (0.9, 1.1)),
        # a prompt within an answer of 27 tokens breaks the limit: at most every tenth may have one
        (
            VLLM_0_19,
            "gemma-2-27b",
            "ml.p4de.24xlarge",
            2,
            (1592, 27),
            ("ttft_p90<=1.61s", "tpot_p90<=25.3ms"),
            (0.005, 0.04),
        ),
    ],
    ids=["near", "far below"],
)
def test_a_capacity_near_saturation_in_closed_form_or_far_below_is_found(
    profile, model, machine, degree, lengths, slos, times
):
    copy = copy_of(profile, model, machine, degree, lengths, slos)
    saturated = copy.plan.steady.saturated_rate_per_s
    rate_per_s = copy.sustained_rate(saturated, copy.slos)
    assert times[0] < rate_per_s / saturated < times[1]
    assert keeps(copy, 0.8 * rate_per_s)
    assert not keeps(copy, 1.4 * rate_per_s)


def test_a_limit_on_gaps_alone_does_not_hide_a_growing_queue():
    """Gaps of a full batch are as long under any queue: arrivals may exceed answers by 3 %."""
    copy = copy_of(VLLM_0_12, "mistral-7b", "ml.g6.xlarge", 1, (85, 19), ("tpot_p90<=2s",))
    rate_per_s = copy.sustained_rate(1.0, copy.slos)
    assert keeps(copy, 4 * rate_per_s)
    run = copy.plan.follow(rate_per_s, 4 * REQUESTS, seed=1)
    assert 4 * REQUESTS / run.wall_s > 0.9 * rate_per_s
