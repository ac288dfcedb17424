"""Triton's interpreter for this folder's tests: kernels are then Python over CPU tensors.

TRITON_INTERPRET is set for all tests, before anything is imported."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="Triton has no wheel for this system")

from triton.runtime import interpreter

_patch_tensor = interpreter._patch_lang_tensor


def _patch_with_index(tensor, scope):
    """The interpreter of Triton 3.6 takes int() of arrays with one element, for the bounds of a
    loop; NumPy from 2.4 on wants item()."""
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


interpreter._patch_lang_tensor = _patch_with_index
