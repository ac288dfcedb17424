from __future__ import annotations

import asyncio

from lmi_bench.core.clock import run_virtual
from lmi_bench.engine.scheduling.batch import BatchEntry, StepBatch, StepKind
from lmi_bench.engine.scheduling.sampling import SamplingParams
from lmi_bench.engine.scheduling.step_shape import StepShape
from lmi_bench.engine.simulated import SimulatedExecutor


class HundredthPerToken:
    def step_time_s(self, shape: StepShape) -> float:
        return 0.01 * shape.num_tokens


def execute(*entries: BatchEntry):
    shape = StepShape(prefill_sequences=1, prefill_tokens=sum(len(e.token_ids) for e in entries))

    async def main():
        executor = SimulatedExecutor(HundredthPerToken(), block_size=8)
        outputs = await executor.execute(StepBatch(0, entries, shape))
        return outputs, asyncio.get_running_loop().time()

    return run_virtual(main())


def prefill(sampling=SamplingParams(), *, samples=True, num_tokens=4):  # noqa: B008
    return BatchEntry(5, StepKind.PREFILL, range(num_tokens), 0, (0,), samples, sampling)


def test_a_step_takes_its_predicted_time_on_the_loops_clock():
    _, elapsed_s = execute(prefill(num_tokens=50))
    assert elapsed_s == 0.5


def test_a_row_that_samples_gets_one_token_and_the_others_none():
    outputs, _ = execute(prefill(), prefill(samples=False))
    assert [len(output.token_ids) for output in outputs] == [1, 0]


def test_the_same_batch_gives_the_same_tokens():
    assert execute(prefill())[0] == execute(prefill())[0]


def test_no_token_ever_ends_the_sequence():
    every_likely_one = tuple(range(3000))
    sampling = SamplingParams(eos_token_ids=every_likely_one, stop_token_ids=(3000, 3001))
    outputs, _ = execute(prefill(sampling))
    assert outputs[0].token_ids[0] not in (*every_likely_one, 3000, 3001)


def test_log_probabilities_come_only_where_they_were_asked_for():
    asked, not_asked = execute(prefill(SamplingParams(logprobs=True)), prefill())[0]
    assert asked.logprobs == (0.0,)
    assert not_asked.logprobs is None


def test_it_states_its_block_size_and_that_steps_do_not_overlap():
    executor = SimulatedExecutor(HundredthPerToken(), block_size=8)
    assert (executor.block_size, executor.max_in_flight) == (8, 1)
