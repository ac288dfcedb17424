"""Loads a checkpoint's weights into layers one at a time: rounds, places, fuses and packs them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lmi_bench.engine.quantization import QuantizedBytes
from lmi_bench.engine.torch_backend.collectives import Collectives
from lmi_bench.engine.torch_backend.layers import LayerNorm, Linear, Norm, RmsNorm, make_linear
from lmi_bench.engine.torch_backend.parallel import (
    Embedding,
    Head,
    RankCheckpoint,
    RowParallelLinear,
    VocabularyEmbedding,
    VocabularyHead,
    plain_embedding,
)
from lmi_bench.engine.torch_backend.precision import Precision
from lmi_bench.engine.torch_backend.weights import Checkpoint
from lmi_bench.models.spec import DecoderSpec, NormKind

Joined = Callable[[list[Tensor]], Tensor]
"""Joins the rows of several projections in the model's order."""


class WeightLoader:
    """Layers of one model, named as in its checkpoint; sizes are checked when read.

    One of several ranks loads a RankCheckpoint: its spec has this rank's heads and MLP size, and
    partial sums of a layer are added over the ranks.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        checkpoint: Checkpoint,
        precision: Precision,
        device: torch.device,
        collectives: Collectives | None = None,
    ) -> None:
        """collectives  of the ranks that share the model; None: one device has all of it"""
        self.spec = spec
        self.precision = precision
        self.device = device
        self.held_bytes = 0
        """Bytes of the weights loaded so far, as stored in memory."""
        self._checkpoint = checkpoint
        self._collectives = collectives

    def tensor(self, name: str, *shape: int) -> Tensor:
        """A tensor in the compute format, rounded to the stored format first."""
        stored = self._checkpoint.tensor(name, *shape).to(self.device, self.precision.stored)
        return stored.to(self.precision.compute)

    def linear(
        self,
        names: tuple[str, ...],
        rows: tuple[int, ...],
        columns: int,
        *,
        bias: bool = False,
        arrange: Callable[[Tensor], Tensor] | None = None,
        summed: bool = True,
    ) -> Linear:
        """Projections of the same input as one matrix.

        rows     outputs of each; columns: inputs of all
        arrange  puts the rows of weight and bias into the model's order
        summed   whether partial sums are added here; otherwise the caller must (`join`)
        """
        parts = list(zip(names, rows, strict=True))

        def joined(tensors: list[Tensor]) -> Tensor:
            whole = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
            return whole if arrange is None else arrange(whole)

        offset = joined([self.tensor(f"{name}.bias", n) for name, n in parts]) if bias else None
        if self._collectives is None or self._stored_columns(names[0]) == columns:
            return self.matrix(parts, columns, offset, joined)
        if self._collectives.rank > 0:
            offset = None  # a sum over the ranks must contain the bias once
        linear = self.matrix(parts, columns, offset, joined)
        return RowParallelLinear(linear, self._collectives) if summed else linear

    def matrix(
        self, parts: list[tuple[str, int]], columns: int, bias: Tensor | None, joined: Joined
    ) -> Linear:
        """The linear layer of the tensors with these names and row counts."""
        weight = joined([self.tensor(f"{name}.weight", rows, columns) for name, rows in parts])
        self.held_bytes += weight.nbytes
        return make_linear(weight, bias)

    @property
    def quantized(self) -> QuantizedBytes | None:
        """Bytes of the matrices before and after quantization; None without quantization."""
        return None

    def join(self, partial: Tensor) -> Tensor:
        """Sum of the ranks' partial results, in place."""
        return partial if self._collectives is None else self._collectives.all_reduce(partial)

    def _stored_columns(self, name: str) -> int:
        """Inputs of the whole matrix; this rank may have a part."""
        return self._checkpoint.stored_shape(f"{name}.weight")[1]

    def norm(self, name: str) -> Norm:
        """The model's kind of norm over its hidden features."""
        hidden, eps = self.spec.hidden_size, self.spec.norm_eps
        weight = self.tensor(f"{name}.weight", hidden)
        if self.spec.norm is NormKind.RMS:
            return RmsNorm(weight, eps)
        return LayerNorm(weight, self.tensor(f"{name}.bias", hidden), eps)

    def vocabulary(self, embedding_name: str) -> tuple[Embedding, Head]:
        """Token embeddings in the stored format, and the output layer; tied ones share rows."""
        rows = self._vocabulary_rows(embedding_name)
        head_rows = rows
        if not self.spec.tied_embeddings:
            head_rows = self._vocabulary_rows("lm_head.weight")
        head_weight = head_rows.to(self.precision.compute)
        self.held_bytes += rows.nbytes + head_weight.nbytes
        head = make_linear(head_weight)
        if self._collectives is None:
            return plain_embedding(rows), head
        checkpoint, collectives = self._checkpoint, self._collectives
        assert isinstance(checkpoint, RankCheckpoint)  # the pair that build_model makes
        part = checkpoint.vocabulary
        return (
            VocabularyEmbedding(rows, part, collectives),
            VocabularyHead(head, part, collectives),
        )

    def _vocabulary_rows(self, name: str) -> Tensor:
        hidden = self.spec.hidden_size
        if isinstance(self._checkpoint, RankCheckpoint):
            rows = self._checkpoint.vocabulary_rows(name, hidden)
        else:
            rows = self._checkpoint.tensor(name, self.spec.vocab_size, hidden)
        return rows.to(self.device, self.precision.stored)
