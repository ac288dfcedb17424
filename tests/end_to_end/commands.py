"""Runs `lmi-bench` as a person does: in a process of its own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

LIMIT_S = 300


def command(*args: str | Path) -> list[str]:
    """The command line of one lmi-bench call."""
    return [sys.executable, "-m", "lmi_bench", *map(str, args)]


def environment() -> dict[str, str]:
    """Ours, with one thread of arithmetic, since the tests share the cores."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "160", "NO_COLOR": "1"}


def lmi_bench(
    *args: str | Path, expect: int | tuple[int, ...] = 0, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; fails the test with its output if the exit code is another."""
    expected = (expect,) if isinstance(expect, int) else expect
    done = subprocess.run(
        command(*args),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env=environment(),
        cwd=cwd,
        check=False,
    )
    assert done.returncode in expected, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stderr
    return done


class Server:
    """A running `lmi-bench serve`, with the address it printed."""

    def __init__(self, *args: str) -> None:
        self.process = subprocess.Popen(
            command("serve", "--port", "0", *args),
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found = re.search(r"http://127\.0\.0\.1:\d+", line)
        assert found is not None, (
            f"{line}{self.process.stderr.read() if self.process.stderr else ''}"
        )
        self.url = found[0]

    def stop(self) -> tuple[int, str]:
        """Ctrl-C, and what was said on the way out."""
        self.process.send_signal(signal.SIGINT)
        _, stderr = self.process.communicate(timeout=60)
        return self.process.returncode, stderr


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
