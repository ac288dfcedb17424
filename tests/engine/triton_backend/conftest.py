"""Triton's interpreter for this folder's tests: kernels are then Python over CPU tensors.

TRITON_INTERPRET is set for all tests, before anything is imported."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="Triton has no wheel for this system")

import torch
import triton.language as tl
from triton.runtime import interpreter

_patch_tensor = interpreter._patch_lang_tensor


def _patch_with_index(tensor, scope):
    """The interpreter of Triton 3.6 takes int() of arrays with one element, for the bounds of a
    loop; NumPy from 2.4 on wants item()."""
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


interpreter._patch_lang_tensor = _patch_with_index

_from_float = interpreter.InterpreterBuilder.create_fp_to_fp


def _rounded_to_float8(builder, source, kind, mode):
    """The interpreter loses the carry of a mantissa that rounds up to the next power of two."""
    if source.dtype.scalar != tl.float32 or kind.scalar != tl.float8e4nv:
        return _from_float(builder, source, kind, mode)
    rounded = torch.from_numpy(source.data.copy()).to(torch.float8_e4m3fn).view(torch.uint8)
    return interpreter.TensorHandle(rounded.numpy(), kind.scalar)


interpreter.InterpreterBuilder.create_fp_to_fp = _rounded_to_float8
