"""A library of one C or C++ file: compiled once for a machine, then found in the user's cache.

The cached library's name is a hash of all that went into it (source, flags, compiler, processor),
so a new version is built beside the old one and never mistaken for it.
"""

import hashlib
import os
import platform
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lmi_bench.core.host import instruction_sets

_TIMEOUT_S: Final = 300.0


class NativeUnavailableError(Exception):
    """The reason why a native part cannot be used here; it can follow the word "because"."""


@dataclass(frozen=True, slots=True)
class NativeSource:
    """One source file with a C interface and no dependency but the compiler's own libraries.

    what       its purpose, shown after "compiling"
    language   shown in messages
    variable   environment variable that names the user's own compiler
    compilers  without it: programs to look for, in this order
    hint       how long it takes and what to do without it, shown while it compiles
    """

    path: Path
    what: str
    flags: tuple[str, ...]
    language: str = "C"
    variable: str = "CC"
    compilers: tuple[str, ...] = ("cc", "gcc", "clang")
    hint: str = ""


# declared here, where the build of a wheel finds them without the dependencies of their users
_PACKAGE = Path(__file__).parents[1]
STEP: Final = NativeSource(
    _PACKAGE / "engine" / "native_backend" / "step.cpp",
    language="C++",
    what="the native step",
    variable="CXX",
    compilers=("g++", "clang++", "c++"),
    flags=("-std=c++17", "-O3", "-fPIC", "-shared", "-pthread", "-Wno-psabi"),
    hint="some 10 to 20 s; --backend torch does without",
)
RECEIVER: Final = NativeSource(
    _PACKAGE / "loadgen" / "http" / "harvest.c",
    what="the native receiver",
    flags=("-std=gnu11", "-O2", "-fPIC", "-shared"),
)
QUEUE: Final = NativeSource(
    _PACKAGE / "analysis" / "level" / "queue.c",
    what="the simulation of a queue",
    # no fused operations: the same numbers as Python's on every processor
    flags=("-std=gnu11", "-O2", "-ffp-contract=off", "-fno-math-errno", "-fPIC", "-shared"),
)

PARTS: Final = (STEP, RECEIVER, QUEUE)


def library(source: NativeSource, *, tell: Callable[[str], None] | None = None, build: bool = True) -> Path:
    """The compiled library: from the wheel if it has one, else from the cache, built if needed.

    build  False: compile nothing, so the file may not be there yet

    Safe with several processes at once: a library appears whole or not at all. Raises
    NativeUnavailableError without a compiler that can build it.
    """
    shipped = source.path.with_name(shipped_name(source))
    if source.variable not in os.environ and shipped.is_file():
        return shipped
    program, folder, stem = _compiler(source), default_cache_dir(), source.path.stem
    path = folder / f"{stem}-{_key(source.path, program, source.flags)}.so"
    if path.is_file() or not build:
        return path
    if tell is not None:
        hint = f" ({source.hint})" if source.hint else ""
        tell(f"compiling {source.what} with {Path(program).name}, once for this machine{hint}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{stem}-", suffix=".so", dir=folder)
    except OSError as exc:
        raise NativeUnavailableError(f"{folder} cannot be written: {exc}") from exc
    os.close(handle)
    unfinished = Path(name)
    try:
        done = _run([program, *source.flags, "-o", name, str(source.path)], "does not build it")
        if done.returncode:
            lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
            first = next((line for line in lines if "error" in line), lines[0])
            raise NativeUnavailableError(f"{program} does not build it: {first}")
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return path


def shipped_name(source: NativeSource) -> str:
    """Name of the library that a wheel for this platform holds, for this source and these flags."""
    digest = hashlib.sha256(source.path.read_bytes() + " ".join(source.flags).encode())
    system = f"{platform.system()}-{platform.machine()}".lower()
    return f"{source.path.stem}-{system}-{digest.hexdigest()[:12]}.so"


def default_cache_dir(name: str = "native") -> Path:
    """The user's cache folder for libraries, or for other files."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "lmi-bench" / name


def _compiler(source: NativeSource) -> str:
    named = os.environ.get(source.variable)
    for name in (named,) if named else source.compilers:
        found = shutil.which(name)
        if found is not None:
            return found
    if named:
        raise NativeUnavailableError(f"the compiler ${source.variable}={named} is not installed")
    raise NativeUnavailableError(
        f"no {source.language} compiler is installed (looked for {', '.join(source.compilers)})"
    )


def _run(command: list[str], problem: str, timeout_s: float = _TIMEOUT_S) -> subprocess.CompletedProcess[str]:
    """What a command says; at the end of its time, or of ours, all that it has started ends, too."""
    try:
        with subprocess.Popen(  # noqa: S603  the user's own compiler, no shell
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        ) as process:
            try:
                said = process.communicate(timeout=timeout_s)
            except BaseException:
                os.killpg(process.pid, signal.SIGKILL)
                raise
            return subprocess.CompletedProcess(command, process.returncode, *said)
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise NativeUnavailableError(f"{command[0]} {problem}: {exc}") from exc


def _key(source: Path, program: str, flags: tuple[str, ...]) -> str:
    """A hash of everything that decides what the compiler builds, and for which processor."""
    parts = [
        source.read_bytes(),
        " ".join(flags).encode(),
        program.encode(),
        _run([program, "--version"], "does not run", 20.0).stdout.encode(),
        platform.machine().encode(),
        instruction_sets().encode(),
    ]
    digest = hashlib.sha256()
    for part in parts:
        digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()[:20]
