"""Event by event against the engine's scheduler: arrivals, users, chunks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lmi_bench.analysis.level.cells import even_arrivals
from lmi_bench.analysis.level.queueing import follow
from lmi_bench.analysis.level.simulator import simulate_level
from lmi_bench.analysis.model.builtin_profiles import TGI_2023, VLLM_0_19
from lmi_bench.analysis.model.capacity import scheduler_config_for, step_time_model_for
from lmi_bench.analysis.model.setup import Setup
from lmi_bench.catalog.instances import find_instance
from lmi_bench.catalog.models import find_model
from lmi_bench.core.load import Load
from lmi_bench.core.workload import LevelSpec, PlannedRequest, arrival_times_s


def setting(profile, name, machine, isl, osl):
    shape, instance = find_model(name), find_instance(machine)
    config = scheduler_config_for(Setup(shape, instance, 1, "float16"), profile, isl + osl)
    config = replace(config, max_rolling_batch_prefill_tokens=profile.max_prefill_tokens, max_rolling_batch_size=24)
    model = step_time_model_for(Setup(shape, instance, 1, "float16"), profile)
    return config, model


@pytest.mark.parametrize(
    ("profile", "name", "machine", "rate"),
    [
        (TGI_2023, "llama-2-7b", "ml.g5.2xlarge", 1.0),
        (TGI_2023, "llama-2-7b", "ml.g5.2xlarge", 4.0),  # beyond capacity
        (VLLM_0_19, "llama-3.1-8b", "ml.p5.4xlarge", 12.0),
    ],
)
def test_random_arrivals_meet_the_same_times_as_in_the_scheduler(profile, name, machine, rate):
    config, model = setting(profile, name, machine, 256, 64)
    level = simulate_level(
        LevelSpec(0, Load(rate_per_s=rate), num_requests=150),
        lambda i: PlannedRequest(i, 0.0, 256, 64),
        config,
        model,
        seed=4,
    )
    arrivals = list(arrival_times_s(Load(rate_per_s=rate), seed=4, num_requests=150))
    run = follow(model.pricer(), config, arrivals, [(256, 64)] * 150)
    seen_ttft = [r.token_times_s[0] - r.due_s for r in level.records]
    seen_e2e = [r.token_times_s[-1] - r.due_s for r in level.records]
    assert run.ttft_s.mean() == pytest.approx(np.mean(seen_ttft), rel=0.02)
    assert run.e2e_s.mean() == pytest.approx(np.mean(seen_e2e), rel=0.02)


@pytest.mark.parametrize("overhead_s", [0.0, 0.2])
def test_users_meet_the_same_times_as_in_the_scheduler(overhead_s):
    config, model = setting(TGI_2023, "llama-2-7b", "ml.g5.2xlarge", 256, 64)
    level = simulate_level(
        LevelSpec(0, Load(concurrency=32), num_requests=96),
        lambda i: PlannedRequest(i, 0.0, 256, 64),
        config,
        model,
        overhead_s=overhead_s,
    )
    run = follow(model.pricer(), config, 32, [(256, 64)] * 96, overhead_s=overhead_s)
    assert run.wall_s == pytest.approx(max(r.token_times_s[-1] for r in level.records), rel=0.01)
    seen_s = [r.token_times_s[0] - r.sent_s for r in level.records]
    assert run.ttft_s.mean() == pytest.approx(np.mean(seen_s), rel=0.02)


def test_different_lengths_break_up_the_groups_that_equal_requests_run_in():
    """Eight equal users ask together for ever; with lengths a tenth apart they spread out."""
    config, model = setting(VLLM_0_19, "llama-3.1-8b", "ml.p5.4xlarge", 1024, 128)
    config = replace(config, max_rolling_batch_prefill_tokens=8192)  # all eight prompts at once
    outputs = np.random.default_rng(22).uniform(115, 141, size=160).round().astype(int)
    together = follow(model.pricer(), config, 8, [(1024, 128)] * 160)
    apart = follow(model.pricer(), config, 8, [(1024, int(each)) for each in outputs])
    assert np.median(apart.ttft_s[80:]) < 0.7 * np.median(together.ttft_s[80:])
    assert apart.e2e_s.mean() == pytest.approx(together.e2e_s.mean(), rel=0.15)


def test_time_outside_the_engine_belongs_to_the_first_token():
    config, model = setting(TGI_2023, "llama-2-7b", "ml.g5.2xlarge", 256, 8)
    load = (model.pricer(), config, [0.0, 100.0], [(256, 8)] * 2)
    plain, slow = follow(*load), follow(*load, overhead_s=0.1)
    assert slow.ttft_s == pytest.approx(plain.ttft_s + 0.1)
    assert slow.e2e_s == pytest.approx(plain.e2e_s + 0.1)


def test_tokens_in_the_prefix_cache_are_not_computed():
    config, model = setting(VLLM_0_19, "llama-3.1-8b", "ml.p5.4xlarge", 1024, 8)
    load = (model.pricer(), config, [0.0])
    cached, computed = follow(*load, [(1024, 8, 1000)]), follow(*load, [(1024, 8)])
    assert cached.ttft_s < 0.7 * computed.ttft_s


def test_arrivals_have_their_rate_to_the_last_one():
    times = even_arrivals(5.0, 1000)
    assert times[-1] == pytest.approx(200.0)
    gaps = np.diff(times)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.1)  # as exponential gaps have
