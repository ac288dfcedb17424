"""The step library: one C++ file, compiled once per machine, and its C interface in ctypes.

The structures match those of step.cpp field by field.
"""

import ctypes
from ctypes import POINTER, Structure, c_char_p, c_float, c_int, c_int64, c_void_p
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Final

from lmi_bench.core import native_build
from lmi_bench.core.native_build import STEP, NativeUnavailableError

library: Final = partial(native_build.library, STEP)
"""The compiled step, built first if needed (10 to 20 s); see `native_build.library`."""

F32: Final = 0
BF16: Final = 1

_Fields = list[tuple[str, Any]]


def _fields(kind: Any, names: str) -> _Fields:
    return [(name, kind) for name in names.split()]


class Linear(Structure):
    _fields_: ClassVar[_Fields] = [*_fields(c_void_p, "data scale bias"), *_fields(c_int64, "inputs outputs kind")]


class Layer(Structure):
    _fields_: ClassVar[_Fields] = [
        *_fields(Linear, "qkv out gate_up down"),
        *_fields(c_void_p, "attention_norm mlp_norm attention_out_norm mlp_out_norm"),
        *_fields(c_void_p, "query_norm key_norm keys values"),
        ("window", c_int64),
    ]


class Model(Structure):
    _fields_: ClassVar[_Fields] = [
        *_fields(c_int64, "layers hidden heads kv_heads head_dim ffn vocab block_size"),
        *_fields(c_int64, "cache_kind embedding_kind threads gelu"),
        *_fields(c_float, "norm_eps scale embedding_scale score_cap logit_cap"),
        ("layer", POINTER(Layer)),
        *_fields(c_void_p, "final_norm embedding"),
        ("head", Linear),
        *_fields(c_void_p, "frequencies window_frequencies"),
        *_fields(c_float, "amplitude growth_factor growth_power trained_length"),
    ]


class Step(Structure):
    _fields_: ClassVar[_Fields] = [
        *_fields(c_int64, "rows sequences sampled"),
        *_fields(c_void_p, "token_ids sequence tables sampled_rows logits likeliest"),
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
