"""An hour of `lmi-bench serve` in real time: honest streams beside hostile clients, over HTTP.

Two minutes without and eight with the hostile clients take turns, so that whatever else the
machine does weighs on both; the honest load is the same throughout. The simulated engine (qwen3-8b
on ml.g5.2xlarge) has a real GPU's step as a wait in real time: HTTP, queue and scheduler are real.
Clients are told apart by the `X-Client` header.

The hostile clients are processes of their own: bursts beyond what the server admits (the longest
answers, prompts that cannot fit, streams left in the middle), the random calls of soak.py, bodies
of 12 MiB, requests sent byte by byte, and idle connections.

    python benchmarks/serve_hour.py --out benchmarks/results/serve_hour.md
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import platform
import random
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from queue import Empty
from typing import Any

import aiohttp
import numpy as np

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.soak import LENGTHS, Server, cut_short, usage  # noqa: E402
from benchmarks.support.random_calls import random_call  # noqa: E402

QUIET_S, HOSTILE_S = 120.0, 480.0
HONEST_PER_S, HONEST_IN, HONEST_OUT = 1.0, 64, 32
BURST_EVERY_S, BURST = 30.0, 80
RANDOM_PER_S, SLOW, IDLE = 5.0, 20, 100
LARGE_EVERY_S, LARGE_BYTES = 30.0, 12 * 2**20
ADMITTED, SLOTS, CHUNK, SHARE = 64, 32, 128, 0.25
LONGEST = 2048
FAIR = ("--fair-by", "X-Client", "--client-share", str(SHARE))
CHUNKS = ("--chunked-prefill", "--prefill-tokens", str(CHUNK))
LIMITS = ("--max-concurrent-requests", str(ADMITTED), "--max-batch", str(SLOTS))
ENGINES: dict[str, tuple[str, ...]] = {
    "simulated": (
        *("--executor", "simulated", "--model", "qwen3-8b", "--instance", "ml.g5.2xlarge"),
        *("--max-model-len", str(LONGEST)),
    ),
    "bundled": ("--model", "demo-15m", "--threads", "1", "--max-model-len", "512"),
}


@dataclass
class Seen:
    """Honest latencies in seconds by phase (quiet, hostile), and what became of all requests."""

    ttft_s: dict[str, list[float]] = field(default_factory=lambda: {"quiet": [], "hostile": []})
    itl_s: dict[str, list[float]] = field(default_factory=lambda: {"quiet": [], "hostile": []})
    e2e_s: dict[str, list[float]] = field(default_factory=lambda: {"quiet": [], "hostile": []})
    counts: Counter[str] = field(default_factory=Counter)
    memory_mib: list[tuple[float, float]] = field(default_factory=list)  # (seconds, MiB)
    cpu_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    exit_code: int | None = None
    closing: str = ""


def stream_of(tokens_in: int, tokens_out: int) -> bytes:
    """The body of a streamed completion."""
    body: dict[str, Any] = {"prompt": list(range(1, tokens_in + 1)), "max_tokens": tokens_out}
    return json.dumps(body | {"stream": True, "ignore_eos": True}).encode()


async def honest_request(url: str, phase: str, seen: Seen) -> None:
    """One stream, read as its bytes come; refused for want of room, it is sent again after 1 s."""
    body, begin_s = stream_of(HONEST_IN, HONEST_OUT), time.monotonic()
    times: list[float] = []
    headers = {"X-Client": "honest", "Content-Type": "application/json"}
    async with aiohttp.ClientSession(url, headers=headers) as session:
        while not times:
            async with session.post("/v1/completions", data=body) as response:
                if response.status in (429, 503):
                    seen.counts["honest, refused and sent again"] += 1
                    await asyncio.sleep(1.0)
                    continue
                if response.status != 200:
                    seen.counts[f"honest, status {response.status}"] += 1
                    return
                async for chunk in response.content.iter_any():
                    times += [time.monotonic()] * chunk.count(b'"text"')
    if len(times) != HONEST_OUT:
        seen.counts["honest, cut off"] += 1
        return
    seen.counts["honest, answered"] += 1
    seen.ttft_s[phase].append(times[0] - begin_s)
    seen.itl_s[phase] += np.diff(times).tolist()
    seen.e2e_s[phase].append(times[-1] - begin_s)


async def every(
    end: Callable[[], bool], next_s: Callable[[], float], send: Callable[[], Awaitable[None]]
) -> None:
    """Start `send` after each of the waits until the end; then wait for all."""
    tasks: set[asyncio.Task[None]] = set()
    while not end():
        await asyncio.sleep(next_s())
        task = asyncio.ensure_future(send())
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    await asyncio.gather(*tasks)


def hostile(url: str, model: str, seconds: float, seed: int, told: Any) -> None:
    """A process: all hostile clients for a phase; tells its counts at the end."""
    counts: Counter[str] = Counter()
    asyncio.run(_hostile(url, model, seconds, random.Random(seed), counts))
    told.put(counts)


async def _hostile(
    url: str, model: str, seconds: float, draw: random.Random, counts: Counter[str]
) -> None:
    end_s = time.monotonic() + seconds
    headers = {"X-Client": "hostile", "Content-Type": "application/json"}
    connector, limit = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=90)
    host, _, port = url.removeprefix("http://").partition(":")

    def is_over() -> bool:
        return time.monotonic() >= end_s

    async with aiohttp.ClientSession(
        url, headers=headers, connector=connector, timeout=limit
    ) as session:

        async def post(path: str, body: bytes, what: str, leave_after: int | None = None) -> None:
            try:
                async with session.post(path, data=body) as response:
                    read = 0
                    async for chunk in response.content.iter_any():
                        read += chunk.count(b"data:")
                        if (leave_after is not None and read >= leave_after) or is_over():
                            counts[f"{what}, left in mid-stream"] += 1
                            response.close()
                            return
                    counts[f"{what}, status {response.status}"] += 1
            except (aiohttp.ClientError, TimeoutError, ConnectionError) as exc:
                counts[f"{what}, {type(exc).__name__}"] += 1

        async def burst() -> None:
            work = []
            for number in range(BURST):
                prompt, answer = draw.randint(1, 400), draw.randint(1, 200)
                if number % 10 == 0:
                    prompt, answer = 1, LONGEST
                elif number % 10 == 1:
                    answer = 400
                leave = draw.randint(1, 20) if number % 2 else None
                body = stream_of(prompt, answer)
                work.append(post("/v1/completions", body, "of bursts", leave))
            await asyncio.gather(*work)

        async def random_one() -> None:
            call = random_call(draw, LENGTHS, model=model)
            if call.cut:
                await cut_short(url, call)
                counts["random, cut short"] += 1
            else:
                await post(call.path, call.body, "random")

        async def large() -> None:
            body = b'{"prompt": "' + b"x " * (LARGE_BYTES // 2) + b'", "max_tokens": 1}'
            await post("/v1/completions", body, "12 MiB")

        async def slow() -> None:
            """A request byte by byte, until the server ends it."""
            while not is_over():
                with contextlib.suppress(OSError):
                    reader, writer = await asyncio.open_connection(host, int(port))
                    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 90\r\n\r\n"
                    for byte in head + b"{" * 80:
                        if is_over() or reader.at_eof():
                            break
                        writer.write(bytes([byte]))
                        await writer.drain()
                        await asyncio.sleep(0.5)
                    writer.close()
                counts["sent byte by byte"] += 1

        async def idle() -> None:
            while not is_over():
                with contextlib.suppress(OSError):
                    reader, writer = await asyncio.open_connection(host, int(port))
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(max(0.1, end_s - time.monotonic())):
                            await reader.read(1)
                    writer.close()
                counts["idle connections"] += 1

        await asyncio.gather(
            every(is_over, lambda: BURST_EVERY_S, burst),
            every(is_over, lambda: draw.expovariate(RANDOM_PER_S), random_one),
            every(is_over, lambda: LARGE_EVERY_S, large),
            *(slow() for _ in range(SLOW)),
            *(idle() for _ in range(IDLE)),
        )


async def run(server: Server, minutes: float, seen: Seen) -> None:
    """The phases in turn, with honest requests at random times throughout."""
    draw, begin_s = random.Random(1), time.monotonic()
    now = {"phase": "quiet"}
    context = multiprocessing.get_context("spawn")
    told = context.Queue()
    started = 0

    def is_over() -> bool:
        return time.monotonic() >= begin_s + 60 * minutes

    async def one() -> None:
        await honest_request(server.url, now["phase"], seen)

    async def watch() -> None:
        cpu_s = server.cpu_s()
        while not is_over():
            await asyncio.sleep(10)
            at_s, used_s = time.monotonic() - begin_s, server.cpu_s()
            seen.memory_mib.append((at_s, server.memory_bytes() / 2**20))
            seen.cpu_s[now["phase"]] += used_s - cpu_s
            seen.cpu_s[f"{now['phase']}, of"] += 10
            cpu_s = used_s
            print(
                f"\r{at_s / 60:5.1f} min, {now['phase']:7}, {seen.counts['honest, answered']:,} "
                f"honest, {seen.memory_mib[-1][1]:.1f} MiB",
                end="",
                file=sys.stderr,
                flush=True,
            )

    async def phases() -> None:
        nonlocal started
        share = min(1.0, minutes * 60 / (QUIET_S + HOSTILE_S))  # at least one turn of both
        while not is_over():
            now["phase"] = "quiet"
            await asyncio.sleep(QUIET_S * share)
            now["phase"] = "hostile"
            left_s = min(HOSTILE_S * share, begin_s + 60 * minutes - time.monotonic())
            if left_s < 1:
                break
            process = context.Process(
                target=hostile, args=(server.url, server.model, left_s, started, told)
            )
            process.start()
            started += 1
            await asyncio.to_thread(process.join)

    await asyncio.gather(
        phases(), watch(), every(is_over, lambda: draw.expovariate(HONEST_PER_S), one)
    )
    for _ in range(started):
        with contextlib.suppress(Empty):
            seen.counts += told.get(timeout=10)
    async with aiohttp.ClientSession(server.url) as session, asyncio.timeout(60):
        while await usage(session) != (0, 0, 0.0):
            await asyncio.sleep(0.1)


def table(seen: Seen) -> list[str]:
    """Markdown: honest latencies in both kinds of phases, and what became of the rest."""
    lines = [
        "| honest streams | undisturbed | hostile clients beside | times |",
        "|---|---:|---:|---:|",
    ]
    for title, values in (("TTFT", seen.ttft_s), ("ITL", seen.itl_s), ("E2E", seen.e2e_s)):
        for q in (50, 99):
            quiet, beside = (1e3 * np.percentile(values[name], q) for name in ("quiet", "hostile"))
            lines.append(
                f"| {title} p{q}, ms | {quiet:.1f} | {beside:.1f} | {beside / quiet:.2f} |"
            )
    sizes = [len(seen.e2e_s[name]) for name in ("quiet", "hostile")]
    lines.append(f"| requests | {sizes[0]:,} | {sizes[1]:,} | |")
    cpu = [seen.cpu_s[name] / max(1, seen.cpu_s[f"{name}, of"]) for name in ("quiet", "hostile")]
    lines.append(f"| the server's share of a core | {cpu[0]:.0%} | {cpu[1]:.0%} | |")
    lines += ["", "| | |", "|---|---:|"]
    lines += [f"| {kind} | {count:,} |" for kind, count in sorted(seen.counts.items())]
    tenth = next(mib for at_s, mib in seen.memory_mib if at_s >= seen.memory_mib[-1][0] / 10)
    lines += [f"| resident memory at a tenth, MiB | {tenth:.1f} |"]
    lines += [
        f"| resident memory, the most after it, MiB | {max(m for _, m in seen.memory_mib):.1f} |"
    ]
    lines += [f"| resident memory at the end, MiB | {seen.memory_mib[-1][1]:.1f} |"]
    lines += [f"| exit code, audit of the books included | {seen.exit_code} |"]
    return [*lines, f"| the server's last line | {seen.closing} |"]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--engine", choices=list(ENGINES), default="simulated")
    parser.add_argument("--plain", action="store_true", help="without the options of fairness")
    parser.add_argument("--out", type=Path, help="Markdown file.")
    options = parser.parse_args()
    fair = () if options.plain else (*FAIR, *CHUNKS)
    server, seen = Server([*ENGINES[options.engine], *LIMITS, *fair]), Seen()
    try:
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(run(server, options.minutes, seen))
    finally:
        seen.exit_code, seen.closing = server.stop()
    flags = " ".join([*ENGINES[options.engine], *LIMITS, *fair])
    text = "\n".join(
        [
            f"# {options.minutes:g} minutes of `serve` with hostile clients",
            "",
            (__doc__ or "").partition("\n\n")[2].partition("    python")[0].strip(),
            "",
            f"{datetime.now(UTC):%Y-%m-%d}; {platform.machine()}, {os.cpu_count()} cores, load at "
            f"the end {os.getloadavg()[0]:.1f}, Python {platform.python_version()}. "
            f"{HONEST_PER_S:g} honest request a second of {HONEST_IN} tokens in and {HONEST_OUT} "
            f"out. Hostile: a burst of {BURST} every {BURST_EVERY_S:g} s, {RANDOM_PER_S:g} random "
            f"calls a second, a body of {LARGE_BYTES // 2**20} MiB every {LARGE_EVERY_S:g} s, "
            f"{SLOW} requests byte by byte, {IDLE} idle connections. `serve {flags}`.",
            "",
            *table(seen),
            "",
            "Printed by `benchmarks/serve_hour.py`.",
        ]
    )
    print(f"\n{text}")
    if options.out is not None:
        options.out.write_text(text + "\n", encoding="utf-8")
    if seen.exit_code:
        sys.exit(1)


if __name__ == "__main__":
    main()
