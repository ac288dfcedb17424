"""Runs `lmi-bench` as a person does: in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

LIMIT_S = 120


def command(*args: str | Path) -> list[str]:
    """The command line of one lmi-bench call."""
    return [sys.executable, "-m", "lmi_bench", *map(str, args)]


def environment() -> dict[str, str]:
    """Ours, with one thread of arithmetic, since the tests share the cores."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "160", "NO_COLOR": "1"}


def lmi_bench(
    *args: str | Path, expect: int = 0, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; fails the test with its output if the exit code is another."""
    done = subprocess.run(
        command(*args),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env=environment(),
        cwd=cwd,
        check=False,
    )
    assert done.returncode == expect, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stderr
    return done


def modules_loaded_by(code: str, names: Sequence[str]) -> set[str]:
    """Which of the named modules a fresh interpreter holds after running `code`."""
    program = f"{code}\nimport sys\nprint(*[n for n in {list(names)!r} if n in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env=environment(),
        check=True,
    )
    return set(done.stdout.splitlines()[-1].split())
