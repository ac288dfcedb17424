"""Event by event against the engine's scheduler: arrivals, users, chunks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lmi_bench.analysis.level.fast import Chance, CopyLimits, even_arrivals, run_open, run_users
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
    config = replace(
        config,
        max_rolling_batch_prefill_tokens=profile.max_prefill_tokens,
        max_rolling_batch_size=24,
    )
    model = step_time_model_for(Setup(shape, instance, 1, "float16"), profile)
    limits = CopyLimits(isl, osl, 24, profile.max_prefill_tokens, profile.chunked_prefill)
    return config, model, limits


@pytest.mark.parametrize(
    ("profile", "name", "machine", "rate"),
    [
        (TGI_2023, "llama-2-7b", "ml.g5.2xlarge", 1.0),
        (TGI_2023, "llama-2-7b", "ml.g5.2xlarge", 4.0),  # beyond capacity
        (VLLM_0_19, "llama-3.1-8b", "ml.p5.4xlarge", 12.0),
    ],
)
def test_random_arrivals_meet_the_same_times_as_in_the_scheduler(profile, name, machine, rate):
    config, model, limits = setting(profile, name, machine, 256, 64)
    level = simulate_level(
        LevelSpec(0, Load(rate_per_s=rate), num_requests=150),
        lambda i: PlannedRequest(i, 0.0, 256, 64),
        config,
        model,
        seed=4,
    )
    arrivals = list(
        arrival_times_s(rate, process="poisson", seed=4, num_requests=150, duration_s=None)
    )
    run = run_open(model.pricer(), arrivals, limits)
    seen_ttft = [r.token_times_s[0] - r.due_s for r in level.records]
    seen_e2e = [r.token_times_s[-1] - r.due_s for r in level.records]
    assert run.ttft_s.mean() == pytest.approx(np.mean(seen_ttft), rel=0.02)
    assert run.e2e_s.mean() == pytest.approx(np.mean(seen_e2e), rel=0.02)


def test_users_meet_the_same_times_as_in_the_scheduler():
    config, model, limits = setting(TGI_2023, "llama-2-7b", "ml.g5.2xlarge", 256, 64)
    level = simulate_level(
        LevelSpec(0, Load(concurrency=32), num_requests=96),
        lambda i: PlannedRequest(i, 0.0, 256, 64),
        config,
        model,
    )
    run = run_users(model.pricer(), 32, 96, limits)
    assert run.wall_s == pytest.approx(max(r.token_times_s[-1] for r in level.records), rel=0.01)


def test_different_lengths_break_up_the_groups_that_equal_requests_run_in():
    """Eight equal users ask together for ever; with lengths a tenth apart they spread out."""
    _, model, limits = setting(VLLM_0_19, "llama-3.1-8b", "ml.p5.4xlarge", 1024, 128)
    limits = replace(limits, max_prefill_tokens=8192)  # room for all eight prompts at once
    together = run_users(model.pricer(), 8, 160, limits)
    apart = run_users(model.pricer(), 8, 160, limits, Chance(length_spread=0.1))
    assert np.median(apart.ttft_s[80:]) < 0.7 * np.median(together.ttft_s[80:])
    assert apart.e2e_s.mean() == pytest.approx(together.e2e_s.mean(), rel=0.15)


def test_time_outside_the_engine_belongs_to_the_first_token():
    _, model, limits = setting(TGI_2023, "llama-2-7b", "ml.g5.2xlarge", 256, 8)
    plain = run_open(model.pricer(), [0.0], limits)
    slow = [
        run_open(
            model.pricer(), 100.0 * np.arange(200), limits, Chance(overhead_s=mean_s)
        ).ttft_s.mean()
        for mean_s in (0.1, 0.2)
    ]
    assert slow[1] - slow[0] == pytest.approx(slow[0] - plain.ttft_s.mean(), rel=0.01)
    assert slow[0] - plain.ttft_s.mean() == pytest.approx(0.1, rel=0.2)  # mean of 200 draws


def test_arrivals_have_their_rate_to_the_last_one():
    times = even_arrivals(5.0, 1000)
    assert times[-1] == pytest.approx(200.0)
    gaps = np.diff(times)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.1)  # as exponential gaps have
