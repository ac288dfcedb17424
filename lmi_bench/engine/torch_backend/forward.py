"""The interface of the step back ends: from the rows of a step to logits.

The runner, common to all, tracks sequences and samples tokens; a back end has the weights and the
cache in its own layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from lmi_bench.engine.torch_backend.attention import PagedAttention
from lmi_bench.engine.torch_backend.inputs import SequenceRows, pack
from lmi_bench.engine.torch_backend.kv_cache import KvCache
from lmi_bench.engine.torch_backend.models.decoder import Decoder
from lmi_bench.engine.torch_backend.precision import Precision
from lmi_bench.models.shape import ModelShape


class Forward(Protocol):
    """A model over its cache. Both calls write the keys and values of every row into the cache."""

    shape: ModelShape
    block_size: int
    num_blocks: int

    def logits(self, sequences: Sequence[SequenceRows]) -> Tensor:
        """Logits of the sampled rows in sequence order, shape (sampled rows, vocab)."""
        ...

    def likeliest(self, sequences: Sequence[SequenceRows]) -> list[int]:
        """The token with the highest logit, for each sampled row."""
        ...


class TorchForward:
    """The back end `torch`: runs on any device and is the reference for the others."""

    def __init__(
        self,
        model: Decoder,
        cache: KvCache,
        precision: Precision,
        *,
        num_blocks: int | None = None,
    ) -> None:
        """num_blocks  cache blocks available to sequences; None: all"""
        self.shape = model.shape
        self.cache = cache
        self.block_size = cache.shape.block_size
        self.num_blocks = num_blocks or cache.num_blocks
        self._model = model
        self._device = cache.keys[0].device
        self._attention = PagedAttention(
            cache, model.shape.num_heads, precision.compute, model.spec.layer_windows
        )

    @torch.inference_mode()
    def logits(self, sequences: Sequence[SequenceRows]) -> Tensor:
        formats = self._attention.mask_formats
        step = pack(sequences, self.cache.shape, formats, self._device)
        return self._model.logits(step, self._attention)

    @torch.inference_mode()
    def likeliest(self, sequences: Sequence[SequenceRows]) -> list[int]:
        token_ids: list[int] = self.logits(sequences).argmax(dim=-1).tolist()
        return token_ids
