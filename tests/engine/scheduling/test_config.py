from __future__ import annotations

import subprocess
import sys

import pytest

from lmi_bench.core.errors import CapacityError, InputError
from lmi_bench.engine.scheduling.config import BatchingPolicy, KvLayout, SchedulerConfig


def test_policies_are_known_by_their_names():
    config = SchedulerConfig(num_blocks=1, policy="dynamic", kv_layout="contiguous")
    assert config.policy is BatchingPolicy.DYNAMIC
    assert config.kv_layout is KvLayout.CONTIGUOUS


def test_an_unknown_policy_names_the_known_ones():
    with pytest.raises(InputError, match="policy must be one of none, dynamic, rolling, got 'roling'"):
        SchedulerConfig(num_blocks=1, policy="roling")


def test_no_block_at_all_is_a_matter_of_memory():
    with pytest.raises(CapacityError, match="0 blocks of 16 tokens"):
        SchedulerConfig(num_blocks=0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"block_size": 0},
        {"batch_size": 0},
        {"max_batch_delay_s": -0.1},
        {"max_rolling_batch_size": 0},
        {"max_rolling_batch_prefill_tokens": 0},
        {"max_concurrent_requests": 0},
        {"max_waiting_tokens": -1},
        {"max_waiting_tokens": 20, "chunked_prefill": True},
    ],
    ids=str,
)
def test_a_setting_out_of_range_names_itself(wrong):
    with pytest.raises(InputError, match=next(iter(wrong))):
        SchedulerConfig(num_blocks=1, **wrong)


def test_the_scheduler_loads_neither_torch_nor_asyncio_nor_a_clock():
    program = (
        "import sys; before = set(sys.modules)\n"
        "import lmi_bench.engine.scheduling.scheduler\n"
        "print(*sorted(set(sys.modules) - before))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    loaded = done.stdout.split()
    assert "lmi_bench.engine.scheduling.scheduler" in loaded
    assert not {"torch", "asyncio", "numpy", "random"} & set(loaded)
