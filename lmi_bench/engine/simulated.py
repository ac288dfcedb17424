"""The simulated executor: computes nothing and sleeps the predicted time of each step.

It sleeps on the loop's clock, so a level takes its predicted time in real time and none in virtual
time. Token ids are a function of the position and never end the sequence.
"""

import asyncio

from lmi_bench.core.clock import settle
from lmi_bench.engine.scheduling.batch import BatchEntry, StepBatch, StepOutput
from lmi_bench.engine.scheduling.drafting import tokens_gained
from lmi_bench.engine.scheduling.sampling import SamplingParams
from lmi_bench.engine.scheduling.step_shape import StepTime

_FIRST_TOKEN_ID = 1000  # above the byte and control tokens at the start of vocabularies
_NUM_TOKEN_IDS = 1000


class SimulatedExecutor:
    """Implements `Executor` over a step-time model.

    draft_acceptance  probability (0 to 1) that a draft token is accepted once those before it
                      are; each draw is a function of sequence and position
    """

    max_in_flight = 1  # a step's predicted time includes the host's work

    def __init__(self, step_time: StepTime, *, block_size: int = 16, draft_acceptance: float = 0.0) -> None:
        self._step_time = step_time
        self.block_size = block_size
        self._draft_acceptance = draft_acceptance

    async def execute(self, batch: StepBatch) -> list[StepOutput]:
        """Sleep the step's predicted time and return one token per row that samples. In virtual
        time other events due at the step's end, such as a timeout, happen before it."""
        await asyncio.sleep(self._step_time.step_time_s(batch.shape))
        await settle()
        return [self._output(entry) for entry in batch.entries]

    async def close(self) -> None:
        """Nothing to release."""

    def _output(self, entry: BatchEntry) -> StepOutput:
        if not entry.samples:
            return StepOutput(entry.seq_id)
        first = entry.first_position
        count = tokens_gained(self._draft_acceptance, entry.seq_id, first, entry.draft_length)
        token_ids = tuple(_token_id(at, entry.sampling) for at in range(first, first + count))
        return StepOutput(entry.seq_id, token_ids, (0.0,) * count if entry.sampling.logprobs else None)


def _token_id(position: int, sampling: SamplingParams) -> int:
    token_id = _FIRST_TOKEN_ID + position % _NUM_TOKEN_IDS
    while token_id in sampling.eos_token_ids or token_id in sampling.stop_token_ids:
        token_id += 1
    return token_id
