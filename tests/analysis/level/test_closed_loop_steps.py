"""Steps found once and priced as arrays, against the engine's own scheduler step by step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lmi_bench.analysis.level.fast import CopyLimits, trace_closed_loop
from lmi_bench.analysis.level.simulator import simulate_level
from lmi_bench.analysis.model.builtin_profiles import TGI_2023, VLLM_0_12
from lmi_bench.analysis.model.capacity import scheduler_config_for, step_time_model_for
from lmi_bench.analysis.model.setup import Setup
from lmi_bench.catalog.instances import find_instance
from lmi_bench.catalog.models import find_model
from lmi_bench.core.errors import CapacityError
from lmi_bench.core.load import Load
from lmi_bench.core.workload import LevelSpec, PlannedRequest
from lmi_bench.engine.scheduling.config import KvLayout
from lmi_bench.engine.scheduling.step_shape import StepShape

CHUNKED = replace(VLLM_0_12, max_batch_size=64, max_prefill_tokens=1024, kv_layout=KvLayout.PAGED)
CASES = [
    (TGI_2023, "llama-2-7b", "ml.g5.2xlarge", 1, 16, 256, 64),
    (TGI_2023, "llama-2-7b", "ml.g5.2xlarge", 1, 64, 256, 64),  # more than the cache holds
    (TGI_2023, "llama-2-7b", "ml.p4d.24xlarge", 8, 40, 100, 7),
    (CHUNKED, "qwen3-32b", "ml.p5.48xlarge", 2, 8, 700, 32),  # prompts are cut
    (CHUNKED, "qwen3-32b", "ml.p5.48xlarge", 4, 100, 256, 20),  # more than may run
]


@pytest.mark.parametrize("case", CASES)
def test_a_trace_gives_the_scheduler_s_times(case):
    profile, name, machine, tp, users, isl, osl = case
    shape, instance = find_model(name), find_instance(machine)
    config = scheduler_config_for(Setup(shape, instance, tp, "float16"), profile, isl + osl)
    config = replace(config, max_rolling_batch_prefill_tokens=profile.max_prefill_tokens)
    model = step_time_model_for(Setup(shape, instance, tp, "float16"), profile)
    level = simulate_level(
        LevelSpec(0, Load(concurrency=users), num_requests=3 * users),
        lambda i: PlannedRequest(i, 0.0, isl, osl),
        config,
        model,
    )
    blocks = -(-(isl + osl) // config.block_size)
    trace = trace_closed_loop(
        CopyLimits(
            isl,
            osl,
            min(config.num_blocks // blocks, config.max_rolling_batch_size),
            profile.max_prefill_tokens,
            profile.chunked_prefill,
            max_waiting_tokens=profile.max_waiting_tokens,
        ),
        users,
        3 * users,
    )
    at_s = np.concatenate([[0.0], np.cumsum(model.step_times_s(trace.columns))])
    assert trace.count.sum() == 3 * users
    assert at_s[-1] == pytest.approx(max(r.token_times_s[-1] for r in level.records), rel=0.01)
    e2e_s = np.repeat(at_s[trace.end + 1] - at_s[trace.sent + 1], trace.count)
    seen_s = [record.token_times_s[-1] - record.sent_s for record in level.records]
    assert e2e_s.mean() == pytest.approx(np.mean(seen_s), rel=0.01)


@pytest.mark.parametrize("name", ["llama-3-70b", "mixtral-8x7b", "gemma-2-9b", "deepseek-v3"])
def test_arrays_price_what_single_steps_cost(name):
    """Dense with GQA, experts, sliding windows, latent attention: one sum, taken in two ways."""
    shape, instance = find_model(name), find_instance("ml.p5.48xlarge")
    model = step_time_model_for(Setup(shape, instance, 8, "float16"), VLLM_0_12)
    trace = trace_closed_loop(CopyLimits(3000, 20, 16, 2048, True), 24, 48)
    price = model.pricer()
    times_s = model.step_times_s(trace.columns)
    for row in range(len(times_s)):
        repeat = trace.columns.repeat[row]
        counts = [round(column[row]) for column in trace.columns.counts]
        step = StepShape(
            decode_sequences=counts[0],
            decode_tokens=counts[0],
            decode_context_tokens=counts[1],
            prefill_sequences=counts[2],
            prefill_tokens=counts[3],
            prefill_context_pairs=counts[4],
            prefill_context_tokens=counts[5],
        )
        assert times_s[row] / repeat == pytest.approx(model.explain(step).total_s, rel=1e-3)
        assert price(*counts) == pytest.approx(model.explain(step).total_s, rel=1e-9)


def test_a_cache_that_holds_no_sequence_is_refused():
    with pytest.raises(CapacityError, match="512 tokens"):
        CopyLimits(256, 256, 0, 4096, False)
