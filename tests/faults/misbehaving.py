"""A server that answers each request by a script: bytes to write, pauses, and how it ends.

Runs on the test's own loop. Every helper gives plain bytes, so a test shows what is on the wire.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

from lmi_bench.core.records import RequestRecord
from lmi_bench.core.workload import PlannedRequest
from lmi_bench.loadgen.http.receive import run_on_sockets
from lmi_bench.loadgen.http.target import HttpTarget
from lmi_bench.loadgen.run.target import Resolved
from lmi_bench.wire.format import find_format
from tests.loadgen.sending import measure

STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
LAST_CHUNK = b"0\r\n\r\n"
DONE = b"data: [DONE]\n\n"
REQUEST = PlannedRequest(0, 0.0, input_tokens=4, output_tokens=3, prompt_text="time year way day")

NATIVE: Path | None = None
"""Library of the native receiver that targets here use; set by the fixture `receiver`."""

Step = bytes | float | None
"""Bytes to write, seconds to wait, or None to close the connection at once."""


def chunk(data: bytes) -> bytes:
    """`data` as one HTTP chunk."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(text: str, finish_reason: str | None = None) -> bytes:
    """One SSE frame of a completion."""
    choice = {"index": 0, "text": text, "finish_reason": finish_reason}
    body = {"object": "text_completion", "choices": [choice]}
    return b"data: " + json.dumps(body, ensure_ascii=False).encode() + b"\n\n"


def usage(prompt_tokens: int, completion_tokens: int) -> bytes:
    """The SSE frame that states the counts."""
    counts = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
    return b"data: " + json.dumps({"choices": [], "usage": counts}).encode() + b"\n\n"


def document(status: str, body: bytes, *headers: bytes) -> bytes:
    """A response of one JSON document."""
    lines = [
        b"HTTP/1.1 " + status.encode(),
        b"Content-Type: application/json",
        b"Content-Length: %d" % len(body),
        *headers,
    ]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def good_answer() -> bytes:
    """Three tokens, usage and the end, in one piece."""
    frames = [event(" a"), event(" b"), event(" c", "length"), usage(4, 3), DONE]
    return STREAM_HEAD + b"".join(chunk(frame) for frame in frames) + LAST_CHUNK


class Misbehaving:
    """Counts connections and requests; `requests` holds each request as it came."""

    def __init__(self, script: Callable[[int], Iterable[Step]]) -> None:
        self._script = script
        self.connections = 0
        self.requests: list[bytes] = []
        self.broken_off = 0
        self.active = 0
        self.port = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.active += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                number = len(self.requests)
                self.requests.append(head + await reader.readexactly(length))
                for step in self._script(number):
                    if step is None:
                        return
                    if isinstance(step, bytes):
                        writer.write(step)
                        await writer.drain()
                    else:
                        await asyncio.sleep(step)
        except (ConnectionError, asyncio.IncompleteReadError):
            self.broken_off += 1
        finally:
            self.active -= 1
            writer.close()

    async def idle(self) -> None:
        """Wait until every connection has been seen to end, half a second at most."""
        for _ in range(50):
            if not self.active:
                return
            await asyncio.sleep(0.01)


@asynccontextmanager
async def serving(script: Callable[[int], Iterable[Step]]) -> AsyncIterator[Misbehaving]:
    """A misbehaving server on a free port of the loopback interface."""
    server = Misbehaving(script)
    listener = await asyncio.start_server(server.handle, "127.0.0.1", 0)
    server.port = listener.sockets[0].getsockname()[1]
    try:
        yield server
    finally:
        listener.close()


def records_of(
    *scripts: Iterable[Step],
    protocol: str = "openai",
    timeout_s: float = 5.0,
    request: PlannedRequest = REQUEST,
    **options: object,
) -> tuple[list[RequestRecord], Misbehaving]:
    """One request after the other on one target; request i is answered by script i."""

    async def main() -> tuple[list[RequestRecord], Misbehaving]:
        async with serving(lambda number: scripts[number]) as server:
            url = f"http://127.0.0.1:{server.port}"
            async with HttpTarget(url, find_format(protocol), model="m", native=NATIVE, **options) as target:
                records = []
                for _ in scripts:
                    loop = asyncio.get_running_loop()
                    measured = await measure(Resolved(target).send, request, loop.time(), timeout_s=timeout_s)
                    records.append(measured.record())
            await server.idle()
            return records, server

    return run_on_sockets(main())


def record_of(script: Iterable[Step], **options: object) -> RequestRecord:
    """The record of one request, answered by the script."""
    records, _ = records_of(script, **options)
    return records[0]
