"""`lmi-bench serve` in a process of its own, for benchmarks that load it over HTTP."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import aiohttp

from benchmarks.support.random_calls import Call

ROOT = Path(__file__).parents[2]


class Server:
    """The server, on a free port. Ctrl-C in the terminal does not reach it; `stop` does."""

    def __init__(self, flags: Sequence[str]) -> None:
        # a file: a pipe that nobody reads would hold up a server that has much to say
        self._said = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "lmi_bench", "serve", "--port", "0", *flags],
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
            cwd=ROOT,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        found = re.search(r"serving (\S+) at (http://\S+)", self._process.stdout.readline())
        if found is None:
            self._process.wait()
            sys.exit(f"the server did not start: {self.said()}")
        self.model, self.url = found.groups()
        self.lines_at_start = len(self.said().splitlines())

    @property
    def pid(self) -> int:
        return self._process.pid

    def is_running(self) -> bool:
        return self._process.poll() is None

    def memory_bytes(self) -> int:
        """Resident memory."""
        pages = Path(f"/proc/{self.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    def cpu_s(self) -> float:
        """CPU time of all its threads since its start."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def said(self) -> str:
        """All that it wrote to stderr."""
        descriptor = self._said.fileno()
        size = os.fstat(descriptor).st_size
        return os.pread(descriptor, size, 0).decode()  # no seek: the server writes at its place

    def stop(self, number: signal.Signals = signal.SIGINT) -> tuple[int, str]:
        """Send a signal; the exit code and the last line of what it said."""
        if self.is_running():
            self._process.send_signal(number)
        code = self._process.wait(timeout=60)
        return code, (self.said().strip().splitlines() or [""])[-1]


async def cut_short(url: str, call: Call) -> None:
    """Part of a request's bytes, then a closed connection."""
    host, port = url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    head = f"POST {call.path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(call.body) + 1}\r\n\r\n"
    writer.write(head.encode() + call.body)
    await writer.drain()
    writer.close()
    await writer.wait_closed()


async def usage(session: aiohttp.ClientSession) -> tuple[float, float, float]:
    """Running and waiting requests, and the used share of the blocks, as /metrics says."""
    async with session.get("/metrics") as response:
        text = await response.text()
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    found = [re.search(rf"^vllm:{name}{{.*}} (\S+)$", text, re.MULTILINE) for name in names]
    running, waiting, used = (float(match[1]) for match in found if match is not None)
    return running, waiting, used


async def until_idle(url: str, limit_s: float = 30.0) -> None:
    """Wait until no request runs or waits and no block is held. Raises TimeoutError."""
    async with aiohttp.ClientSession(url) as session, asyncio.timeout(limit_s):
        while await usage(session) != (0, 0, 0.0):
            await asyncio.sleep(0.1)
