"""The fast path against the engine's own scheduler, step by step."""

from __future__ import annotations

import numpy as np
import pytest

from lmi_bench.analysis.builtin_profiles import TGI_2023
from lmi_bench.analysis.capacity import scheduler_config_for, step_time_model_for
from lmi_bench.analysis.closed_loop import ClosedLoopLoad, run_closed_loop
from lmi_bench.analysis.simulator import simulate_level
from lmi_bench.catalog.instances import find_instance
from lmi_bench.catalog.models import find_model
from lmi_bench.errors import CapacityError
from lmi_bench.workload import LevelSpec, PlannedRequest


@pytest.mark.parametrize(
    ("instance_type", "tp", "concurrency", "input_tokens", "output_tokens"),
    [
        ("ml.g5.2xlarge", 1, 1, 256, 256),
        ("ml.g5.2xlarge", 1, 16, 256, 256),
        ("ml.g5.2xlarge", 1, 64, 256, 256),  # twice what the cache holds
        ("ml.g5.2xlarge", 1, 8, 3000, 40),  # one prompt a step
        ("ml.g5.48xlarge", 8, 37, 100, 7),
        ("ml.p4d.24xlarge", 8, 128, 256, 64),
        ("ml.p4d.24xlarge", 1, 5, 10, 1),  # a prompt's step is the whole answer
    ],
)
def test_following_events_gives_what_the_scheduler_gives_step_by_step(
    instance_type, tp, concurrency, input_tokens, output_tokens
):
    shape, instance = find_model("llama-2-7b"), find_instance(instance_type)
    total = input_tokens + output_tokens
    config = scheduler_config_for(shape, instance, tp, "float16", TGI_2023, total)
    model = step_time_model_for(shape, instance, tp, "float16", TGI_2023)
    level = simulate_level(
        LevelSpec(0, concurrency=concurrency, num_requests=3 * concurrency),
        lambda i: PlannedRequest(i, 0.0, input_tokens, output_tokens),
        config,
        model,
    )
    blocks = -(-total // config.block_size)
    run = run_closed_loop(
        model,
        ClosedLoopLoad(concurrency, 3 * concurrency, input_tokens, output_tokens),
        max_sequences=min(config.num_blocks // blocks, config.max_rolling_batch_size),
        max_prefill_tokens=config.max_rolling_batch_prefill_tokens,
    )
    wall_s = max(record.token_times_s[-1] for record in level.records)
    assert run.wall_s == pytest.approx(wall_s, rel=1e-9)
    e2e_s = [record.token_times_s[-1] - record.sent_s for record in level.records]
    ttft_s = [record.token_times_s[0] - record.sent_s for record in level.records]
    np.testing.assert_allclose(np.sort(run.e2e_s), np.sort(e2e_s), rtol=1e-9)
    np.testing.assert_allclose(np.sort(run.ttft_s), np.sort(ttft_s), rtol=1e-9)


def test_a_cache_that_holds_no_sequence_is_refused():
    model = step_time_model_for(
        find_model("llama-2-7b"), find_instance("ml.g5.2xlarge"), 1, "float16", TGI_2023
    )
    with pytest.raises(CapacityError, match="512 tokens"):
        run_closed_loop(
            model, ClosedLoopLoad(1, 1, 256, 256), max_sequences=0, max_prefill_tokens=4096
        )
