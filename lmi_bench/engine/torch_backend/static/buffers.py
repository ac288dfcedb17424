"""Inputs of a decode step at fixed addresses.

A captured graph reads fixed addresses and a compiled step fixed sizes, so every step of a shape
overwrites the same three tensors. Unused rows and pages point to a spare block of the cache: they
are computed like the others, and their results are ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from lmi_bench.engine.torch_backend.inputs import SequenceRows
from lmi_bench.engine.torch_backend.static.shapes import StaticShape

_ALIGNED: Final = 2
"""Values of 8 bytes: each tensor starts at a multiple of 16 bytes, as compiled code assumes."""


class StepBuffers:
    """One shape's inputs on the device, filled through a copy on the host.

    token_ids, positions  shape (sequences,)
    block_tables          shape (sequences, context_tokens / block_size)
    """

    def __init__(
        self, shape: StaticShape, *, block_size: int, spare_block: int, device: torch.device
    ) -> None:
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
