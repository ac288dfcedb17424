"""The step library: compiled once for a machine, then found in the user's cache directory.

One C++ file with a C interface and no dependency but the compiler's own libraries. The cached
library's name is a hash of all that went into it (source, flags, compiler, processor), so a new
version is built beside the old one and never mistaken for it.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

SOURCE: Final = Path(__file__).with_name("step.cpp")
COMPILERS: Final = ("g++", "clang++", "c++")
FLAGS: Final = ("-std=c++17", "-O3", "-fPIC", "-shared", "-pthread", "-Wno-psabi")
_TIMEOUT_S: Final = 300.0
_CPU_INFO: Final = Path("/proc/cpuinfo")


class NativeUnavailableError(Exception):
    """Why the native back end cannot be used here, in words that fit behind "because"."""


def library(
    *,
    cache_dir: Path | None = None,
    compiler: str | None = None,
    extra_flags: tuple[str, ...] = (),
    tell: Callable[[str], None] | None = None,
) -> Path:
    """The compiled library, built first where it is not there yet (some 10 to 20 seconds).

    cache_dir  None: $XDG_CACHE_HOME/lmi-bench/native, or ~/.cache/lmi-bench/native
    compiler   None: $CXX, or the first of COMPILERS that is installed
    tell       told in one line that a build starts

    Safe with several processes at once: a library appears whole or not at all. Raises
    NativeUnavailableError without a compiler that can build it.
    """
    program = compiler or _compiler()
    folder = default_cache_dir() if cache_dir is None else cache_dir
    flags = (*FLAGS, *extra_flags)
    path = folder / f"step-{_key(program, flags)}.so"
    if path.is_file():
        return path
    if tell is not None:
        tell(
            f"compiling the native step with {Path(program).name}, once for this machine "
            "(some 10 to 20 s; --backend torch does without)"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=".step-", suffix=".so", dir=folder)
    except OSError as exc:
        raise NativeUnavailableError(f"{folder} cannot be written: {exc}") from exc
    os.close(handle)
    unfinished = Path(name)
    try:
        _compile([program, *flags, "-o", name, str(SOURCE)])
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return path


def default_cache_dir() -> Path:
    """Where libraries of this user are kept."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "lmi-bench" / "native"


def _compiler() -> str:
    named = os.environ.get("CXX")
    for name in (named,) if named else COMPILERS:
        found = shutil.which(name)
        if found is not None:
            return found
    if named:
        raise NativeUnavailableError(f"the compiler $CXX={named} is not installed")
    raise NativeUnavailableError(
        f"no C++ compiler is installed (looked for {', '.join(COMPILERS)})"
    )


def _compile(command: list[str]) -> None:
    try:
        done = subprocess.run(  # noqa: S603  the user's own compiler, no shell
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise NativeUnavailableError(f"{command[0]} does not build it: {exc}") from exc
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        first = next((line for line in lines if "error" in line), lines[0])
        raise NativeUnavailableError(f"{command[0]} does not build it: {first}")


def _key(program: str, flags: tuple[str, ...]) -> str:
    """Changes with whatever could make another library of it, or one for another processor."""
    parts = [
        SOURCE.read_bytes(),
        " ".join(flags).encode(),
        program.encode(),
        _version(program).encode(),
        platform.machine().encode(),
        _cpu_flags().encode(),
    ]
    digest = hashlib.sha256()
    for part in parts:
        digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()[:20]


def _version(program: str) -> str:
    try:
        done = subprocess.run(  # noqa: S603
            [program, "--version"], capture_output=True, text=True, timeout=20.0, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise NativeUnavailableError(f"{program} does not run: {exc}") from exc
    return done.stdout


def _cpu_flags() -> str:
    """Instruction sets of the first core, empty where the system does not list them."""
    if not _CPU_INFO.is_file():
        return ""
    for line in _CPU_INFO.read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith(("flags", "Features")):
            return " ".join(sorted(line.partition(":")[2].split()))
    return ""
