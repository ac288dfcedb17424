"""`serve` under hostile requests to every route: refused in words, nothing held, nothing logged.

A fifth of LMI_BENCH_FUZZ is their number (`make fuzz`: 20,000), LMI_BENCH_FUZZ_SEED where their
seeds begin. A failure names the seed; the same seed makes the same bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
from collections import Counter
from pathlib import Path

import pytest

from tests.end_to_end.commands import Server
from tests.fuzz.hostile_requests import KEY, WAITING_S, hostile_request

NUMBER = int(os.environ.get("LMI_BENCH_FUZZ", "1500")) // 5
SEED = int(os.environ.get("LMI_BENCH_FUZZ_SEED", "0"))
CLIENTS = 16
HANG_S = 60  # the machine may be busy; a lost request takes for ever
MOST_GROWTH_BYTES = 48 * 2**20
SMALL = (
    *("--model", "demo-15m", "--dtype", "float32", "--threads", "1", "--num-blocks", "24"),
    *("--block-size", "16", "--max-model-len", "120", "--prefill-tokens", "16"),
)
SERVERS = {
    "open": (*SMALL, "--prefix-caching", "--chunked-prefill"),
    "signed": (*SMALL, "--require-signature", "--lmi-replies", "async"),
    "tgi with a key": (*SMALL, "--lmi-replies", "tgi", "--api-key", KEY),
}


async def answer_to(request, host, port):
    """(status, what is wrong with the answer); status 0: none came."""
    reader, writer = await asyncio.open_connection(host, port, limit=2**24)
    try:
        for piece in request.pieces:
            writer.write(piece)
            await asyncio.sleep(0)
        limit_s = HANG_S if request.waits else WAITING_S
        try:
            async with asyncio.timeout(limit_s):
                return await read_answer(reader, request.method)
        except TimeoutError:
            return 0, "no answer" * request.waits
    except (ConnectionError, asyncio.IncompleteReadError) as exc:
        return 0, f"{exc!r}" * isinstance(exc, asyncio.IncompleteReadError)
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def read_answer(reader, method):
    head = b"HTTP/1.1 100 "
    while head.startswith(b"HTTP/1.1 100 "):  # an interim answer
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError as exc:
            return 0, f"a torn head {exc.partial[:80]!r}" * bool(exc.partial)
    status, lower = int(head.split()[1]), head.lower()
    length = re.search(rb"\r\ncontent-length: (\d+)", lower)
    if method == "HEAD" or status == 204:
        body = b""
    elif length is not None:
        body = await reader.readexactly(int(length[1]))
    elif b"\r\ntransfer-encoding: chunked" in lower:
        body = b""
        while size := int(await reader.readuntil(b"\r\n"), 16):
            body += (await reader.readexactly(size + 2))[:-2]
    else:
        body = await reader.read()
    if b"\r\nx-evil" in lower:
        return status, "a header of the client's making"
    if body and re.search(rb"\r\ncontent-type: application/json[;\r]", lower):
        json.loads(body)
    return status, ""


async def drive(url, model, seeds, signed, memory_of):
    """The statuses, what went wrong with its seed, and memory at a tenth and at the end."""
    host, port = url.removeprefix("http://").split(":")
    statuses, wrong, memory_bytes = Counter(), [], []
    work = iter(seeds)

    async def client():
        for seed in work:
            request = hostile_request(random.Random(seed), model, signed=signed)
            try:
                status, fault = await answer_to(request, host, int(port))
            except ValueError as exc:  # an answer that is not what its head says
                status, fault = 0, repr(exc)
            statuses[status] += 1
            if fault or not (status in (0, 503) or status // 100 in (2, 4)):
                wrong.append(f"seed {seed}: {status} {fault} {request.pieces[0][:100]!r}")
            if statuses.total() == len(seeds) // 10:
                memory_bytes.append(memory_of())

    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    async with asyncio.timeout(HANG_S):
        while await usage(host, int(port)) != [0, 0, 0]:
            await asyncio.sleep(0.05)
    return statuses, wrong, [*memory_bytes, memory_of()]


async def call(host, port, line, body=b""):
    reader, writer = await asyncio.open_connection(host, port)
    head = f"{line} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {KEY}\r\nConnection: close\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    return answer.decode()


async def usage(host, port):
    """Running and waiting requests, and the used share of the KV blocks."""
    text = await call(host, port, "GET /metrics")
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    return [float(re.search(rf"vllm:{name}{{.*}} (\S+)", text)[1]) for name in names]


@pytest.mark.parametrize("kind", SERVERS)
def test_hostile_requests_are_refused_and_leave_nothing(kind, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AK")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "SK")
    server = Server(*SERVERS[kind])
    host, port = server.url.removeprefix("http://").split(":")

    def memory_of():
        pages = Path(f"/proc/{server.process.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    place = list(SERVERS).index(kind)
    seeds = range(SEED + place, SEED + NUMBER, len(SERVERS))
    try:
        statuses, wrong, memory_bytes = asyncio.run(drive(server.url, "demo-15m", seeds, kind == "signed", memory_of))
        body = b'{"prompt": "Once", "max_tokens": 3}'
        last = asyncio.run(call(host, int(port), "POST /v1/completions", body))
    finally:
        code, said = server.stop()
    print(kind, dict(sorted(statuses.items())), *(f"{n >> 20} MiB" for n in memory_bytes))
    assert not wrong, "\n".join([*wrong[:20], said[-3000:]])
    assert "Traceback" not in said
    assert "200 OK" in last
    assert code == 0, said  # the engine's books were audited
    assert "0 of 24 KV blocks in use at the end" in said
    assert statuses[200] > len(seeds) // 10
    assert statuses[400] > len(seeds) // 10
    assert memory_bytes[-1] - memory_bytes[0] < MOST_GROWTH_BYTES
