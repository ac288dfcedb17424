"""The back end `native`: a whole step in one call of the compiled library."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from lmi_bench.core.errors import EngineError
from lmi_bench.engine.native_backend import binding
from lmi_bench.engine.native_backend.weights import NativeWeights
from lmi_bench.engine.torch_backend.inputs import SequenceRows
from lmi_bench.models.shape import ModelShape


class NativeForward:
    """A model and its cache in the library's own layout; `close` ends its threads."""

    def __init__(
        self,
        library: binding.StepLibrary,
        weights: NativeWeights,
        shape: ModelShape,
        *,
        block_size: int,
        num_blocks: int,
        threads: int,
        variant: str = "",
    ) -> None:
        """variant  kernels, one of `library.variants()`; empty: the best"""
        self.shape = shape
        self.block_size = block_size
        self.num_blocks = num_blocks
        self._library = library
        self._weights = weights
        weights.model.threads = threads
        self._handle = library.open(weights.model, variant)
        if not self._handle:
            raise EngineError(
                f"the native step (kernels {variant or 'the best'}) did not get memory or its "
                f"{threads:,} threads from the system: lower --threads, raise the limit of "
                "processes (ulimit -u, a container's pids), or use --backend torch"
            )

    def logits(self, sequences: Sequence[SequenceRows]) -> Tensor:
        """Logits of the sampled rows, shape (sampled rows, vocab), float32."""
        logits = torch.empty(sum(rows.sampled for rows in sequences), self.shape.vocab_size)
        self._step(sequences, logits=logits.data_ptr())
        return logits

    def likeliest(self, sequences: Sequence[SequenceRows]) -> list[int]:
        """The token with the highest logit, for each sampled row."""
        token_ids = array("i", bytes(4 * sum(rows.sampled for rows in sequences)))
        self._step(sequences, likeliest=token_ids.buffer_info()[0])
        return token_ids.tolist()

    def close(self) -> None:
        """End the threads; no step may follow."""
        handle, self._handle = self._handle, 0
        if handle:
            self._library.close(handle)

    def _step(
        self,
        sequences: Sequence[SequenceRows],
        *,
        logits: int | None = None,
        likeliest: int | None = None,
    ) -> None:
        token_ids: list[int] = []
        tables: list[int] = []
        sampled: list[int] = []
        spans = array("q")
        for rows in sequences:
            first_row = len(token_ids)
            token_ids.extend(rows.token_ids)
            end = len(token_ids)
            spans.extend((first_row, end - first_row, rows.first_position, len(tables)))
            tables.extend(rows.block_table)
            sampled.extend(range(end - rows.sampled, end))
        ids, blocks, wanted = array("i", token_ids), array("i", tables), array("i", sampled)
        step = binding.Step(
            rows=len(ids),
            sequences=len(sequences),
            sampled=len(wanted),
            token_ids=ids.buffer_info()[0],
            sequence=spans.buffer_info()[0],
            tables=blocks.buffer_info()[0],
            sampled_rows=wanted.buffer_info()[0],
            logits=logits,
            likeliest=likeliest,
        )
        if not self._library.step(self._handle, step):
            raise EngineError(f"a step of {len(ids):,} rows does not fit in memory")
