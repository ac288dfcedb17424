"""A small OpenAI server in a thread, on a port of this machine or at a Unix socket."""

from __future__ import annotations

import json
import socketserver
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

MODEL = "small"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_GET(self):
        if self.path == "/metrics":
            self._send(200, "text/plain", b"vllm:request_success_total %d\n" % self.server.answered)
            return
        models = {"data": [{"id": MODEL, "owned_by": "vllm"}]}
        self._document(200 if self.path == "/v1/models" else 404, models)

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}")
        if self.path != "/v1/completions":
            self._document(200 if self.path == "/reset_prefix_cache" else 404, {})
            return
        self.server.answered += 1
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        tokens = asked["max_tokens"]
        for number in range(tokens):
            reason = "length" if number == tokens - 1 else None
            self._event({"choices": [{"index": 0, "text": " way", "finish_reason": reason}]})
        usage = {"prompt_tokens": 8, "completion_tokens": tokens}
        self._event({"choices": [], "usage": usage})
        self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")

    def _document(self, status, content):
        self._send(status, "application/json", json.dumps(content).encode())

    def _send(self, status, kind, body):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _event(self, content):
        self._chunk(b"data: " + json.dumps(content).encode() + b"\n\n")

    def _chunk(self, data):
        self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))


class _UnixServer(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True


@contextmanager
def small_server(path=None):
    """The server while the block runs: its port, or 0 at a path."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler) if path is None else _UnixServer(str(path), _Handler)
    server.answered = 0
    with server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        try:
            yield getattr(server, "server_port", 0)
        finally:
            server.shutdown()
