"""Runs a decode step of one shape: directly, or recorded once and replayed.

Recording has its own interface so that everything around it (shapes, padding, buffers, the order of
capture and replay) is the same with and without CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from lmi_bench.core.errors import EngineError

_WARM_UPS: Final = 3
"""Runs before a capture, in which kernels are chosen, workspaces allocated, Triton compiles."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """Results of every row of a shape, including padding.

    logits    shape (sequences, vocab)
    likeliest shape (sequences,), the token with each row's highest logit
    """

    logits: Tensor
    likeliest: Tensor


Replay = Callable[[], StepResult]
"""Runs a step over its buffers; the next call may overwrite the result."""


class Recorder(Protocol):
    """Records steps for replay."""

    def record(self, step: Callable[[], StepResult]) -> Replay:
        """A function that repeats `step`, which must use only fixed memory."""
        ...

    @property
    def held_bytes(self) -> int:
        """Device memory of the recordings so far."""
        ...


class PlainRecorder:
    """Runs the step each time without recording: for `enforce_eager`, and on a CPU."""

    held_bytes = 0

    def record(self, step: Callable[[], StepResult]) -> Replay:
        return step


class CudaGraphRecorder:
    """Captures the step in a CUDA graph. All graphs share one memory pool, since only one runs at
    a time: record the largest shape first."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None
        self._held_bytes = 0

    @property
    def held_bytes(self) -> int:
        return self._held_bytes

    def record(self, step: Callable[[], StepResult]) -> Replay:
        """As `Recorder`. Raises EngineError for a step that cannot be captured."""
        try:
            return self._capture(step)
        except RuntimeError as exc:
            reason = str(exc).partition("\n")[0]
            raise EngineError(
                f"a decode step could not be recorded as a CUDA graph: {reason}; start with "
                "--graphs off, or leave more memory free with --memory-share"
            ) from exc

    def _capture(self, step: Callable[[], StepResult]) -> Replay:
        make_stream: Any = torch.cuda.Stream
        beside = make_stream(self._device)
        beside.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(beside):
            for _ in range(_WARM_UPS):
                step()
        torch.cuda.current_stream(self._device).wait_stream(beside)
        torch.cuda.synchronize(self._device)
        free_before, _ = torch.cuda.mem_get_info(self._device)
        graph = torch.cuda.CUDAGraph()
        # own stream: torch's default capture stream belongs to the first device that captured
        with torch.cuda.graph(graph, pool=self._pool, stream=beside):
            result = step()
        self._pool = graph.pool()
        free_after, _ = torch.cuda.mem_get_info(self._device)
        self._held_bytes += max(0, free_before - free_after)

        def replay() -> StepResult:
            graph.replay()
            return result

        return replay
