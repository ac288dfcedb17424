"""The KV cache follows the free memory: fewer requests at once when it falls, and more again."""

import asyncio

import pytest

from lmi_bench.core.clock import run_virtual
from lmi_bench.engine.async_engine import AsyncEngine
from lmi_bench.engine.memory_budget import MemoryBudget
from lmi_bench.engine.scheduling.config import SchedulerConfig
from lmi_bench.engine.scheduling.sampling import SamplingParams
from lmi_bench.engine.scheduling.scheduler import Scheduler
from lmi_bench.engine.simulated import SimulatedExecutor

BLOCK_BYTES = 1000


class ConstantStep:
    def step_time_s(self, shape):
        return 0.05


def budget(free_bytes, told):
    return MemoryBudget(free_bytes, BLOCK_BYTES, keep_bytes=5 * BLOCK_BYTES, tell=told)


@pytest.mark.parametrize(("free", "most_used", "blocks"), [(5000, 7, 7), (0, 7, 7), (9999, 7, 11), (15_000, 0, 10)])
def test_what_was_used_may_be_used_and_the_memory_above_the_kept_one(free, most_used, blocks):
    assert budget(lambda: free, print).blocks(most_used) == blocks


def test_the_batch_shrinks_with_the_memory_and_grows_again():
    """Requests of 4 blocks over 40 of them; memory for no further block from second 2 on, and for
    all from second 6 on. Whoever holds blocks keeps them: none is written to anew."""
    told, running = [], {}

    async def main():
        loop = asyncio.get_running_loop()
        start_s = loop.time()

        def free_bytes():
            short = 2 <= loop.time() - start_s < 6
            return 0 if short else 10**9

        config = SchedulerConfig(num_blocks=40, block_size=16, max_model_len=64)
        scheduler = Scheduler(config)
        executor = SimulatedExecutor(ConstantStep())
        memory = budget(free_bytes, told.append)
        async with AsyncEngine(scheduler, executor, memory_budget=memory) as engine:
            many = SamplingParams(max_new_tokens=48, ignore_eos=True)
            generations = [engine.submit(range(16), many) for _ in range(3)]
            await asyncio.sleep(3.5 - 0.01)  # the first three, of 12 blocks, have ended
            generations += [engine.submit(range(16), many) for _ in range(12)]
            for second in range(4, 9):
                await asyncio.sleep(start_s + second - 0.02 - loop.time())
                running[second] = scheduler.blocks.num_used
            for generation in generations:
                await generation.wait()
            assert [g.finish_reason for g in generations] == ["length"] * 15

    run_virtual(main())
    assert running[4] <= 12
    assert running[5] <= 12
    assert running[7] > 12
    assert [line.split(":")[0] for line in told] == [
        "KV budget 40 -> 12 of 40 blocks",
        "KV budget 12 -> 40 of 40 blocks",
    ]


def test_a_budget_never_locks_the_longest_request_out():
    scheduler = Scheduler(SchedulerConfig(num_blocks=40, block_size=16, max_model_len=64))
    scheduler.set_block_budget(0)
    assert scheduler.blocks.budget == 4
    scheduler.set_block_budget(10**6)
    assert scheduler.blocks.budget == 40
