"""A back end that runs decode steps in prepared shapes, and other steps in another back end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lmi_bench.engine.torch_backend.forward import Forward
from lmi_bench.engine.torch_backend.inputs import SequenceRows
from lmi_bench.engine.torch_backend.static.buffers import StepBuffers
from lmi_bench.engine.torch_backend.static.programs import Recorder, Replay, StepResult
from lmi_bench.engine.torch_backend.static.shapes import StaticShape, covering


@dataclass(frozen=True, slots=True)
class Prepared:
    """One shape's inputs, and the function that runs a step over them."""

    buffers: StepBuffers
    replay: Replay


class StaticForward:
    """Runs decode steps in the cheapest prepared shape that covers them; prompts, chunks, drafts to
    verify, and steps too large for any shape run in `otherwise`.

    static_steps, other_steps  numbers of both kinds
    """

    def __init__(self, otherwise: Forward, prepared: Mapping[StaticShape, Prepared]) -> None:
        self.shape = otherwise.shape
        self.block_size = otherwise.block_size
        self.num_blocks = otherwise.num_blocks
        self.static_steps = 0
        self.other_steps = 0
        self._otherwise = otherwise
        self._prepared = dict(prepared)
        self._shapes = tuple(sorted(prepared))

    @property
    def shapes(self) -> tuple[StaticShape, ...]:
        """The prepared shapes."""
        return self._shapes

    def only(self, shape: StaticShape) -> StaticForward:
        """A copy with only this shape."""
        return StaticForward(self._otherwise, {shape: self._prepared[shape]})

    @torch.inference_mode()
    def logits(self, sequences: Sequence[SequenceRows]) -> Tensor:
        """Logits of the sampled rows; valid until the next step."""
        result = self._run(sequences)
        if result is None:
            return self._otherwise.logits(sequences)
        return result.logits[: len(sequences)]

    @torch.inference_mode()
    def likeliest(self, sequences: Sequence[SequenceRows]) -> list[int]:
        """The token with the highest logit, for each sampled row."""
        result = self._run(sequences)
        if result is None:
            return self._otherwise.likeliest(sequences)
        token_ids: list[int] = result.likeliest[: len(sequences)].tolist()
        return token_ids

    def _run(self, sequences: Sequence[SequenceRows]) -> StepResult | None:
        """Run the step in a prepared shape; None if it fits into none."""
        shape = None
        if all(len(rows.token_ids) == 1 and rows.sampled == 1 for rows in sequences):
            longest = max(rows.context_tokens for rows in sequences)
            shape = covering(self._shapes, len(sequences), longest)
        if shape is None:
            self.other_steps += 1
            return None
        self.static_steps += 1
        prepared = self._prepared[shape]
        prepared.buffers.fill(sequences)
        return prepared.replay()


def prepare_shapes(
    shapes: Sequence[StaticShape],
    make_step: Callable[[StepBuffers], Replay],
    recorder: Recorder,
    *,
    block_size: int,
    spare_block: int,
    device: torch.device,
) -> dict[StaticShape, Prepared]:
    """Buffers and a recorded step for each shape, the largest first.

    make_step    makes the step over a shape's buffers
    spare_block  a block of the cache that belongs to no sequence
    """
    prepared = {}
    for shape in sorted(shapes, reverse=True):
        buffers = StepBuffers(shape, block_size=block_size, spare_block=spare_block, device=device)
        with torch.inference_mode():
            prepared[shape] = Prepared(buffers, recorder.record(make_step(buffers)))
    return prepared
