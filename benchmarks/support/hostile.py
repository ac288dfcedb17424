"""Hostile clients of a server, at stated rates, none of which use more than a part of a core.

Each kind is a task that repeats until its time is over; what it saw is counted by kind. All name
themselves `HOSTILE` in the header of `--fair-by`, so to the server they are one client.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

import aiohttp

from benchmarks.support.random_calls import ANSWERED_OR_REFUSED, Lengths, is_answered, is_overloaded, random_call
from benchmarks.support.served import cut_short

HOSTILE = {"X-Client": "hostile"}
BURST, BURST_EVERY_S = 100, 10.0  # completions at once
LARGE_BYTES, LARGE_EVERY_S = 12 * 2**20, 20.0
IDLE, SLOW, DRIP_S = 200, 10, 1.0  # connections; of each kind of slow sender; between its bytes
FEW_PER_S, RANDOM_PER_S = 5.0, 20.0  # of each kind of wrong request; of random_calls
RATES = (
    f"{BURST} completions at once every {BURST_EVERY_S:g} s, half of them left in mid-stream and "
    f"a tenth as long as the context allows; a body of {LARGE_BYTES // 2**20} MiB every "
    f"{LARGE_EVERY_S:g} s; {FEW_PER_S:g} a second each of prompts that never fit, malformed JSON, "
    f"bodies cut in mid-bytes and wrong methods or paths; {RANDOM_PER_S:g} random calls of all "
    f"protocols a second; {IDLE} idle connections; {3 * SLOW} slow senders of a byte each "
    f"{DRIP_S:g} s (headers, bodies, headers of a second request)"
)
_LATE = frozenset({408})  # a body that did not come in time
_PATHS = ("/v1/nowhere", "/%00", "/../../etc/passwd", "/generate/" + "a" * 3000, "/v1/completions")
_METHODS = ("GET", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "BREW")
_LENGTHS = Lengths(words=(1, 3, 8, 20, 60, 140, 5000))


@dataclass
class Hostile:
    """One hostile phase against a server whose context is `longest` tokens.

    unexpected  what no server should answer, such as a status of 500
    held_s      the longest time that the server left each kind of silent connection open
    """

    url: str
    model: str
    longest: int
    draw: random.Random
    counts: Counter[str] = field(default_factory=Counter)
    unexpected: list[str] = field(default_factory=list)
    held_s: dict[str, float] = field(default_factory=dict)

    async def run(self, until_s: float) -> None:
        """Until a time of the loop's clock; what is then in flight is left."""
        connector = aiohttp.TCPConnector(limit=0)
        try:
            async with (
                aiohttp.ClientSession(self.url, connector=connector, headers=HOSTILE) as session,
                asyncio.timeout_at(until_s),
                asyncio.TaskGroup() as group,
            ):
                self._session = session
                few_s = 1 / FEW_PER_S
                for work, every_s in (
                    (self._burst, BURST_EVERY_S),
                    (self._large, LARGE_EVERY_S),
                    (self._too_long, few_s),
                    (self._malformed, few_s),
                    (self._cut, few_s),
                    (self._wrong, few_s),
                    (self._random, 1 / RANDOM_PER_S),
                ):
                    group.create_task(self._repeat(work, every_s))
                for number in range(IDLE):
                    group.create_task(self._silent("idle connection", number, b"", b""))
                head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
                body = head + b"Content-Length: 9999\r\n\r\n"
                good = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
                for number in range(SLOW):
                    for kind, first in (
                        ("slow headers", head),
                        ("slow body", body),
                        ("slow second headers", good + head),
                    ):
                        group.create_task(self._silent(kind, number, first + b"X-Slow: ", b"a"))
        except TimeoutError:
            pass

    async def _repeat(self, work: Callable[[], Awaitable[None]], every_s: float) -> None:
        """Start it at the rate, however long it takes."""
        async with asyncio.TaskGroup() as group:
            at_s = asyncio.get_running_loop().time() + self.draw.random() * min(every_s, 5.0)
            while True:
                await asyncio.sleep(at_s - asyncio.get_running_loop().time())
                group.create_task(self._guarded(work))
                at_s += every_s

    async def _guarded(self, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except (aiohttp.ClientError, OSError) as exc:  # the server may close on such a client
            self.counts[f"connection ended: {type(exc).__name__}"] += 1

    async def _send(self, kind: str, path: str, body: object, method: str = "POST") -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self._session.request(method, path, data=data) as response:
            self._saw(kind, response.status, await response.read())

    def _saw(self, kind: str, status: int, body: bytes) -> None:
        if status not in ANSWERED_OR_REFUSED | _LATE:
            self.unexpected.append(f"{kind}: {status} {body[:200]!r}")
        if is_overloaded(status, body):
            self.counts[f"{kind}: refused for want of room"] += 1
        else:
            ended = "answered" if is_answered(status, body) else "refused"
            self.counts[f"{kind}: {ended}"] += 1

    async def _burst(self) -> None:
        await asyncio.gather(*(self._stream(number) for number in range(BURST)))

    async def _stream(self, number: int) -> None:
        """A stream; each second one is left in its middle."""
        prompt = self.draw.randint(1, min(400, self.longest // 2))
        length = self.longest - prompt if number % 10 == 0 else self.draw.randint(1, 200)
        body = {
            "prompt": [self.draw.randint(3, 999) for _ in range(prompt)],
            "max_tokens": min(length, self.longest - prompt),
            "ignore_eos": True,
            "stream": True,
        }
        left_after = self.draw.randint(1, 20) if number % 2 else None
        async with self._session.post("/v1/completions", json=body) as response:
            if response.status == 200 and left_after is not None:
                for _ in range(2 * left_after):  # an event is two lines
                    if not await response.content.readline():
                        break
                self.counts["burst: left in mid-stream"] += 1
                response.close()
            else:
                self._saw("burst", response.status, await response.read())

    async def _large(self) -> None:
        text = "word " * (LARGE_BYTES // 5)
        await self._send("12 MiB body", "/v1/completions", {"prompt": text, "max_tokens": 1})

    async def _too_long(self) -> None:
        body: dict[str, object] = {"prompt": [3] * (self.longest + 1), "max_tokens": 1}
        if self.draw.random() < 0.5:
            body = {"prompt": "x", "max_tokens": 10**6}
        await self._send("never fits", "/v1/completions", body)

    async def _malformed(self) -> None:
        whole = b'{"prompt": "word word", "max_tokens": 3, "stream": true}'
        bad = (
            self.draw.randbytes(300),
            whole[: self.draw.randrange(1, len(whole) - 1)],
            b"[" * 50_000,
            b'{"prompt": "\xff\xfe"}',
            b'{"prompt": "x", "max_tokens": 1e999}',
        )
        path = self.draw.choice(("/v1/completions", "/invocations", "/generate"))
        await self._send("malformed JSON", path, self.draw.choice(bad))

    async def _cut(self) -> None:
        call = random_call(self.draw, _LENGTHS, model=self.model)
        await cut_short(self.url, replace(call, body=call.body[: len(call.body) // 2]))
        self.counts["cut in mid-bytes"] += 1

    async def _wrong(self) -> None:
        path, method = self.draw.choice(_PATHS), self.draw.choice(_METHODS)
        await self._send("wrong method or path", path, b"{}", method)

    async def _random(self) -> None:
        call = random_call(self.draw, _LENGTHS, model=self.model)
        try:
            async with asyncio.timeout(call.patience_s):
                await self._send("random call", call.path, call.body)
        except TimeoutError:
            self.counts["random call: given up"] += 1

    async def _silent(self, kind: str, number: int, first: bytes, each: bytes) -> None:
        """A connection that sends `first` and then `each` once a while until the server ends it."""
        host, port = self.url.removeprefix("http://").split(":")
        await asyncio.sleep(number * 5.0 / IDLE)  # not all in one moment
        while True:
            reader, writer = await asyncio.open_connection(host, int(port))
            begin_s = time.monotonic()
            ended = asyncio.ensure_future(reader.read())
            try:
                writer.write(first)
                while not ended.done():
                    if each:
                        writer.write(each)
                    await asyncio.wait([ended], timeout=DRIP_S)
                    held_s = time.monotonic() - begin_s
                    self.held_s[kind] = max(held_s, self.held_s.get(kind, 0.0))
                self.counts[f"{kind}: ended by the server"] += 1
            except OSError:
                self.counts[f"{kind}: ended by the server"] += 1
            finally:
                ended.cancel()
                writer.close()
