"""Several engines behind one router, over the simulated executor in virtual time."""

from __future__ import annotations

import asyncio

import pytest

from lmi_bench.core.clock import run_virtual
from lmi_bench.core.errors import EngineError, InputError, OverloadedError
from lmi_bench.core.scenario import EngineSection
from lmi_bench.engine.async_engine import AsyncEngine
from lmi_bench.engine.replicas import ReplicaGroup
from lmi_bench.engine.router import LeastOutstanding, RoundRobin
from lmi_bench.engine.scheduling.config import SchedulerConfig
from lmi_bench.engine.scheduling.sampling import SamplingParams
from lmi_bench.engine.scheduling.scheduler import Scheduler
from lmi_bench.engine.simulated import SimulatedExecutor
from lmi_bench.targets.simulated import open_simulated_engine


class Tenth:
    """Every step takes a tenth of a second."""

    def step_time_s(self, shape):
        return 0.1


class DiesAtTheThirdStep(SimulatedExecutor):
    steps = 0

    async def execute(self, batch):
        self.steps += 1
        if self.steps == 3:
            raise EngineError("rank 1 of 2 was killed by signal 9")
        return await super().execute(batch)


def engine(executor=SimulatedExecutor, **config):
    scheduler = Scheduler(SchedulerConfig(**{"num_blocks": 64, **config}))
    return AsyncEngine(scheduler, executor(Tenth()))


def ask(tokens):
    return SamplingParams(max_new_tokens=tokens)


def test_two_replicas_of_one_slot_answer_twice_as_fast():
    """Four requests of five tenths: two rounds on two replicas, four on one."""

    async def time_of(copies):
        group = ReplicaGroup([engine(max_rolling_batch_size=1) for _ in range(copies)], RoundRobin())
        async with group:
            running = [group.submit(range(4), ask(5)) for _ in range(4)]
            for generation in running:
                await generation.wait()
            assert group.stats().done.generation_tokens == 20
            assert group.stats().total_blocks == 64 * copies
            return asyncio.get_running_loop().time()

    assert run_virtual(time_of(1)) == pytest.approx(2.0)
    assert run_virtual(time_of(2)) == pytest.approx(1.0)


def test_the_router_sees_what_each_replica_has_not_answered():
    """A long request keeps replica 0 busy, so the short ones that follow go to replica 1."""

    async def main():
        async with ReplicaGroup([engine(), engine()], LeastOutstanding()) as group:
            long = group.submit(range(4), ask(50))
            places = [long.replica]
            for _ in range(3):
                short = group.submit(range(4), ask(2))
                places.append(short.replica)
                await short.wait()
            long.stop("cancelled")
            return places

    assert run_virtual(main()) == [0, 1, 1, 1]


def test_a_full_replica_leaves_a_request_to_one_that_has_room():
    """In turn the third request would meet the long one."""

    async def main():
        engines = [engine(max_concurrent_requests=1) for _ in range(2)]
        async with ReplicaGroup(engines, RoundRobin()) as group:
            long = group.submit(range(4), ask(50))
            for _ in range(2):
                short = group.submit(range(4), ask(2))
                assert short.replica == 1
                await short.wait()
            group.submit(range(4), ask(2))
            with pytest.raises(OverloadedError):
                group.submit(range(4), ask(2))
            long.stop("cancelled")

    run_virtual(main())


def test_a_replica_that_dies_fails_the_group_with_its_error():
    async def main():
        engines = [engine(DiesAtTheThirdStep), engine()]
        async with ReplicaGroup(engines, RoundRobin()) as group:
            first, second = (group.submit(range(4), ask(9)) for _ in range(2))
            error = await group.failed()
            assert "rank 1 of 2" in str(error)
            assert group.error is error
            with pytest.raises(EngineError, match="rank 1 of 2"):
                await first.wait()
            await second.wait()  # what the others have is answered
            with pytest.raises(EngineError, match="rank 1 of 2"):
                group.submit(range(4), ask(1))

    run_virtual(main())


def test_a_group_of_none_is_refused():
    with pytest.raises(InputError, match="at least 1"):
        ReplicaGroup([], RoundRobin())


def test_requests_of_two_replicas_have_different_numbers():
    """The draws of a request without a seed hang on its number: else the first of one replica
    would say what the first of the other says."""
    parts = open_simulated_engine("llama-2-7b", "ml.g5.12xlarge", EngineSection(replicas=3), max_total_tokens=64)

    async def main():
        async with parts.engine() as group:
            running = [group.submit(range(4), ask(2)) for _ in range(7)]
            for generation in running:
                await generation.wait()
            return [generation.seq_id for generation in running]

    assert len(set(run_virtual(main()))) == 7
