"""A small OpenAI server for `selftest`: it answers well, or with each fault in turn."""

import itertools
import json
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

MODEL: Final = "selftest"
FAULTS: Final = (
    "ok", "broken_stream", "timeout", "malformed_frame", "short_output", "throttled", "overloaded",
    "server_error",
)  # fmt: skip
"""Answers in turn, each named as the record of its request has to name it."""
_REFUSED: Final = {"throttled": 429, "overloaded": 503, "server_error": 500}
_RESET: Final = struct.pack("ii", 1, 0)  # SO_LINGER: a close sends RST, not FIN


class FaultyServer(ThreadingHTTPServer):
    """Answers on a free port of 127.0.0.1, with the faults once `faults` is set.

    sent  answers so far by their kind, those of `FAULTS`
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, *, faults: bool, token_s: float) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.token_s = token_s
        self.sent: Counter[str] = Counter()
        self._turns = itertools.cycle(FAULTS) if faults else itertools.repeat("ok")
        self._lock = threading.Lock()

    def next_kind(self) -> str:
        """The kind of the next answer."""
        with self._lock:
            kind = next(self._turns)
            self.sent[kind] += 1
        return kind

    def handle_error(self, *_: object) -> None:
        """Ignore a client that has gone, as a killed sweep has."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FaultyServer

    def log_message(self, *_: object) -> None:
        """Log nothing."""

    def do_GET(self) -> None:
        self._refuse(404)

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        tokens = asked["max_tokens"]
        is_probe = tokens < 4  # asked before the first level
        kind = "ok" if is_probe else self.server.next_kind()
        if kind in _REFUSED:
            self._refuse(_REFUSED[kind])
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        whole = {"ok": tokens, "short_output": 0}.get(kind, 1)
        for number in range(whole):
            time.sleep(self.server.token_s)
            self._event(_choice(" way", "length" if number == tokens - 1 else None))
        if kind == "malformed_frame":
            self._chunk(b"data: {broken\n\n")
        elif kind in ("broken_stream", "timeout"):
            if kind == "timeout":
                self.rfile.read(1)  # until the client gives up
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            self.close_connection = True
            return
        elif kind == "short_output":
            self._event(_choice("", "stop"))
        counts = {"prompt_tokens": 16, "completion_tokens": whole}
        self._event({"choices": [], "usage": counts})
        self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")

    def _event(self, content: dict[str, Any]) -> None:
        self._chunk(b"data: " + json.dumps(content).encode() + b"\n\n")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))

    def _refuse(self, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()


def _choice(text: str, finish_reason: str | None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish_reason}]}


@contextmanager
def faulty_server(*, faults: bool = False, token_s: float = 0.001) -> Iterator[FaultyServer]:
    """The server, answering in a thread while the block runs."""
    with FaultyServer(faults=faults, token_s=token_s) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        try:
            yield server
        finally:
            server.shutdown()
