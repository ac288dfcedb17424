"""Runs `lmi-bench` as a person does: in a process of its own."""

from __future__ import annotations

import atexit
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

LIMIT_S = 300
ONCE = Path(__file__).with_name("once.yaml")
"""A scenario for sweeps of live targets whose levels are counted."""


def command(*args: str | Path) -> list[str]:
    """The command line of one lmi-bench call."""
    return [sys.executable, "-m", "lmi_bench", *map(str, args)]


def environment() -> dict[str, str]:
    """Ours, with one thread of arithmetic, since the tests share the cores."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "160", "NO_COLOR": "1"}


class _Warm:
    """A process that forks off commands (`warm`), started with the first one."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def run(self, args: Sequence[str], cwd: Path) -> subprocess.CompletedProcess[str]:
        """Run one command to its end; kills it after LIMIT_S."""
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, Path(__file__).with_name("warm.py")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environment(),
            )
            atexit.register(self._end)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with tempfile.TemporaryDirectory() as folder:
            outputs = [str(Path(folder, name)) for name in ("stdout", "stderr")]
            asked = {"args": args, "cwd": str(cwd), "env": environment()}
            asked |= {"stdout": outputs[0], "stderr": outputs[1]}
            print(json.dumps(asked), file=self._process.stdin, flush=True)
            pid = int(self._process.stdout.readline())
            overdue = threading.Timer(LIMIT_S, os.kill, (pid, signal.SIGKILL))
            overdue.start()
            try:
                code = int(self._process.stdout.readline())
            finally:
                overdue.cancel()
                overdue.join()
            texts = [Path(name).read_text("utf-8") for name in outputs]
        return subprocess.CompletedProcess(args, code, *texts)

    def _end(self) -> None:
        if self._process is not None:
            self._process.communicate()


_WARM = _Warm()


def lmi_bench(
    *args: str | Path, expect: int | tuple[int, ...] = 0, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; fails the test with its output if the exit code is another."""
    expected = (expect,) if isinstance(expect, int) else expect
    done = _WARM.run([*map(str, args)], cwd or Path.cwd())
    assert done.returncode in expected, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stderr
    return done


class Server:
    """A running `lmi-bench serve`, with the address it printed.

    before  called in the new process, ahead of the command; stderr: None is a pipe
    """

    def __init__(self, *args: str, before: Callable[[], None] | None = None, stderr: IO[str] | None = None) -> None:
        self.process = subprocess.Popen(
            command("serve", "--port", "0", *args),
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if stderr is None else stderr,
            text=True,
            preexec_fn=before,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found = re.search(r"http://127\.0\.0\.1:\d+", line)
        assert found is not None, f"{line}{self.process.stderr.read() if self.process.stderr else ''}"
        self.url = found[0]

    def stop(self) -> tuple[int, str]:
        """Ctrl-C, and what was said on the way out."""
        self.process.send_signal(signal.SIGINT)
        _, stderr = self.process.communicate(timeout=120)
        return self.process.returncode, stderr


def modules_loaded_by(code: str, names: Sequence[str]) -> set[str]:
    """Which of the named modules a fresh interpreter holds after running `code`."""
    program = f"{code}\nimport sys\nprint(*[n for n in {list(names)!r} if n in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=LIMIT_S, env=environment(), check=True
    )
    return set(done.stdout.splitlines()[-1].split())
