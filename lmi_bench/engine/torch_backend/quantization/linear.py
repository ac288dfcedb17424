"""Base classes of quantized linear layers: fused operations, size, and an unpacking fallback."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

_CHUNK_BYTES: Final = 1 << 24
"""Unpacked weights at one time: few enough to stay in the processor's cache."""


class QuantizedLinear(ABC):
    """x @ weight.T + bias with a quantized weight; implements `layers.Linear`.

    Subclasses define the product; inputs and outputs are in the model's compute format.
    """

    def __init__(self, shape: tuple[int, int], bias: Tensor | None) -> None:
        """shape  (outputs, inputs)"""
        self.shape = shape
        self._bias = bias

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of the stored weight, including scales."""

    @abstractmethod
    def product(self, x: Tensor) -> Tensor:
        """x @ weight.T, without the bias."""

    def __call__(self, x: Tensor) -> Tensor:
        if not len(x):  # a step with only prompt chunks; kernels reject zero rows
            return x.new_empty(0, self.shape[0])
        y = self.product(x)
        return y if self._bias is None else y + self._bias

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        return self(x) + residual

    def silu(self, x: Tensor) -> Tensor:
        return functional.silu(self(x), inplace=True)

    def multiply(self, x: Tensor, factor: Tensor) -> Tensor:
        return self(x).mul_(factor)


class UnpackedLinear(QuantizedLinear):
    """Dequantizes and multiplies the weight in chunks of rows; needs no special kernel."""

    @abstractmethod
    def rows(self, first: int, last: int, dtype: torch.dtype) -> Tensor:
        """Outputs first .. last of the weight as floats, shape (last - first, inputs)."""

    def product(self, x: Tensor) -> Tensor:
        y = x.new_empty(x.shape[0], self.shape[0])
        for first, last in self._chunks(x):
            y[:, first:last] = functional.linear(x, self.rows(first, last, x.dtype))
        return y

    def _chunks(self, x: Tensor) -> Iterator[tuple[int, int]]:
        rows, columns = self.shape
        step = rows if x.is_cuda else max(1, _CHUNK_BYTES // (columns * x.element_size()))
        for first in range(0, rows, step):
            yield first, min(rows, first + step)
