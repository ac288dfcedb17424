"""Weights from a checkpoint into layers: rounded, placed, fused and packed, one at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lmi_bench.decoder_spec import DecoderSpec, NormKind
from lmi_bench.engine.torch_backend.layers import LayerNorm, Linear, Norm, RmsNorm, make_linear
from lmi_bench.engine.torch_backend.precision import Precision
from lmi_bench.engine.torch_backend.weights import Checkpoint


class WeightLoader:
    """Layers of one model, named as in its checkpoint; the sizes are checked as they are read."""

    def __init__(
        self,
        spec: DecoderSpec,
        checkpoint: Checkpoint,
        precision: Precision,
        device: torch.device,
    ) -> None:
        self.spec = spec
        self.precision = precision
        self.device = device
        self._checkpoint = checkpoint

    def tensor(self, name: str, *shape: int) -> Tensor:
        """A tensor in the compute format, holding values of the stored one."""
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
    ) -> Linear:
        """Projections of the same input as one matrix.

        rows     outputs of each; columns: inputs of all
        arrange  what brings the rows of weight and bias into the order that the model wants
        """
        parts = list(zip(names, rows, strict=True))

        def joined(tensors: list[Tensor]) -> Tensor:
            whole = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
            return whole if arrange is None else arrange(whole)

        return make_linear(
            joined([self.tensor(f"{name}.weight", n, columns) for name, n in parts]),
            joined([self.tensor(f"{name}.bias", n) for name, n in parts]) if bias else None,
        )

    def norm(self, name: str) -> Norm:
        """The model's own kind of norm over its hidden features."""
        hidden, eps = self.spec.hidden_size, self.spec.norm_eps
        weight = self.tensor(f"{name}.weight", hidden)
        if self.spec.norm is NormKind.RMS:
            return RmsNorm(weight, eps)
        return LayerNorm(weight, self.tensor(f"{name}.bias", hidden), eps)

    def embedding(self, name: str) -> Tensor:
        """Token embeddings, shape (vocab, hidden), in the stored format."""
        size = (self.spec.vocab_size, self.spec.hidden_size)
        return self._checkpoint.tensor(name, *size).to(self.device, self.precision.stored)

    def head(self, embedding: Tensor) -> Linear:
        """The output layer: the embeddings once more where they are tied."""
        if self.spec.tied_embeddings:
            return make_linear(embedding.to(self.precision.compute))
        return self.linear(("lm_head",), (self.spec.vocab_size,), self.spec.hidden_size)
