"""The compiled step, built once for all tests, and tiny models."""

from __future__ import annotations

import pytest

from lmi_bench.core.native_build import NativeUnavailableError
from lmi_bench.engine.native_backend.binding import StepLibrary, library
from tests.engine.torch_backend.conftest import make_model

__all__ = ["compiled", "make_model"]


@pytest.fixture(scope="session")
def compiled() -> StepLibrary:
    """The library as a user's first run builds it."""
    try:
        return StepLibrary(library())
    except NativeUnavailableError as exc:
        pytest.skip(f"no native step here: {exc}")
