"""Thousands of random requests against `lmi-bench serve` with a tiny KV cache: what is left over?

The requests (support/random_calls.py) are of every protocol that the server speaks, streamed and
not, a third of them wrong, one in eight given up by its client, some cut off in the middle of
their bytes. The cache holds a handful of them, so the engine preempts and refuses all the time.

Afterwards every request must have been answered, refused or given up; no block may be held; the
engine's own audit of its books (which `serve` makes when it ends) must pass; and the server's
resident memory must not have grown since the first tenth, by which buffers have their size.
oneDNN keeps a kernel for every number of rows that a step has had, some 2 MiB each, up to 1,024
of them: growth, but no leak. Steps of at most 16 prompt tokens keep them few, so a leak would show.

    python benchmarks/soak.py --out benchmarks/results/soak.md
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.support.random_calls import ANSWERED_OR_REFUSED, Call, Lengths, is_answered, is_overloaded, random_call  # noqa: E402
from benchmarks.support.served import Server, cut_short, until_idle  # noqa: E402

CLIENTS = 32
LIMIT_S = 120.0  # no answer for so long is a hang
LENGTHS = Lengths(words=(1, 3, 3, 8, 20, 40, 2000), tokens=(1, 2, 3, 5, 8, 12, 30))
CACHE = ("--num-blocks", "12", "--block-size", "16", "--max-model-len", "120")
LIMITS = ("--max-concurrent-requests", "30", "--prefill-tokens", "16")
TORCH = ("--model", "demo-15m", "--dtype", "float32", "--threads", "1")
ROWS: dict[str, tuple[str, ...]] = {
    "bundled engine": (*TORCH, *CACHE, *LIMITS),
    "bundled engine, prefix caching, chunked prefill, look-up drafts": (
        *(*TORCH, *CACHE, *LIMITS, "--prefix-caching", "--chunked-prefill", "--draft", "ngram"),
    ),
    "bundled engine, contiguous, dynamic batches": (
        *(*TORCH, *CACHE, *LIMITS, "--kv-layout", "contiguous", "--policy", "dynamic"),
        *("--batch-size", "4", "--max-batch-delay-ms", "2"),
    ),
}


@dataclass
class Outcome:
    """What a row gave. Memory in bytes, of the server's process."""

    counts: Counter[str] = field(default_factory=Counter)
    memory_bytes: list[tuple[int, int]] = field(default_factory=list)  # (requests so far, bytes)
    seconds: float = 0.0
    closing: str = ""
    exit_code: int | None = None


async def send(client: aiohttp.ClientSession, call: Call, counts: Counter[str]) -> str:
    """What became of a call; one that is refused for want of room is sent again."""
    while True:
        async with client.post(call.path, data=call.body) as response:
            body = await response.read()
        if response.status not in ANSWERED_OR_REFUSED:
            raise SystemExit(f"{call.path} {call.body[:300]!r}: {response.status} {body[:300]!r}")
        if not is_overloaded(response.status, body):
            return "answered" if is_answered(response.status, body) else "refused"
        counts["of these first refused for want of room"] += 1
        await asyncio.sleep(0.1)


async def drive(server: Server, num_requests: int, seed: int, outcome: Outcome) -> None:
    """Send all requests, `CLIENTS` at a time."""
    draw = random.Random(seed)
    work = iter([random_call(draw, LENGTHS, model=server.model) for _ in range(num_requests)])
    every = max(1, num_requests // 10)
    counts = outcome.counts

    async def client(session: aiohttp.ClientSession, calls: Iterator[Call]) -> None:
        for call in calls:
            if call.cut:
                await cut_short(server.url, call)
                counts["cut short by the client"] += 1
            else:
                try:
                    async with asyncio.timeout(call.patience_s or LIMIT_S):
                        counts[await send(session, call, counts)] += 1
                except TimeoutError:
                    if call.patience_s is None:
                        raise SystemExit(f"no answer: {call.path} {call.body[:300]!r}") from None
                    counts["given up by the client"] += 1
            done = ended(counts)
            if done % every == 0:
                outcome.memory_bytes.append((done, server.memory_bytes()))
                memory_mib = outcome.memory_bytes[-1][1] / 2**20
                print(f"  {done:,} of {num_requests:,}, {memory_mib:.1f} MiB", file=sys.stderr)

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(server.url, connector=connector) as session:
        start_s = time.perf_counter()
        await asyncio.gather(*(client(session, work) for _ in range(CLIENTS)))
        outcome.seconds = time.perf_counter() - start_s
    await until_idle(server.url)


def ended(counts: Counter[str]) -> int:
    """Requests that came to their end in one way or another."""
    return counts.total() - counts["of these first refused for want of room"]


def soak(flags: Sequence[str], num_requests: int, seed: int) -> Outcome:
    """One row."""
    server = Server(flags)
    outcome = Outcome()
    try:
        asyncio.run(drive(server, num_requests, seed, outcome))
    finally:
        outcome.exit_code, outcome.closing = server.stop()
    return outcome


def table(outcomes: dict[str, Outcome]) -> str:
    """Markdown: a column a row of `ROWS`."""
    names = list(outcomes)
    lines = ["| | " + " | ".join(names) + " |", "|---|" + "---:|" * len(names)]
    counts = ("answered", "refused", "given up by the client", "cut short by the client")
    for key in (*counts, "of these first refused for want of room"):
        cells = [f"{outcomes[name].counts[key]:,}" for name in names]
        lines.append(f"| {key} | " + " | ".join(cells) + " |")

    def row(title: str, cells: Sequence[str]) -> None:
        lines.append(f"| {title} | " + " | ".join(cells) + " |")

    each = list(outcomes.values())
    row("requests", [f"{ended(o.counts):,}" for o in each])
    row("seconds", [f"{o.seconds:.0f}" for o in each])
    row("resident memory at a tenth, MiB", [f"{o.memory_bytes[0][1] / 2**20:.1f}" for o in each])
    row("resident memory at the end, MiB", [f"{o.memory_bytes[-1][1] / 2**20:.1f}" for o in each])
    growth = [o.memory_bytes[-1][1] - o.memory_bytes[0][1] for o in each]
    row("growth, MiB", [f"{bytes_ / 2**20:+.1f}" for bytes_ in growth])
    row("exit code, audit of the books included", [str(o.exit_code) for o in each])
    row("the server's last line", [o.closing for o in each])
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--row", action="append", choices=list(ROWS), help="Only this one.")
    parser.add_argument("--out", type=Path, default=None, help="Markdown file.")
    args = parser.parse_args()
    outcomes = {}
    for name in args.row or ROWS:
        print(name, file=sys.stderr)
        outcomes[name] = soak(ROWS[name], args.requests, args.seed)
    text = (
        f"# Soak: {args.requests:,} random requests a column, 12 KV blocks of 16 tokens\n\n"
        f"{CLIENTS} clients at once, seed {args.seed}; {platform.machine()}, {os.cpu_count()} "
        f"cores, Python {platform.python_version()}.\n\n{table(outcomes)}\n"
    )
    print(text)
    if args.out is not None:
        args.out.write_text(text, encoding="utf-8")
    if any(o.exit_code or ended(o.counts) != args.requests for o in outcomes.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
