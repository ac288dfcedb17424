"""Tensors that a checkpoint holds in another form than the layers ask for, under Llama's names.

A wrapper of a text model has its own prefix, projections of one input may be one matrix.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

from torch import Tensor

from lmi_bench.models.spec import DecoderSpec

_PREFIXES: Final = {
    "language_model.model.": "model.",
    "model.language_model.": "model.",
    "language_model.": "",
}
_FUSED: Final = re.compile(r".*\.(qkv|gate_up)_proj\.(weight|bias)")


class Stored(Protocol):
    """The tensors of a checkpoint as they are in its files."""

    @property
    def names(self) -> tuple[str, ...]: ...

    def stored_shape(self, name: str) -> tuple[int, ...]: ...

    def read(self, name: str, *index: int | slice) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Form:
    """A tensor that is made of stored ones: `read` gives it, or its part at an index."""

    shape: tuple[int, ...]
    read: Callable[..., Tensor]


def forms_of(stored: Stored, spec: DecoderSpec) -> dict[str, Form]:
    """Every tensor of the model that is not in the files under its name and in its form."""
    forms: dict[str, Form] = {}

    def whole(name: str) -> Form:
        return forms.get(name) or Form(stored.stored_shape(name), partial(stored.read, name))

    for name in stored.names:
        old = next((old for old in _PREFIXES if name.startswith(old)), "")
        own = _PREFIXES.get(old, "") + name.removeprefix(old)
        if own != name:
            forms[own] = whole(name)
    for name in (*stored.names, *forms):
        if _FUSED.fullmatch(name):
            forms.update(_parts(name, whole(name), spec))
    return forms


def _parts(name: str, whole: Form, spec: DecoderSpec) -> Iterator[tuple[str, Form]]:
    """The projections of one fused matrix or bias."""
    base, _, last = name.rpartition(".")
    prefix, _, kind = base.rpartition(".")
    rows = dict.fromkeys(("gate_proj", "up_proj"), whole.shape[0] // 2)
    if kind == "qkv_proj":
        heads = {"q": spec.num_heads, "k": spec.num_kv_heads, "v": spec.num_kv_heads}
        rows = {f"{part}_proj": count * spec.head_dim for part, count in heads.items()}
    first = 0
    for part, count in rows.items():
        shape, read = (count, *whole.shape[1:]), partial(_rows, whole, first, first + count)
        yield f"{prefix}.{part}.{last}", Form(shape, read)
        first += count


def _rows(whole: Form, first: int, stop: int, *index: int | slice) -> Tensor:
    """An index's part of rows first .. stop, which alone are read."""
    rows = whole.read(slice(first, stop))
    return rows[index] if index else rows
