"""Compares the results of prepared and eager steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from lmi_bench.engine.torch_backend.forward import Forward
from lmi_bench.engine.torch_backend.inputs import SequenceRows
from lmi_bench.engine.torch_backend.static.forward import StaticForward
from lmi_bench.engine.torch_backend.static.shapes import StaticShape

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
    """Compare each shape once, with the most sequences that it and the cache allow.

    Overwrites the cache: the executor must have no sequences.
    """
    found = []
    for shape in prepared.shapes:
        prompts = _prompts(shape, eager)
        eager.logits(prompts)
        step = [
            SequenceRows([rows.token_ids[0]], len(rows.token_ids), rows.block_table, 1)
            for rows in prompts
        ]
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
