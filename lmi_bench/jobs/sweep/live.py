"""The report while a sweep runs: a process beside it serves the page and leaves the file."""

import json
import os
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from lmi_bench.core.durable import write_inside
from lmi_bench.core.errors import InputError, LmiBenchError
from lmi_bench.core.listener import Listener
from lmi_bench.report.live import REPORT_FILE, page_of

_HOST = "127.0.0.1"
_TELL_EVERY_S = 0.5
_LAST_PAGE_S = 4.0
"""How long the process may take for the last state of an open page."""


class LiveReport:
    """A sweep's listener that also passes its progress on to the page; a context manager.

    The process that builds the page has a session of its own, so that Ctrl-C reaches the sweep
    alone, and no socket but the one that listens. What it cannot read in time is left out.

    Raises InputError if the port cannot be used, before anything else happens.
    """

    def __init__(self, port: int, listener: Listener, *, is_served: bool = True) -> None:
        self._listener = listener
        self.note, self.step, self.warn = listener.note, listener.step, listener.warn
        self._folder: Path | None = None
        self._done, self._told_s = 0.0, 0.0
        if is_served:
            with _listening(port) as at:
                self.process = _start(at.fileno())
                self.note(f"live report: http://{_HOST}:{at.getsockname()[1]}/")
        else:
            self.process = _start(None)
            self.note(f"--live: virtual time leaves nothing to watch; {REPORT_FILE} is written")
        assert self.process.stdin is not None
        self._pipe = self.process.stdin.fileno()

    def progress(self, description: str, done: float, total: float | None) -> None:
        """Pass it on, to the page twice a second and whenever a level begins."""
        self._listener.progress(description, done, total)
        now_s = time.monotonic()
        if done <= self._done or now_s - self._told_s >= _TELL_EVERY_S:
            self._told_s = now_s
            self._send(text=description, done=done, total=total)
        self._done = done

    def begun(self, folder: Path) -> None:
        """The run folder exists."""
        self._folder = folder
        self._send(folder=str(folder.absolute()))

    def _send(self, **message: Any) -> None:
        os.set_blocking(self._pipe, "folder" in message)
        with suppress(BlockingIOError, BrokenPipeError):
            os.write(self._pipe, json.dumps(message).encode() + b"\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._folder is not None:  # written here, since the process may get little of a core
            try:
                write_inside(self._folder / REPORT_FILE, page_of(self._folder))
                self.note(f"report: {self._folder / REPORT_FILE}")
            except LmiBenchError as exc:
                self.warn(f"the report was not written: {exc}")
        self._send()  # the end; the pipe may still be open in a process of the engine
        try:
            self.process.communicate(timeout=_LAST_PAGE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()


def _listening(port: int) -> socket.socket:
    if not 0 <= port <= 65535:
        raise InputError(f"--live {port}: a port is 0 (a free one) to 65535")
    try:
        return socket.create_server((_HOST, port))
    except OSError as exc:
        raise InputError(
            f"--live {port}: cannot listen on {_HOST}:{port}: {os.strerror(exc.errno or 0)}; name "
            "another port, or none for a free one"
        ) from exc


def _start(fd: int | None) -> subprocess.Popen[bytes]:
    """The process; it imports from where this one does, not from the working directory."""
    program = f"import sys; sys.path = {sys.path!r}; from lmi_bench.report import live"
    return subprocess.Popen(  # noqa: S603  this interpreter, no shell
        [sys.executable, "-P", "-c", f"{program}; live.main({fd})"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=() if fd is None else (fd,),
        start_new_session=True,
    )
