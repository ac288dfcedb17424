"""What every quantized linear layer has: the followers of the product, its bytes, its fallback."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

_CHUNK_BYTES: Final = 1 << 24
"""Of unpacked weights that exist at once: what follows reads them from the processor's cache."""


class QuantizedLinear(ABC):
    """x @ weight.T + bias with the weight in few bits; implements `layers.Linear`.

    Subclasses say how the product is taken; rows come and go in the model's compute format.
    """

    def __init__(self, shape: tuple[int, int], bias: Tensor | None) -> None:
        """shape  (outputs, inputs)"""
        self.shape = shape
        self._bias = bias

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Of the weight as it is held, scales included."""

    @abstractmethod
    def product(self, x: Tensor) -> Tensor:
        """x @ weight.T, without the bias."""

    def __call__(self, x: Tensor) -> Tensor:
        if not len(x):  # a step of prompt chunks alone samples no row; kernels refuse none
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
    """Makes floats of some of the rows, multiplies, goes on: no kernel of its own is needed."""

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
