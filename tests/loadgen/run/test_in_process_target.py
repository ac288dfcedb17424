"""The bundled engine as a target, over the simulated executor in virtual time."""

from __future__ import annotations

import asyncio

import pytest

from lmi_bench.analysis.results.latency import summarise_level
from lmi_bench.core.clock import run_virtual
from lmi_bench.core.errors import EngineError, InputError
from lmi_bench.core.load import Load
from lmi_bench.core.workload import LevelSpec, PlannedRequest
from lmi_bench.engine.async_engine import AsyncEngine
from lmi_bench.engine.scheduling.config import SchedulerConfig
from lmi_bench.engine.scheduling.scheduler import Scheduler
from lmi_bench.engine.simulated import SimulatedExecutor
from lmi_bench.loadgen.prompts.prompts import Lengths, SyntheticPrompts, no_text
from lmi_bench.loadgen.run.in_process_target import InProcessTarget
from lmi_bench.loadgen.run.sweep import run_sweep
from lmi_bench.loadgen.run.target import Resolved
from tests.loadgen.sending import measure


class PrefillOneDecodeTenth:
    """A second for a step with a prompt, a tenth of one for a decode step."""

    def step_time_s(self, shape):
        return 1.0 if shape.prefill_tokens else 0.1


class Broken(SimulatedExecutor):
    """Fails at its third step."""

    steps = 0

    async def execute(self, batch):
        self.steps += 1
        if self.steps == 3:
            raise EngineError("out of device memory")
        return await super().execute(batch)


def _run(use, *, executor=SimulatedExecutor, simulated=True, **config):
    async def main():
        scheduler = Scheduler(SchedulerConfig(**{"num_blocks": 64, **config}))
        async with AsyncEngine(scheduler, executor(PrefillOneDecodeTenth())) as engine:
            return await use(InProcessTarget(engine, simulated=simulated), engine)

    return run_virtual(main())


def test_token_times_are_those_of_the_engine():
    """A prompt of one second, then three tokens a tenth of a second apart."""

    async def use(target, engine):
        return await target.send(PlannedRequest(0, 0.0, 8, 4))

    exchange = _run(use)
    assert exchange.token_times_s == pytest.approx((1.0, 1.1, 1.2, 1.3))
    assert exchange.finish_reason == "length"
    assert (exchange.input_tokens, exchange.output_tokens) == (8, 4)
    assert exchange.ended_s == pytest.approx(1.3)
    times_s = (exchange.queue_s, exchange.prefill_s, exchange.decode_s)
    assert times_s == pytest.approx((0.0, 1.0, 0.3))


def test_a_level_says_what_the_engine_did_in_it_and_not_before():
    """A warm-up and two requests of 4 tokens: in a batch of 2 that has 2 ends at once, nothing is
    idle; blocks of 16 hold 8 prompt tokens and, after each step, one token more."""
    runs = []

    async def use(target, engine):
        spec = LevelSpec(index=0, load=Load(concurrency=2), num_requests=2, warmup_requests=3)
        await run_sweep(
            [spec],
            target,
            None,
            prompts=SyntheticPrompts([Lengths(8, 4)], no_text, seed=0),
            summarise=summarise_level,
            on_level=lambda run, line: runs.append(run),
        )

    _run(use, policy="dynamic", batch_size=2, max_batch_delay_s=0.0)
    done = runs[0].engine
    assert (done["steps"], done["generation_tokens"], done["prompt_tokens"]) == (4, 8, 16)
    assert (done["slot_steps_used"], done["slot_waste_frac"]) == (6, 0.0)
    assert done["cache_waste_frac"] == pytest.approx(1 - (8 + 9 + 10 + 11) / (4 * 16))


def test_a_time_out_stops_the_generation_and_frees_its_blocks():
    async def use(target, engine):
        measured = await measure(Resolved(target).send, PlannedRequest(0, 0.0, 8, 100), 0.0, timeout_s=1.55)
        await asyncio.sleep(1.0)
        return measured.record(), engine.stats()

    record, stats = _run(use)
    assert record.status == "timeout"
    assert len(record.token_times_s) == 6  # at 1.0, 1.1 .. 1.5
    assert (stats.running, stats.used_blocks) == (0, 0)


def test_a_request_that_can_never_fit_is_refused_with_numbers():
    async def use(target, engine):
        measured = await measure(Resolved(target).send, PlannedRequest(0, 0.0, 2000, 100), 0.0)
        return measured.record()

    record = _run(use)
    assert record.status == "refused"
    assert "2,100" in record.error or "2100" in record.error


def test_a_full_engine_is_overloaded():
    async def use(target, engine):
        first = asyncio.create_task(target.send(PlannedRequest(0, 0.0, 8, 4)))
        await asyncio.sleep(0.5)
        second = (await measure(Resolved(target).send, PlannedRequest(1, 0.0, 8, 4), 0.5)).record()
        await first
        return second.status

    assert _run(use, max_concurrent_requests=1) == "overloaded"


def test_an_engine_that_dies_ends_the_sweep_with_its_error():
    async def use(target, engine):
        return await run_sweep(
            [LevelSpec(0, Load(concurrency=2), num_requests=4)],
            target,
            None,
            prompts=SyntheticPrompts([Lengths(8, 8)], no_text, seed=0),
            summarise=summarise_level,
        )

    with pytest.raises(EngineError, match="out of device memory"):
        _run(use, executor=Broken)


def test_a_computing_engine_is_refused_in_virtual_time():
    async def use(target, engine):
        return await target.send(PlannedRequest(0, 0.0, 8, 4))

    with pytest.raises(InputError, match="virtual time"):
        _run(use, simulated=False)


def test_a_closed_loop_keeps_the_batch_full():
    """Two users on two slots, six requests of 8 tokens in lock-step: three rounds of 1.7 s."""
    runs = []

    async def use(target, engine):
        await run_sweep(
            [LevelSpec(0, Load(concurrency=2), num_requests=6)],
            target,
            None,
            prompts=SyntheticPrompts([Lengths(8, 8)], no_text, seed=0),
            summarise=summarise_level,
            on_level=lambda run, line: runs.append(run),
        )

    _run(use, max_rolling_batch_size=2)
    records = runs[0].records
    assert [record.sent_s for record in records] == pytest.approx([0.0, 0.0, 1.7, 1.7, 3.4, 3.4])
    assert records[-1].token_times_s[-1] == pytest.approx(5.1)
    assert runs[0].check.valid
