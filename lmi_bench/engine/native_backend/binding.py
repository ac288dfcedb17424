"""The C interface of step.cpp in ctypes; the structures match the file's field by field."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_char_p, c_float, c_int, c_int64, c_void_p
from pathlib import Path
from typing import Any, ClassVar, Final

from lmi_bench.engine.native_backend.build import NativeUnavailableError

F32: Final = 0
BF16: Final = 1
INT8: Final = 2

_Fields = list[tuple[str, Any]]


class Linear(Structure):
    _fields_: ClassVar[_Fields] = [
        ("data", c_void_p),
        ("scale", c_void_p),
        ("bias", c_void_p),
        ("inputs", c_int64),
        ("outputs", c_int64),
        ("kind", c_int64),
    ]


class Layer(Structure):
    _fields_: ClassVar[_Fields] = [
        ("qkv", Linear),
        ("out", Linear),
        ("gate_up", Linear),
        ("down", Linear),
        ("attention_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("window", c_int64),
    ]


class Model(Structure):
    _fields_: ClassVar[_Fields] = [
        *[
            (name, c_int64)
            for name in (
                "layers",
                "hidden",
                "heads",
                "kv_heads",
                "head_dim",
                "ffn",
                "vocab",
                "block_size",
                "cache_kind",
                "embedding_kind",
                "threads",
            )
        ],
        ("norm_eps", c_float),
        ("scale", c_float),
        ("layer", POINTER(Layer)),
        ("final_norm", c_void_p),
        ("embedding", c_void_p),
        ("head", Linear),
        ("frequencies", c_void_p),
        ("amplitude", c_float),
        ("growth_factor", c_float),
        ("growth_power", c_float),
        ("trained_length", c_float),
    ]


class Sequence(Structure):
    _fields_: ClassVar[_Fields] = [
        ("first_row", c_int64),
        ("rows", c_int64),
        ("first_position", c_int64),
        ("first_block", c_int64),
    ]


class Step(Structure):
    _fields_: ClassVar[_Fields] = [
        ("rows", c_int64),
        ("sequences", c_int64),
        ("sampled", c_int64),
        ("token_ids", c_void_p),
        ("sequence", c_void_p),
        ("tables", c_void_p),
        ("sampled_rows", c_void_p),
        ("logits", c_void_p),
        ("likeliest", c_void_p),
    ]


class StepLibrary:
    """The functions of a compiled library; calls release the interpreter lock."""

    def __init__(self, path: Path) -> None:
        """Raises NativeUnavailableError for a file that cannot be loaded."""
        try:
            loaded = ctypes.CDLL(str(path))
        except OSError as exc:
            raise NativeUnavailableError(f"{path} cannot be loaded: {exc}") from exc
        loaded.lmi_variants.restype = c_char_p
        loaded.lmi_open.argtypes = [POINTER(Model), c_char_p]
        loaded.lmi_open.restype = c_void_p
        loaded.lmi_step.argtypes = [c_void_p, POINTER(Step)]
        loaded.lmi_step.restype = c_int
        loaded.lmi_close.argtypes = [c_void_p]
        loaded.lmi_close.restype = None
        self._loaded = loaded

    def variants(self) -> tuple[str, ...]:
        """Instruction sets of this processor that have kernels, best first."""
        names: bytes = self._loaded.lmi_variants()
        return tuple(names.decode().split(","))

    def open(self, model: Model, variant: str) -> int:
        """A handle, or 0 without memory or threads; `model`'s pointers must stay valid."""
        handle: int | None = self._loaded.lmi_open(ctypes.byref(model), variant.encode())
        return handle or 0

    def step(self, handle: int, step: Step) -> bool:
        """Run one step; False if out of memory."""
        return int(self._loaded.lmi_step(handle, ctypes.byref(step))) == 0

    def close(self, handle: int) -> None:
        """End the threads of a handle, which must not be used afterwards."""
        self._loaded.lmi_close(handle)
