"""The step library: one C++ file, compiled once per machine (`lmi_bench.core.native_build`)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from lmi_bench.core.native_build import NativeSource, NativeUnavailableError
from lmi_bench.core.native_build import library as build_library

__all__ = ["NativeUnavailableError", "library"]

SOURCE: Final = NativeSource(
    Path(__file__).with_name("step.cpp"),
    language="C++",
    what="the native step",
    variable="CXX",
    compilers=("g++", "clang++", "c++"),
    flags=("-std=c++17", "-O3", "-fPIC", "-shared", "-pthread", "-Wno-psabi"),
    hint="some 10 to 20 s; --backend torch does without",
)


def library(
    *,
    cache_dir: Path | None = None,
    compiler: str | None = None,
    extra_flags: tuple[str, ...] = (),
    tell: Callable[[str], None] | None = None,
) -> Path:
    """The compiled step, built first if needed (10 to 20 s).

    Raises NativeUnavailableError without a suitable compiler; see `native_build.library`.
    """
    return build_library(
        SOURCE, cache_dir=cache_dir, compiler=compiler, extra_flags=extra_flags, tell=tell
    )
