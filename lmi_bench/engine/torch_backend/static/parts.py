"""Parts of a model that a compiled step calls by number, as opaque operators.

The compiler must not decompose the forms of matrix products: packed for oneDNN, quantized, summed
over ranks, or spread over experts. To it, each is one operator from rows to rows of a known width.
The number selects the part, so a compiled step has no weights and serves every model of the same
shape. An operator has no closure: the thread that runs the step sets the parts (`parts_in_use`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor

Part = Callable[[Tensor, Tensor], Tensor]
"""From rows and a residual with as many rows to new rows; a part may ignore the residual."""

_IN_USE: Final = threading.local()

_make_library: Any = torch.library.Library
_LIBRARY: Final = _make_library("lmi_bench", "DEF")
_LIBRARY.define("part(Tensor rows, Tensor residual, int number, int features) -> Tensor")


def _run(rows: Tensor, residual: Tensor, number: int, _features: int) -> Tensor:
    part: Part = _IN_USE.parts[number]
    return part(rows, residual)


def _shape_only(rows: Tensor, residual: Tensor, _number: int, features: int) -> Tensor:
    # the residual has the model's number format; rows may be token ids
    return residual.new_empty(rows.shape[0], features)


_LIBRARY.impl("part", _run, "CompositeExplicitAutograd")
torch.library.register_fake("lmi_bench::part", _shape_only, lib=_LIBRARY)


@contextmanager
def parts_in_use(parts: Sequence[Part]) -> Iterator[None]:
    """Set this thread's parts within the context."""
    before = getattr(_IN_USE, "parts", None)
    _IN_USE.parts = parts
    try:
        yield
    finally:
        _IN_USE.parts = before


def call_part(number: int, rows: Tensor, residual: Tensor, features: int) -> Tensor:
    """Run a part on `rows` of its own width; result shape (rows, features)."""
    operator: Any = torch.ops.lmi_bench.part
    result: Tensor = operator(rows, residual, number, features)
    return result
