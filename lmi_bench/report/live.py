"""The report of a running sweep: a process of low priority that builds the page and serves it.

The sweep starts this process (`jobs/sweep/live.py`) and sends it a JSON object a line: the run
folder once it exists, the progress of the level, the end. The page is built from the folder's
files alone, in which a level is whole as soon as it has a line. A sweep that is killed closes the
pipe without a word: then this process writes the file in its place.
"""

import json
import math
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

REPORT_FILE = "report.html"
_NICENESS = 5
_LOOK_S = 0.2
_READER_S = 2.0
"""How long an open page may take to fetch the finished report before the server ends."""
_LOOPBACK = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:\d{1,5})?", re.IGNORECASE)
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
}
_WAITING = b"""<!DOCTYPE html><html lang="en"><meta charset="utf-8"><meta http-equiv="refresh"
content="1"><link rel="icon" href="data:,"><title>lmi-bench report</title>
<main id="main"><p>The sweep opens its target; the report follows.</p></main></html>"""


class LivePage:
    """The newest report of a run folder, and the state that open pages ask for."""

    def __init__(self) -> None:
        self.html = _WAITING
        self.state: dict[str, Any] = {"revision": 0, "ended": False}
        self.shown = 0
        self.is_written = False
        self.progress: dict[str, Any] = {}
        self.asked_s = -math.inf
        self._folder: Path | None = None
        self.over = threading.Event()  # the sweep has ended, of itself or by a kill

    def hear(self, lines: Iterable[str]) -> None:
        """Take the sweep's messages until it ends or is killed."""
        for line in lines:
            message = json.loads(line)
            if "folder" in message:
                self._folder = Path(message["folder"])
            elif "text" not in message:
                self.is_written = True
                break
            else:
                begins = message["done"] < self.progress.get("done", math.inf)
                since = time.strftime("%H:%M:%S") if begins else self.progress["since"]
                self.progress = message | {"since": since}
        self.over.set()

    def follow(self) -> None:
        """Build the page whenever a file has changed, until the sweep ends."""
        built: object = None
        while not self.over.wait(_LOOK_S):
            if self._folder is not None and (stamp := _stamp(self._folder)) != built:
                with suppress(Exception):  # keeps the last page; the end raises what is wrong
                    self.show(page_of(self._folder, live=True))
                built = stamp

    def finish(self) -> None:
        """Give an open page time to fetch the last state; write the file if nothing else did."""
        from lmi_bench.core.durable import write_inside

        if self._folder is None:
            return
        if not self.is_written:
            write_inside(self._folder / REPORT_FILE, page_of(self._folder))
        self.show(page_of(self._folder, live=True), ended=True)
        now_s = time.monotonic()
        end_s = now_s + (_READER_S if self.asked_s > now_s - _READER_S else 0.0)
        while self.shown < self.state["revision"] and time.monotonic() < end_s:
            time.sleep(0.02)

    def show(self, html: str, *, ended: bool = False) -> None:
        """Replace the page; the state, which makes readers fetch it, changes after it and whole."""
        self.html = html.encode()
        self.state = {"revision": self.state["revision"] + 1, "ended": ended}


def page_of(folder: Path, *, live: bool = False) -> str:
    """The report of a run folder; what draws it takes 0.5 s to load."""
    from lmi_bench.core.run_store import load_run
    from lmi_bench.report.html import render_html
    from lmi_bench.report.view import build_view

    return render_html(build_view([load_run(folder)]), live=live)


def _stamp(folder: Path) -> object:
    """A value that changes when a file of the run does, the lines of a running level apart."""
    names = ("manifest.json", "levels.jsonl", "knees.json", "slo.json", "cloudwatch.json")
    found = [path.stat() for path in (folder / name for name in names) if path.exists()]
    return [(each.st_ino, each.st_size, each.st_mtime_ns) for each in found]


def serve(listening: socket.socket, page: LivePage) -> ThreadingHTTPServer:
    """Answer for the page from a thread of its own, until the server is shut down."""
    handler = type("Handler", (_Handler,), {"page": page})
    server = _Server(listening.getsockname(), handler, bind_and_activate=False)
    server.socket.close()
    server.socket = listening
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """A reader that went away is no error."""


class _Handler(BaseHTTPRequestHandler):
    """Two addresses, for pages of this machine alone: the report and its state."""

    page: LivePage
    server_version, sys_version = "lmi-bench", ""
    timeout = 10  # seconds for a request to arrive

    def parse_request(self) -> bool:
        """Refuse other names than loopback's (a page of another site may point its own name
        here: DNS rebinding), and other methods than GET."""
        if not super().parse_request():
            return False
        hosts = self.headers.get_all("Host") or []
        if len(hosts) != 1 or not _LOOPBACK.fullmatch(hosts[0]):
            self.send_error(HTTPStatus.FORBIDDEN, "Only for this machine")
        elif self.command != "GET":
            self.send_error(HTTPStatus.METHOD_NOT_ALLOWED)
        else:
            return True
        return False

    def do_GET(self) -> None:
        """Answer with the report or its state."""
        page = self.page
        page.asked_s = time.monotonic()
        state = page.progress | page.state
        if self.path == "/":
            self._answer("text/html; charset=utf-8", page.html)
            page.shown = state["revision"]
        elif self.path == "/state":
            self._answer("application/json", json.dumps(state).encode())
        else:
            self.send_error(HTTPStatus.NOT_FOUND)

    def _answer(self, kind: str, body: bytes) -> None:
        self.send_response(HTTPStatus.OK)
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  the base's name
        """Print nothing: the terminal is the sweep's."""


def main(listening_fd: int | None) -> None:
    """Follow the sweep at the other end of the standard input.

    listening_fd  a socket that listens; None: nothing is served, only the file is written
    """
    with suppress(OSError):
        os.nice(_NICENESS)  # before anything large is imported
    page = LivePage()
    threading.Thread(target=page.hear, args=(sys.stdin,), daemon=True).start()
    if listening_fd is not None:
        serve(socket.socket(fileno=listening_fd), page)
    page.follow()
    page.finish()
