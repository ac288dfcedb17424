"""Runs decode steps in prepared shapes, and other steps in another back end.

A captured graph reads fixed addresses and a compiled step fixed sizes, so every step of a shape
overwrites the same three tensors. Unused rows and pages point to a spare block of the cache: they
are computed like the others, and their results are ignored. Recording has its own interface, so
that everything around it is the same with and without CUDA graphs.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from lmi_bench.core.errors import EngineError
from lmi_bench.engine.torch_backend.attention import SequenceRows
from lmi_bench.engine.torch_backend.runner import Forward
from lmi_bench.engine.torch_backend.static.artefact import StaticShape, covering

_ALIGNED: Final = 2
"""Values of 8 bytes: each tensor starts at a multiple of 16 bytes, as compiled code assumes."""


class StepBuffers:
    """One shape's inputs on the device, filled through a copy on the host.

    token_ids, positions  shape (sequences,)
    block_tables          shape (sequences, context_tokens / block_size)
    """

    def __init__(self, shape: StaticShape, *, block_size: int, spare_block: int, device: torch.device) -> None:
        """spare_block  the block that belongs to no sequence"""
        self.shape = shape
        self._spare_block = spare_block
        self._pages = shape.context_tokens // block_size
        count = shape.sequences
        each = -(-count // _ALIGNED) * _ALIGNED
        # contiguous, so that a step needs one copy to the device
        self._host = torch.zeros(2 * each + count * self._pages, dtype=torch.int64)
        if device.type == "cuda":
            self._host = self._host.pin_memory()
        self._on_device = self._host if device.type == "cpu" else self._host.to(device)
        token_ids, positions, tables = _parts(self._host, count, each)
        # arrays: creating a large batch's tables as new tensors takes as long as a step
        self._host_token_ids = token_ids.numpy()
        self._host_positions = positions.numpy()
        self._host_tables = tables.view(count, self._pages).numpy()
        self._host_tables[:] = spare_block
        self._filled = [0] * count
        self.token_ids, self.positions, tables = _parts(self._on_device, count, each)
        self.block_tables = tables.view(count, self._pages)
        self.fill(())

    def fill(self, sequences: Sequence[SequenceRows]) -> None:
        """Write a step with one row per sequence, which the shape must cover."""
        count = len(sequences)
        self._host_token_ids[:count] = [rows.token_ids[0] for rows in sequences]
        self._host_positions[:count] = [rows.first_position for rows in sequences]
        self._host_token_ids[count:] = 0
        self._host_positions[count:] = 0
        for number, rows in enumerate(sequences):
            self._fill_table(number, rows.block_table[: self._pages])
        for number in range(count, self.shape.sequences):
            self._fill_table(number, ())
        if self._on_device is not self._host:
            self._on_device.copy_(self._host, non_blocking=True)

    def _fill_table(self, number: int, blocks: Sequence[int]) -> None:
        """Write a row's blocks, and the spare block over the rest of the last step's blocks."""
        used, before = len(blocks), self._filled[number]
        row = self._host_tables[number]
        row[:used] = blocks
        if used < before:
            row[used:before] = self._spare_block
        self._filled[number] = used


def _parts(memory: Tensor, count: int, each: int) -> tuple[Tensor, Tensor, Tensor]:
    return memory[:count], memory[each : each + count], memory[2 * each :]


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


class CudaGraphRecorder:
    """Captures the step in a CUDA graph. All graphs share one memory pool, since only one runs at
    a time: record the largest shape first.

    held_bytes  device memory of the recordings so far
    """

    def __init__(self, device: torch.device) -> None:
        self.held_bytes = 0
        self._device = device
        self._pool: Any = None

    def record(self, step: Replay) -> Replay:
        """A function that repeats `step`, which must use only fixed memory. Raises EngineError for
        a step that cannot be captured."""
        try:
            graph, result = self._captured(step)
        except RuntimeError as exc:
            reason = str(exc).partition("\n")[0]
            raise EngineError(
                f"a decode step could not be recorded as a CUDA graph: {reason}; start with "
                "--graphs off, or leave more memory free with --memory-share"
            ) from exc

        def replay() -> StepResult:
            graph.replay()
            return result

        return replay

    def _captured(self, step: Replay) -> tuple[Any, StepResult]:
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
        self.held_bytes += max(0, free_before - free_after)
        return graph, result


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

    def __init__(self, otherwise: Forward, prepared: Mapping[StaticShape, Prepared], *, splits: bool = False) -> None:
        """splits  run the decode rows of a step with prompts apart from it, in a prepared shape"""
        self.shape = otherwise.shape
        self.block_size = otherwise.block_size
        self.num_blocks = otherwise.num_blocks
        self.static_steps = 0
        self.other_steps = 0
        self._otherwise = otherwise
        self._prepared = dict(prepared)
        self._splits = splits
        self.shapes = tuple(sorted(prepared))

    def only(self, shape: StaticShape) -> "StaticForward":
        return StaticForward(self._otherwise, {shape: self._prepared[shape]})

    @torch.inference_mode()
    def logits(self, sequences: Sequence[SequenceRows]) -> Tensor:
        """Logits of the sampled rows; valid until the next step."""
        result, ready, rest = self._run(sequences)
        if result is None:
            return self._otherwise.logits(sequences)
        own = result.logits[: len(ready)]
        if not rest:
            return own
        beside = self._otherwise.logits([sequences[i] for i in rest])
        order = torch.tensor(_order(sequences, ready, rest), device=own.device)
        return torch.cat((own, beside))[order]

    @torch.inference_mode()
    def likeliest(self, sequences: Sequence[SequenceRows]) -> list[int]:
        result, ready, rest = self._run(sequences)
        if result is None:
            return self._otherwise.likeliest(sequences)
        beside = self._otherwise.likeliest([sequences[i] for i in rest]) if rest else []
        tokens = result.likeliest[: len(ready)].tolist() + beside
        return [tokens[place] for place in _order(sequences, ready, rest)]

    def _run(self, sequences: Sequence[SequenceRows]) -> tuple[StepResult | None, list[int], list[int]]:
        """Start the decode rows in a prepared shape: their result, their places in the step, and
        those of the sequences left for the other back end; without a result, it takes all."""
        ready = [i for i, rows in enumerate(sequences) if len(rows.token_ids) == 1 and rows.sampled == 1]
        chosen = set(ready)
        rest = [i for i in range(len(sequences)) if i not in chosen]
        shape = None
        if ready and (self._splits or not rest):
            longest = max(sequences[i].context_tokens for i in ready)
            shape = covering(self.shapes, len(ready), longest)
        if shape is None or rest:
            self.other_steps += 1
        if shape is None:
            return None, [], []
        self.static_steps += not rest
        prepared = self._prepared[shape]
        prepared.buffers.fill([sequences[i] for i in ready])
        return prepared.replay(), ready, rest


def _order(sequences: Sequence[SequenceRows], ready: list[int], rest: list[int]) -> list[int]:
    """Where each sampled row of the step stands behind one another: replayed rows come first."""
    owners = [i for i in [*ready, *rest] for _ in range(sequences[i].sampled)]
    return sorted(range(len(owners)), key=owners.__getitem__)


def prepare_shapes(
    shapes: Sequence[StaticShape],
    make_buffers: Callable[[StaticShape], StepBuffers],
    make_step: Callable[[StepBuffers], Replay],
    record: Callable[[Replay], Replay],
) -> dict[StaticShape, Prepared]:
    """Buffers and a recorded step over them for each shape, the largest first."""
    prepared = {}
    for shape in sorted(shapes, reverse=True):
        buffers = make_buffers(shape)
        with torch.inference_mode():
            prepared[shape] = Prepared(buffers, record(make_step(buffers)))
    return prepared


_PROMPT_TOKENS: Final = 48
_SEED: Final = 11


@dataclass(frozen=True, slots=True)
class StepDifference:
    """Difference between one shape's logits and the eager step's, over random contexts.

    largest    maximum |difference|; spread: standard deviation of the eager logits
    same_frac  fraction of rows with the same likeliest token
    """

    shape: StaticShape
    largest: float
    spread: float
    same_frac: float


@torch.inference_mode()
def compare_steps(prepared: StaticForward, eager: Forward) -> list[StepDifference]:
    """Compare each shape once, with the most sequences that it and the cache allow. Overwrites the
    cache: the executor must have no sequences."""
    found = []
    for shape in prepared.shapes:
        prompts = _prompts(shape, eager)
        eager.logits(prompts)
        step = [SequenceRows([rows.token_ids[0]], len(rows.token_ids), rows.block_table, 1) for rows in prompts]
        ours, theirs = (forward.logits(step).float() for forward in (prepared.only(shape), eager))
        found.append(
            StepDifference(
                shape,
                float((ours - theirs).abs().max()),
                float(theirs.std()),
                float((ours.argmax(-1) == theirs.argmax(-1)).float().mean()),
            )
        )
    return found


def _prompts(shape: StaticShape, eager: Forward) -> Sequence[SequenceRows]:
    chance = torch.Generator().manual_seed(_SEED)
    size = eager.block_size
    length = min(_PROMPT_TOKENS, shape.context_tokens - 1)
    blocks = -(-(length + 1) // size)
    count = max(1, min(shape.sequences, eager.num_blocks // blocks))
    ids = torch.randint(eager.shape.vocab_size, (count, max(1, length)), generator=chance)
    return [
        SequenceRows(row.tolist(), 0, range(number * blocks, (number + 1) * blocks), 1)
        for number, row in enumerate(ids)
    ]
