"""An executor that computes nothing: it sleeps the predicted time of each step.

On the loop's clock, so a level takes its predicted seconds on a real clock and none in virtual
time. Tokens are a fixed rule of the position, never one that would end the sequence.
"""

from __future__ import annotations

import asyncio

from lmi_bench.clock import settle
from lmi_bench.engine.scheduling.batch import BatchEntry, StepBatch, StepOutput
from lmi_bench.engine.scheduling.step_shape import StepTime

_FIRST_TOKEN_ID = 1000  # above the byte and control tokens that vocabularies begin with
_NUM_TOKEN_IDS = 1000


class SimulatedExecutor:
    """Implements `Executor` over a step-time model; it accepts no drafted token."""

    def __init__(self, step_time: StepTime, *, block_size: int = 16) -> None:
        self._step_time = step_time
        self._block_size = block_size

    @property
    def block_size(self) -> int:
        """Tokens of one KV-cache block."""
        return self._block_size

    @property
    def max_in_flight(self) -> int:
        """One step at a time: its predicted time contains what the host does."""
        return 1

    async def execute(self, batch: StepBatch) -> list[StepOutput]:
        """Sleep the step's predicted time and give one token for each row that samples.

        In virtual time whatever else is due at the step's end, a time-out say, happens before it.
        """
        await asyncio.sleep(self._step_time.step_time_s(batch.shape))
        await settle()
        return [_output(entry) for entry in batch.entries]

    async def close(self) -> None:
        """Nothing is held."""


def _output(entry: BatchEntry) -> StepOutput:
    if not entry.samples:
        return StepOutput(entry.seq_id)
    sampling = entry.sampling
    token_id = _FIRST_TOKEN_ID + entry.first_position % _NUM_TOKEN_IDS
    while token_id in sampling.eos_token_ids or token_id in sampling.stop_token_ids:
        token_id += 1
    return StepOutput(entry.seq_id, (token_id,), (0.0,) if sampling.logprobs else None)
