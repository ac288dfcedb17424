"""The running engine in virtual time: a prefill takes 1 s here, a decode step 0.1 s."""

from __future__ import annotations

import asyncio

import pytest

from lmi_bench.core.clock import run_virtual
from lmi_bench.core.errors import CapacityError, EngineError, InputError, OverloadedError
from lmi_bench.engine.async_engine import AsyncEngine
from lmi_bench.engine.scheduling.batch import StepOutput
from lmi_bench.engine.scheduling.config import SchedulerConfig
from lmi_bench.engine.scheduling.sampling import SamplingParams
from lmi_bench.engine.scheduling.scheduler import Scheduler
from lmi_bench.engine.simulated import SimulatedExecutor


class StepTimes:
    def step_time_s(self, shape):
        return 1.0 if shape.prefill_sequences else 0.1


class Recording(SimulatedExecutor):
    """The simulated executor; remembers its batches and whether it was closed."""

    def __init__(self) -> None:
        super().__init__(StepTimes())
        self.batches = []
        self.closed = False

    async def execute(self, batch):
        self.batches.append(batch)
        return await super().execute(batch)

    async def close(self):
        self.closed = True


class FailingAt:
    """Runs steps at once until step `at` raises."""

    block_size = 16
    max_in_flight = 1

    def __init__(self, at: int, error: Exception) -> None:
        self.at, self.error, self.closed = at, error, False

    async def execute(self, batch):
        await asyncio.sleep(0.1)
        if batch.step_id == self.at:
            raise self.error
        return [StepOutput(e.seq_id, (7,) if e.samples else ()) for e in batch.entries]

    async def close(self):
        self.closed = True


def engine(executor=None, *, on_step=None, **settings):
    settings.setdefault("num_blocks", 100)
    scheduler = Scheduler(SchedulerConfig(**settings))
    return AsyncEngine(scheduler, executor or Recording(), on_step=on_step), scheduler


def tokens(count: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=count)


async def sleep_until(at_s: float) -> None:
    await asyncio.sleep(at_s - asyncio.get_running_loop().time())


def test_a_request_gets_its_tokens_at_the_ends_of_its_steps():
    async def main():
        running, _ = engine()
        async with running:
            generation = running.submit(range(10), tokens(4))
            await generation.wait()
        return generation

    generation = run_virtual(main())
    assert [event.time_s for event in generation.events] == pytest.approx([1.0, 1.1, 1.2, 1.3])
    assert [len(event.token_ids) for event in generation.events] == [1, 1, 1, 1]
    assert generation.finish_reason == "length"
    assert (generation.submitted_s, generation.first_scheduled_s) == (0.0, 0.0)
    assert generation.first_token_s == 1.0
    assert generation.finished_s == pytest.approx(1.3)


def test_time_in_the_queue_is_told_apart_from_prefill():
    async def main():
        running, _ = engine(max_rolling_batch_size=1)
        async with running:
            first = running.submit(range(10), tokens(2))
            second = running.submit(range(10), tokens(1))
            await first.wait()
            await second.wait()
        return second

    second = run_virtual(main())
    assert second.first_scheduled_s - second.submitted_s == pytest.approx(1.1)
    assert second.first_token_s - second.first_scheduled_s == pytest.approx(1.0)


def test_a_split_prompt_was_scheduled_when_its_first_part_was():
    async def main():
        running, _ = engine(max_rolling_batch_prefill_tokens=10)
        async with running:
            await asyncio.sleep(2.0)
            generation = running.submit(range(25), tokens(1))
            await generation.wait()
        return generation

    generation = run_virtual(main())
    assert (generation.first_scheduled_s, generation.first_token_s) == (2.0, 5.0)


def test_an_idle_engine_lets_everyone_of_the_instant_come_before_it_starts():
    """The second request comes some turns of the loop after the first, but at the same time."""
    executor = Recording()

    async def main():
        running, _ = engine(executor)
        async with running:

            async def later(turns):
                await asyncio.sleep(1.0)
                for _ in range(turns):
                    await asyncio.sleep(0)
                await running.submit(range(10), tokens(1)).wait()

            await asyncio.gather(later(0), later(20))

    run_virtual(main())
    assert [len(batch.entries) for batch in executor.batches] == [2]


def test_arrivals_up_to_the_end_of_a_step_join_at_that_boundary_in_their_order():
    """One arrives inside the first step, two exactly at its end: one prefill takes all three."""
    executor = Recording()

    async def main():
        running, _ = engine(executor)
        async with running:

            async def at(time_s, *lengths):
                await sleep_until(time_s)
                for generation in [running.submit(range(n), tokens(1)) for n in lengths]:
                    await generation.wait()

            async with asyncio.TaskGroup() as group:
                group.create_task(at(1.0, 30, 40))
                group.create_task(at(0.4, 20))
                group.create_task(at(0.0, 10))

    run_virtual(main())
    lengths = [[len(entry.token_ids) for entry in batch.entries] for batch in executor.batches]
    assert lengths == [[10], [20, 30, 40]]


def test_an_idle_engine_starts_at_once_when_a_request_comes():
    async def main():
        running, _ = engine()
        async with running:
            await asyncio.sleep(5.0)
            generation = running.submit(range(10), tokens(1))
            await generation.wait()
            return generation.finished_s

    assert run_virtual(main()) == 6.0


@pytest.mark.parametrize("submitted_s", [0.0, 0.3, 0.001 / 3, 1e6 / 3])
def test_a_dynamic_batch_leaves_after_its_delay_however_late_the_clock(submitted_s):
    async def main():
        running, _ = engine(policy="dynamic", batch_size=4, max_batch_delay_s=0.1)
        async with running:
            await asyncio.sleep(submitted_s)
            generation = running.submit(range(10), tokens(1))
            await generation.wait()
            return generation.first_scheduled_s - generation.submitted_s

    assert run_virtual(main()) == pytest.approx(0.1, abs=1e-9)


def test_a_dynamic_batch_that_fills_does_not_wait_for_its_delay():
    async def main():
        running, _ = engine(policy="dynamic", batch_size=2, max_batch_delay_s=50.0)
        async with running:
            first = running.submit(range(10), tokens(1))
            await asyncio.sleep(3.0)
            running.submit(range(10), tokens(1))
            await first.wait()
            return first.first_scheduled_s

    assert run_virtual(main()) == 3.0


def test_one_who_watches_sees_every_event_also_those_before():
    async def main():
        running, _ = engine()
        async with running:
            generation = running.submit(range(10), tokens(5))
            await sleep_until(1.15)
            now_s = asyncio.get_running_loop().time
            seen = [(event, now_s()) async for event in generation]
        return generation, seen

    generation, seen = run_virtual(main())
    assert [event for event, _ in seen] == generation.events
    assert [time_s for _, time_s in seen] == pytest.approx([1.15, 1.15, 1.2, 1.3, 1.4])


def test_a_stopped_request_frees_its_blocks_and_the_others_go_on():
    async def main():
        running, scheduler = engine()
        async with running:
            stopped = running.submit(range(100), tokens(50))
            other = running.submit(range(100), tokens(5))
            await sleep_until(1.15)  # inside a step
            stopped.stop("stop_sequence")
            await stopped.wait()
            stopped.stop("cancelled")  # it has ended: nothing happens
            await sleep_until(1.25)
            used = scheduler.blocks.num_used
            await other.wait()
            scheduler.audit()
            return stopped, other, used, scheduler.blocks.num_used

    stopped, other, used, used_at_end = run_virtual(main())
    assert (stopped.finish_reason, len(stopped.events)) == ("stop_sequence", 2)
    assert stopped.finished_s == 1.15
    assert len(other.events) == 5
    assert (used, used_at_end) == (7, 0)


def test_a_waiting_task_that_is_cancelled_does_not_end_the_request_for_the_others():
    async def main():
        running, _ = engine()
        async with running:
            generation = running.submit(range(10), tokens(5))
            impatient = asyncio.create_task(generation.wait())
            await asyncio.sleep(0.5)
            impatient.cancel()
            await generation.wait()
            return impatient.cancelled(), len(generation.events)

    assert run_virtual(main()) == (True, 5)


@pytest.mark.parametrize(
    ("error", "message"), [(EngineError("the device is gone"), "the device is gone"), (RuntimeError("boom"), "boom")]
)
def test_a_failed_step_ends_every_request_with_the_error(error, message):
    async def main():
        executor = FailingAt(2, error)
        running, _ = engine(executor, max_rolling_batch_size=2)
        async with running:
            generations = [running.submit(range(10), tokens(9)) for _ in range(4)]
            for generation in generations:
                with pytest.raises(EngineError, match=message):
                    await generation.wait()
            with pytest.raises(EngineError, match=message):
                async for _ in generations[0]:
                    pass
            with pytest.raises(EngineError, match=message):
                running.submit(range(10), tokens(1))
        return executor.closed, [len(generation.events) for generation in generations]

    assert run_virtual(main()) == (True, [2, 2, 0, 0])


def test_outputs_that_are_not_the_batchs_end_the_engine():
    class Confused(FailingAt):
        async def execute(self, batch):
            return []

    async def main():
        running, _ = engine(Confused(0, ValueError()))
        async with running:
            with pytest.raises(EngineError, match="0 outputs"):
                await running.submit(range(10), tokens(9)).wait()

    run_virtual(main())


def test_a_failure_that_nobody_was_told_of_is_raised_on_leaving():
    def broken(batch, start_s, end_s):
        raise RuntimeError("broken watcher")

    async def main():
        running, _ = engine(on_step=broken)
        async with running:
            await running.submit(range(10), tokens(1)).wait()
            await asyncio.sleep(1)

    with pytest.raises(EngineError, match="broken watcher"):
        run_virtual(main())


def test_leaving_ends_what_still_runs_and_closes_the_executor():
    async def main():
        executor = Recording()
        running, _ = engine(executor)
        async with running:
            generation = running.submit(range(10), tokens(50))
            await asyncio.sleep(2)
        with pytest.raises(EngineError, match="shut down"):
            await generation.wait()
        with pytest.raises(EngineError, match="shut down"):
            running.submit(range(10), tokens(1))
        return executor.closed, len(asyncio.all_tasks())

    assert run_virtual(main()) == (True, 1)


def test_an_error_of_the_caller_passes_through():
    async def main():
        running, _ = engine()
        async with running:
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        run_virtual(main())


def test_what_cannot_be_taken_is_refused_at_once_and_costs_nobody():
    async def main():
        running, _ = engine(num_blocks=2, max_concurrent_requests=1)
        async with running:
            with pytest.raises(CapacityError, match="32 tokens"):
                running.submit(range(30), tokens(10))
            first = running.submit(range(10), tokens(2))
            with pytest.raises(OverloadedError, match="max_concurrent_requests"):
                running.submit(range(10), tokens(2))
            await first.wait()
            await running.submit(range(10), tokens(2)).wait()
            return running.stats()

    stats = run_virtual(main())
    assert (stats.running, stats.waiting, stats.used_blocks, stats.total_blocks) == (0, 0, 0, 2)
    done = stats.done
    assert (done.steps, done.prompt_tokens, done.generation_tokens) == (4, 20, 4)


def test_an_engine_that_was_not_entered_says_so():
    running, _ = engine()
    with pytest.raises(EngineError, match="async with"):
        running.submit(range(10), tokens(1))


def test_blocks_of_two_sizes_do_not_go_together():
    with pytest.raises(InputError, match="16 tokens, the scheduler 4"):
        engine(block_size=4)


def test_a_watcher_of_steps_sees_each_with_its_start_and_end():
    seen = []

    async def main():
        running, _ = engine(on_step=lambda batch, start_s, end_s: seen.append((start_s, end_s)))
        async with running:
            await running.submit(range(10), tokens(3)).wait()

    run_virtual(main())
    assert seen[:2] == [(0.0, 1.0), (1.0, 1.1)]


def test_on_a_real_clock_it_runs_the_same():
    """Three steps of 10 ms take at least 30 ms of real time."""

    class Short:
        def step_time_s(self, shape):
            return 0.01

    async def main():
        running, _ = engine(SimulatedExecutor(Short()))
        async with running:
            generation = running.submit(range(10), tokens(3))
            await generation.wait()
        return generation

    generation = asyncio.run(main())
    assert len(generation.events) == 3
    assert generation.finished_s - generation.submitted_s >= 0.029


class TestOverlap:
    """An executor that takes two steps at a time gets the second before the first has ended."""

    class Pipelined(FailingAt):
        max_in_flight = 2

        def __init__(self, at=-1, error=None) -> None:
            super().__init__(at, error)
            self.active = self.most_active = 0
            self.order = asyncio.Lock()

        async def execute(self, batch):
            self.active += 1
            self.most_active = max(self.most_active, self.active)
            try:
                async with self.order:  # steps run one after the other
                    return await super().execute(batch)
            finally:
                self.active -= 1

    def test_two_steps_are_in_flight_and_the_tokens_are_all_there(self):
        async def main():
            executor = self.Pipelined()
            running, scheduler = engine(executor)
            async with running:
                generations = [running.submit(range(10), tokens(n)) for n in (3, 6)]
                for generation in generations:
                    await generation.wait()
                scheduler.audit()
            return executor.most_active, [len(g.events) for g in generations]

        assert run_virtual(main()) == (2, [3, 6])

    def test_a_failure_ends_everything_and_leaves_no_task_behind(self):
        async def main():
            executor = self.Pipelined(3, RuntimeError("boom"))
            running, _ = engine(executor)
            async with running:
                generation = running.submit(range(10), tokens(20))
                with pytest.raises(EngineError, match="boom"):
                    await generation.wait()
            return executor.active, len(generation.events), len(asyncio.all_tasks())

        assert run_virtual(main()) == (0, 3, 1)

    def test_leaving_in_the_middle_ends_both_steps(self):
        async def main():
            executor = self.Pipelined()
            running, _ = engine(executor)
            async with running:
                running.submit(range(10), tokens(50))
                await asyncio.sleep(1.05)
            return executor.active, executor.closed, len(asyncio.all_tasks())

        assert run_virtual(main()) == (0, True, 1)


def test_tokens_are_handed_out_while_the_next_step_runs_and_the_last_ones_at_once():
    """What streams do with a token must not hold up the step behind it. A request that has ended
    comes first: what follows it may join that step."""

    class Watching(SimulatedExecutor):
        seen = ()

        async def execute(self, batch):
            self.seen += ((len(long.events), short.finish_reason),)
            return await super().execute(batch)

    executor = Watching(StepTimes())

    async def main():
        nonlocal long, short
        running = engine(executor)[0]
        async with running:
            long = running.submit([1, 2], SamplingParams(max_new_tokens=4))
            short = running.submit([1, 2], SamplingParams(max_new_tokens=2))
            await long.wait()
            return [event.time_s for event in long.events]

    long = short = None
    times = run_virtual(main())
    assert times == pytest.approx([1.0, 1.1, 1.2, 1.3])
    assert executor.seen == ((0, None), (0, None), (1, "length"), (2, "length"))
