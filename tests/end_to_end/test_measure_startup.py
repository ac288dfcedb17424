"""`sweep --measure-startup`: two timed starts, and no process left behind on any way out."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.end_to_end.commands import command, environment, lmi_bench

SERVER = """
import json, os, subprocess, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

port, pids = int(sys.argv[1]), Path(sys.argv[2])
child = subprocess.Popen(["sleep", "600"])
is_first = not pids.exists()
with pids.open("a") as file:
    file.write(f"{os.getpid()} {child.pid} ")
if is_first:
    time.sleep(1.5)

class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def log_message(self, *args):
        pass
    def reply(self, kind, body):
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def do_GET(self):
        models = {"data": [{"id": "tiny"}]} if self.path == "/v1/models" else {}
        self.reply("application/json", json.dumps(models).encode())
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        tokens = asked.get("max_tokens", 2)
        parts = [{"choices": [{"text": " a", "finish_reason": None}]}] * (tokens - 1)
        parts += [{"choices": [{"text": " a", "finish_reason": "length"}]}]
        lines = [f"data: {json.dumps(part)}\\n\\n" for part in parts]
        self.reply("text/event-stream", "".join([*lines, "data: [DONE]\\n\\n"]).encode())

ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""
SMALL = ("--isl", "8", "--osl", "4", "--protocol", "openai", "--warmup-requests", "0")


@pytest.fixture
def server(tmp_path):
    """Its URL, the command that starts it, and the file of all process ids it ever had."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (tmp_path / "server.py").write_text(SERVER)
    pids = tmp_path / "pids"
    start = f"PYTHONUNBUFFERED=1 {sys.executable} {tmp_path / 'server.py'} {port} {pids}"
    return f"http://127.0.0.1:{port}", start, pids


def _left(pids: Path) -> list[int]:
    """The server's processes that still run."""
    states = {}
    for pid in map(int, pids.read_text().split()):
        try:
            states[pid] = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
    return [pid for pid, state in states.items() if state != "Z"]


def _wait_until(is_true, limit_s=60.0):
    end_s = time.monotonic() + limit_s
    while not is_true():
        assert time.monotonic() < end_s
        time.sleep(0.05)


def _is_open(port):
    with socket.socket() as asking:
        return asking.connect_ex(("127.0.0.1", port)) == 0


def test_both_starts_are_timed_and_nothing_is_left(server, tmp_path):
    """The first start sleeps for 1.5 s."""
    url, start, pids = server
    run = tmp_path / "run"
    arguments = ("sweep", url, *SMALL, "--concurrency", "1", "--requests-per-level", "3")
    done = lmi_bench(*arguments, "--measure-startup", start, "--out", run)
    facts = json.loads((run / "manifest.json").read_text())["target"]
    assert facts["startup_cold_s"] > 1.5
    assert facts["startup_warm_s"] > 0
    assert facts["startup_command"] == start
    said = re.search(r"start to first answer: (\S+) s cold, (\S+) s warm", done.stderr)
    told = [float(said[1]), float(said[2])]  # rounded once; the manifest's are, too
    kept = [facts["startup_cold_s"], facts["startup_warm_s"]]
    assert told == pytest.approx(kept, abs=0.0056)
    assert len(pids.read_text().split()) == 4
    assert _left(pids) == []
    page = tmp_path / "page.html"
    lmi_bench("report", run, "--out", page)
    assert "Startup cold s" in page.read_text()


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_the_server_ends_however_the_sweep_ends(server, tmp_path, number, code):
    url, start, pids = server
    arguments = ("sweep", url, *SMALL, "--concurrency", "1", "--duration", "60")
    out = ("--measure-startup", start, "--out", tmp_path / "run")
    sweep = subprocess.Popen(
        command(*arguments, *out), env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    _wait_until(lambda: pids.exists() and len(pids.read_text().split()) == 4)
    assert _left(pids)
    os.kill(sweep.pid, number)
    assert sweep.wait(120) == code
    _wait_until(lambda: not _left(pids))


def test_what_cannot_be_started_is_one_line(server, tmp_path):
    url, start, _ = server
    sweep = ("sweep", url, *SMALL, "--out", tmp_path / "run", "--measure-startup")
    failed = lmi_bench(*sweep, "echo no GPU here >&2; exit 3", expect=2)
    assert "ended with exit code 3; its last words: no GPU here" in failed.stderr
    assert not (tmp_path / "run").exists()
    running = subprocess.Popen(["/bin/sh", "-c", start], start_new_session=True)
    try:
        _wait_until(lambda: _is_open(int(url.rpartition(":")[2])))
        assert "answers at" in lmi_bench(*sweep, start, expect=2).stderr
    finally:
        os.killpg(running.pid, signal.SIGKILL)
        running.wait()
    simulated = lmi_bench("sweep", "sim:ml.g5.2xlarge", "--measure-startup", start, expect=2)
    assert "--measure-startup starts a server at a URL" in simulated.stderr
