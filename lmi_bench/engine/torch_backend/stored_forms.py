"""Tensors that a checkpoint holds in another form than the layers ask for, under Llama's names.

A wrapper of a text model has its own prefix, projections of one input may be one matrix, a layer's
experts one tensor. Weights of 4 or 8 bits with scales (FP8, MXFP4, compressed-tensors) become the
floats that they stand for; activations are not rounded then.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

import torch
from torch import Tensor

from lmi_bench.core.errors import InputError
from lmi_bench.models.spec import DecoderSpec

FLOAT_METHODS: Final = ("fp8", "compressed-tensors", "mxfp4")
"""`quant_method` of weights that are read as floats."""
_PREFIXES: Final = {
    "language_model.model.": "model.",
    "model.language_model.": "model.",
    "language_model.": "",
}
_FUSED: Final = re.compile(r".*\.(qkv|gate_up)_proj\.(weight|bias)")
_EXPERTS: Final = re.compile(r"(.*\.experts\.)(gate_up_proj|down_proj)(_bias|_blocks|)")
_E2M1: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of 4 bits; the fourth is the sign


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
    names = frozenset(stored.names)

    def whole(name: str) -> Form:
        return forms.get(name) or Form(stored.stored_shape(name), partial(stored.read, name))

    for name in names:
        old = next((old for old in _PREFIXES if name.startswith(old)), "")
        own = _PREFIXES.get(old, "") + name.removeprefix(old)
        base, _, last = own.rpartition(".")
        if last in ("weight_zero_point", "weight_g_idx"):
            raise InputError(f"tensor {name!r}: weights with a zero or an order are not supported")
        if last in ("weight_scale_inv", "weight_scale"):
            source = name.removesuffix(last)
            packed = f"{source}weight_packed" in names
            forms[f"{base}.weight"] = _scaled(stored, source, last, packed)
        elif own != name and own not in forms:
            forms[own] = whole(name)
    for name in (*names, *forms):
        if _FUSED.fullmatch(name):
            forms.update(_parts(name, whole(name), spec))
        elif match := _EXPERTS.fullmatch(name):
            forms.update(_experts(stored, spec, *match.groups()))
    return forms


def _scaled(stored: Stored, source: str, scale_name: str, is_packed: bool) -> Form:
    """Values of 8 bits, or eight of 4 bits in each 32-bit number of a row, the first lowest; times
    the scale of their tensor, row, block or group."""
    name = f"{source}weight_packed" if is_packed else f"{source}weight"
    shape = stored.stored_shape(name)
    if is_packed:
        shape = (shape[0], 8 * shape[1])
        if stored.read(f"{source}weight_shape").tolist() != list(shape):
            raise InputError(f"tensor {name!r}: packed weights have 4 bits here, not others")

    def read(*index: int | slice) -> Tensor:
        values = stored.read(name)
        if is_packed:
            shifts = torch.arange(0, 32, 4, dtype=torch.int32)
            values = ((values[..., None] >> shifts) & 15).flatten(1) - 8
        scale = stored.read(f"{source}{scale_name}").float()
        for side, size in enumerate(shape if scale.numel() > 1 else ()):
            # a power of 2, of which the last block may have less
            block = 1 << (-(-size // scale.shape[side]) - 1).bit_length()
            scale = scale.repeat_interleave(block, side).narrow(side, 0, size)
        whole = (values.float() * scale).to(torch.bfloat16)
        return whole[index] if index else whole

    return Form(shape, read)


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


def _experts(
    stored: Stored, spec: DecoderSpec, prefix: str, kind: str, suffix: str
) -> Iterator[tuple[str, Form]]:
    """The matrices of every expert of a layer: gpt-oss has them in one tensor, with inputs first,
    and each gate beside its `up`."""
    name = f"{prefix}{kind}{suffix}"
    steps = {"gate_proj": slice(0, None, 2), "up_proj": slice(1, None, 2)}
    every = steps if kind == "gate_up_proj" else {kind: slice(None)}
    outputs, inputs = spec.ffn_size, spec.hidden_size
    if kind == "down_proj":
        outputs, inputs = inputs, outputs
    shape, last = ((outputs,), "bias") if suffix == "_bias" else ((outputs, inputs), "weight")
    for number in range(spec.experts):
        for part, rows in every.items():
            read = partial(_of_expert, stored, name, number, rows)
            yield f"{prefix}{number}.{part}.{last}", Form(shape, read)


def _of_expert(stored: Stored, name: str, number: int, rows: slice, *index: int | slice) -> Tensor:
    tensor = stored.read(name, number)
    if name.endswith("_blocks"):
        scales = stored.read(f"{name.removesuffix('_blocks')}_scales", number)
        whole = _of_mxfp4(tensor[rows], scales[rows])
    else:
        whole = (tensor if tensor.ndim == 1 else tensor.T)[rows].contiguous()
    return whole[index] if index else whole


def _of_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Blocks of 32 values of 4 bits, the first of a byte lower, with a power of 2 for each (OCP
    Microscaling 1.0).

    blocks  shape (outputs, groups, 16), bytes; scales: (outputs, groups), exponents less 127
    """
    table = torch.tensor((*_E2M1, *(-value for value in _E2M1)))
    values = table[torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(2).long()]
    powers = torch.exp2(scales.float() - 127)
    return (values * powers[..., None]).flatten(1).to(torch.bfloat16)
