"""An hour of `lmi-bench serve` in real time: honest streams, and hostile clients beside them.

    python benchmarks/serve_hour.py --out benchmarks/results/serve_hour.md
    python benchmarks/serve_hour.py --executor torch

A real process answers over HTTP, with `--fair-by` and `--client-share` as `docs/endpoints.md`
advises. `--executor simulated`: qwen3-8b on ml.g5.2xlarge, each step of which is a wait as long as
that machine would compute, so a busy machine here matters little; `torch`: the bundled engine,
whose latencies need a quiet machine. Honest requests come at random times through all of the hour.
Phases without and with hostile clients (support/hostile.py) take turns, so that whatever else the
machine does weighs on both. A request counts as undisturbed if it lies in a phase without them,
from 5 s after its begin; all others count as disturbed. Latencies count from the time at which a
request was due, on the monotonic clock, in a process that does nothing else.

Exit code 1: an honest p99 is above 2 x the undisturbed one, an honest request failed, a KV block
is held at the end, resident memory grew by more than 5 % after the first sixth, the server did not
end with 0 at SIGTERM (its audit of its books included), or it gave an answer that none of its
protocols allows. Ctrl-C prints what was seen until then.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import pairwise
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path

import aiohttp
import numpy as np

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.support.hostile import RATES, Hostile  # noqa: E402
from benchmarks.support.served import Server, until_idle  # noqa: E402

HONEST_IN, HONEST_OUT = 64, 32
MOST_RATIO = 2.0  # of the honest p99
# of resident memory, from a sixth of the hour to its end: each kind of phase has been by then, so
# that pools and caches are full; a body of 12 MiB in flight is some percent
MOST_GROWTH_FRAC = 0.05
WARM_FRAC = 1 / 6
SETTLE_S = 5.0  # after a hostile phase, for what it left
LIMIT_S = 120.0  # no answer for so long is a failure
FAIR = (
    *("--fair-by", "X-Client", "--client-share", "0.25", "--chunked-prefill"),
    *("--max-concurrent-requests", "64", "--max-batch", "32"),
)
EXECUTORS: dict[str, tuple[str, ...]] = {
    "simulated": (
        *("--executor", "simulated", "--model", "qwen3-8b", "--instance", "ml.g5.2xlarge"),
        *("--max-model-len", "2048", "--prefill-tokens", "128", *FAIR),
    ),
    "torch": (
        *("--model", "demo-15m", "--dtype", "float32", "--threads", "1"),
        # few blocks: resident memory grows until each block has been used once; a row of a step
        # costs compute on a CPU, so chunks and the share of a client are small
        *("--prefill-tokens", "8", "--num-blocks", "128", *FAIR, "--max-batch", "12"),
    ),
}
ALONE, BESIDE = "undisturbed", "hostile beside"
PHASES = (ALONE, BESIDE)


@dataclass(frozen=True)
class Plan:
    """When what happens; times in seconds of the monotonic clock, the same in all processes."""

    start_s: float
    end_s: float
    cycle_s: float
    alone_s: float  # at the begin of each cycle

    def phases(self) -> Iterator[tuple[str, float, float]]:
        """Kind, begin and end of each."""
        at_s = self.start_s
        while at_s < self.end_s:
            between_s = min(at_s + self.alone_s, self.end_s)
            yield ALONE, at_s, between_s
            if between_s < self.end_s:
                yield BESIDE, between_s, min(at_s + self.cycle_s, self.end_s)
            at_s += self.cycle_s

    def kind(self, begin_s: float, end_s: float) -> str:
        """Of a request, or of a span of time."""
        for kind, phase_s, until_s in self.phases():
            settled_s = phase_s + (SETTLE_S if phase_s > self.start_s else 0.0)
            if kind == ALONE and settled_s <= begin_s and end_s <= until_s:
                return ALONE
        return BESIDE


@dataclass(frozen=True)
class Honest:
    """One honest request. due_s, end_s: monotonic; sent_s and ttft_s count from due_s."""

    due_s: float
    end_s: float
    sent_s: float = 0.0
    ttft_s: float = 0.0
    itl_s: tuple[float, ...] = ()
    refused: int = 0
    failure: str | None = None


@dataclass
class Seen:
    """What an hour showed. Samples are taken once a second."""

    plan: Plan
    honest: list[Honest] = field(default_factory=list)
    hostile: Counter[str] = field(default_factory=Counter)
    unexpected: list[str] = field(default_factory=list)
    held_s: dict[str, float] = field(default_factory=dict)
    memory_mib: list[tuple[float, float]] = field(default_factory=list)  # (monotonic s, MiB)
    cpu_s: dict[str, defaultdict[str, float]] = field(
        default_factory=lambda: {kind: defaultdict(float) for kind in PHASES}
    )
    is_idle: bool = False
    exit_code: int | None = None
    closing: str = ""
    lines_between: int = 0  # that the server said between its start and its end
    tracebacks: int = 0
    interrupted: bool = False
    until_s: float = 0.0

    def of(self, kind: str) -> list[Honest]:
        """The honest requests of a kind of phase that were answered."""
        answered = [one for one in self.honest if one.failure is None]
        return [one for one in answered if self.plan.kind(one.due_s, one.end_s) == kind]

    def resident_mib(self, at_frac: float) -> float:
        """Median over the minute, or the twentieth, before a share of the plan."""
        whole_s = self.until_s - self.plan.start_s
        until_s = self.plan.start_s + at_frac * whole_s
        window_s = min(60.0, whole_s / 20)
        return float(np.median([m for s, m in self.memory_mib if 0 <= until_s - s <= window_s]))

    def growth_mib(self) -> float:
        return self.resident_mib(1.0) - self.resident_mib(WARM_FRAC)


async def send_honest(session: aiohttp.ClientSession, number: int, due_s: float) -> Honest:
    """One request; a refusal for want of room is tried again after a second, as clients do."""
    draw = random.Random(number)
    body = {
        "prompt": [draw.randint(3, 999) for _ in range(HONEST_IN)],
        "max_tokens": HONEST_OUT,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    refused, sent_s = 0, time.monotonic() - due_s
    try:
        async with asyncio.timeout(LIMIT_S):
            while True:
                times_s, last = [], b""
                async with session.post("/v1/completions", json=body) as response:
                    if response.status in (429, 503):
                        refused += 1
                        await asyncio.sleep(1.0)
                        continue
                    async for line in response.content:
                        now_s = time.monotonic()
                        if line.startswith(b"data: {"):
                            last = line
                            if b'"choices":[{' in line:
                                times_s.append(now_s)
                break
        end_s = time.monotonic()
        tokens = (json.loads(last[6:]).get("usage") or {}).get("completion_tokens") if last else 0
        if response.status != 200 or tokens != HONEST_OUT:
            failure = f"status {response.status}, {tokens} tokens, {last[:200]!r}"
            return Honest(due_s, end_s, sent_s, refused=refused, failure=failure)
        gaps_s = tuple(after - before for before, after in pairwise(times_s))
        return Honest(due_s, end_s, sent_s, times_s[0] - due_s, gaps_s, refused)
    except (aiohttp.ClientError, OSError, TimeoutError) as exc:
        failure = f"{type(exc).__name__}: {exc}"
        return Honest(due_s, time.monotonic(), sent_s, refused=refused, failure=failure)


def honest_process(url: str, plan: Plan, per_s: float, out: Connection) -> None:
    """Honest requests at random times; each is sent to `out` when it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends it
    draw = random.Random(1)

    async def one(session: aiohttp.ClientSession, number: int, due_s: float) -> None:
        out.send((await send_honest(session, number, due_s), time.process_time()))

    async def main() -> None:
        connector = aiohttp.TCPConnector(limit=0)
        headers = {"X-Client": "honest"}
        async with (
            aiohttp.ClientSession(url, connector=connector, headers=headers) as session,
            asyncio.TaskGroup() as group,
        ):
            due_s, number = plan.start_s, 0
            while (due_s := due_s + draw.expovariate(per_s)) < plan.end_s:
                await asyncio.sleep(due_s - time.monotonic())
                group.create_task(one(session, number, due_s))
                number += 1

    asyncio.run(main())


def hostile_process(url: str, model: str, longest: int, plan: Plan, out: Connection) -> None:
    """Hostile clients in their phases; what they saw is sent to `out` once a second."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    clients = Hostile(url, model, longest, random.Random(2))

    def report() -> None:
        out.send((clients.counts, clients.unexpected, clients.held_s, time.process_time()))

    async def reports() -> None:
        while True:
            await asyncio.sleep(1.0)
            report()

    async def main() -> None:
        reporting = asyncio.create_task(reports())
        loop = asyncio.get_running_loop()
        for kind, begin_s, until_s in plan.phases():
            if kind == BESIDE:
                await asyncio.sleep(begin_s - time.monotonic())
                await clients.run(loop.time() + until_s - time.monotonic())
        reporting.cancel()
        report()

    asyncio.run(main())


def machine_cpu_s() -> float:
    """CPU time of all that this machine has done."""
    fields = [int(text) for text in Path("/proc/stat").read_text().split("\n")[0].split()[1:]]
    idle = fields[3] + fields[4]
    return (sum(fields[:8]) - idle) / os.sysconf("SC_CLK_TCK")


def watch(server: Server, plan: Plan, per_s: float, longest: int, seen: Seen) -> None:
    """Run the clients to the plan's end, or to Ctrl-C."""
    spawn = get_context("spawn")
    pipes = {name: spawn.Pipe(duplex=False) for name in ("honest", "hostile")}
    children = [
        spawn.Process(target=honest_process, args=(server.url, plan, per_s, pipes["honest"][1]), daemon=True),
        spawn.Process(
            target=hostile_process, args=(server.url, server.model, longest, plan, pipes["hostile"][1]), daemon=True
        ),
    ]
    for child in children:
        child.start()
    for _, writer in pipes.values():
        writer.close()
    open_ends = {reader: name for name, (reader, _) in pipes.items()}
    used_s: defaultdict[str, float] = defaultdict(float)  # CPU time of each, up to now
    before: tuple[float, dict[str, float]] | None = None
    next_s, minute = plan.start_s, 0
    try:
        while open_ends and server.is_running():
            timeout_s = max(0.0, next_s - time.monotonic())
            for reader in wait(list(open_ends), timeout_s):
                assert isinstance(reader, Connection)
                try:
                    message = reader.recv()
                except EOFError:
                    del open_ends[reader]
                    continue
                used_s[open_ends[reader]] = message[-1]
                if open_ends[reader] == "honest":
                    seen.honest.append(message[0])
                else:
                    seen.hostile, seen.unexpected, seen.held_s, _ = message
            now_s = time.monotonic()
            seen.until_s = min(now_s, plan.end_s)
            if now_s < next_s:
                continue
            next_s = max(next_s + 1.0, now_s)
            if now_s > plan.end_s:
                continue
            seen.memory_mib.append((now_s, server.memory_bytes() / 2**20))
            used_s["server"], used_s["machine"] = server.cpu_s(), machine_cpu_s()
            if before is not None:
                sums = seen.cpu_s[plan.kind(before[0], now_s)]
                sums["wall"] += now_s - before[0]
                for name in used_s:
                    sums[name] += used_s[name] - before[1].get(name, 0.0)
            before = now_s, dict(used_s)
            if now_s >= plan.start_s + 60 * (minute + 1):
                minute += 1
                print(progress(seen, minute), file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        print("interrupted: what was seen so far", file=sys.stderr)
        seen.interrupted = True
    for child in children:
        child.join(0 if open_ends else 10)
        if child.exitcode:
            seen.unexpected.append(f"{child.name} of the clients ended with {child.exitcode}")
        child.terminate()
        child.join()


def progress(seen: Seen, minute: int) -> str:
    failed = sum(one.failure is not None for one in seen.honest)
    return (
        f"  minute {minute}: {len(seen.honest):,} honest ({failed} failed), "
        f"{seen.hostile.total():,} hostile, {seen.memory_mib[-1][1]:.1f} MiB"
    )


def run(executor: str, minutes: float, cycle_s: float, alone_s: float, per_s: float) -> Seen:
    """One executor's hour."""
    server = Server(EXECUTORS[executor])
    start_s = time.monotonic() + 3.0  # the clients' processes start meanwhile
    seen = Seen(Plan(start_s, start_s + 60 * minutes, cycle_s, alone_s))
    try:
        longest = asyncio.run(context_tokens(server.url))
        watch(server, seen.plan, per_s, longest, seen)
        if server.is_running():
            try:
                asyncio.run(until_idle(server.url))
                seen.is_idle = True
            except TimeoutError:
                pass
        seen.lines_between = len(server.said().splitlines()) - server.lines_at_start
    finally:
        seen.exit_code, seen.closing = server.stop(signal.SIGTERM)
    seen.tracebacks = server.said().count("Traceback")
    for one in seen.honest:
        if one.failure is not None:
            print(f"honest request failed: {one.failure}", file=sys.stderr)
    for text in seen.unexpected:
        print(f"unexpected: {text}", file=sys.stderr)
    if seen.tracebacks or seen.exit_code:
        print(server.said(), file=sys.stderr)
    seen.honest = [one for one in seen.honest if one.due_s < seen.until_s]
    return seen


async def context_tokens(url: str) -> int:
    """The longest request and answer that the server says it takes."""
    async with aiohttp.ClientSession(url) as session, session.get("/v1/models") as response:
        return int((await response.json())["data"][0]["max_model_len"])


def percentiles(seen: Seen) -> dict[str, list[float]]:
    """Seconds of each latency, undisturbed and with the hostile clients beside."""
    latencies: dict[str, Callable[[Honest], Sequence[float]]] = {
        "TTFT": lambda one: [one.ttft_s],
        "ITL": lambda one: one.itl_s,
        "E2E": lambda one: [one.end_s - one.due_s],
    }
    found = {}
    for name, of in latencies.items():
        values = [[s for one in seen.of(kind) for s in of(one)] or [np.nan] for kind in PHASES]
        for q in (50, 99):
            found[f"{name} p{q}"] = [float(np.percentile(each, q)) for each in values]
    return found


def failures(seen: Seen) -> list[str]:
    """What the hour should have shown and did not."""
    ratios = {name: beside / alone for name, (alone, beside) in percentiles(seen).items() if name.endswith("p99")}
    failed = sum(one.failure is not None for one in seen.honest)
    checks = [
        *((r <= MOST_RATIO, f"honest {n} is {r:.2f} x the undisturbed") for n, r in ratios.items()),
        (not failed, f"{failed} honest requests failed"),
        (not seen.unexpected, f"{len(seen.unexpected)} unexpected answers to hostile clients"),
        (
            seen.growth_mib() <= MOST_GROWTH_FRAC * seen.resident_mib(WARM_FRAC),
            f"memory grew by {seen.growth_mib():.1f} MiB",
        ),
        (seen.is_idle, "requests or KV blocks were held at the end"),
        (seen.exit_code == 0, f"exit code {seen.exit_code}"),
        (not seen.tracebacks, f"the server logged {seen.tracebacks} tracebacks"),
    ]
    return [text for is_met, text in checks if not is_met]


def table(seen: Seen) -> str:
    """Markdown."""
    lines = [f"| | {ALONE} | {BESIDE} |", "|---|---:|---:|"]

    def add(title: str, *cells: str) -> None:
        lines.append(f"| {title} | {' | '.join(cells)} |")

    for name, (alone, beside) in percentiles(seen).items():
        add(f"honest {name}, ms", f"{1e3 * alone:.1f}", f"{1e3 * beside:.1f} ({beside / alone:.2f} x)")
    each = [seen.of(kind) for kind in PHASES]
    add("honest requests answered", *(f"{len(of):,}" for of in each))
    add("of these first refused for want of room", *(str(sum(o.refused > 0 for o in of)) for of in each))
    lags = [np.percentile([one.sent_s for one in of] or [np.nan], 99) for of in each]
    add("sent after they were due, p99, ms", *(f"{1e3 * lag:.1f}" for lag in lags))
    failed = [one for one in seen.honest if one.failure is not None]
    kinds = [seen.plan.kind(one.due_s, one.end_s) for one in failed]
    add("honest requests failed", *(str(kinds.count(kind)) for kind in PHASES))
    for who in ("server", "honest", "hostile", "machine"):
        title = "all of the machine" if who == "machine" else f"{who} process"
        spent = [60 * s[who] / s["wall"] if s["wall"] else np.nan for s in seen.cpu_s.values()]
        add(f"CPU s a minute, {title}", *(f"{cpu_s:.1f}" for cpu_s in spent))
    sixths = [n / 6 for n in range(1, 7)]
    most = max((mib for _, mib in seen.memory_mib), default=np.nan)
    lines += ["", "| the server | |", "|---|---:|"]
    add("resident MiB at a tenth", f"{seen.resident_mib(0.1):.1f}")
    add("at each sixth", ", ".join(f"{seen.resident_mib(at):.1f}" for at in sixths))
    add("from the first sixth to the end", f"{seen.growth_mib():+.1f}")
    add("resident MiB at most", f"{most:.1f}")
    add("idle, no KV block held, at the end", "yes" if seen.is_idle else "no")
    add("lines logged between start and end", str(seen.lines_between))
    add("exit code at SIGTERM, audit of the books included", str(seen.exit_code))
    add("last line", seen.closing)
    lines += ["", "| hostile clients | |", "|---|---:|"]
    for kind, count in sorted(seen.hostile.items()):
        add(kind, f"{count:,}")
    for kind, held_s in sorted(seen.held_s.items()):
        add(f"{kind}: held open at most, s", f"{held_s:.0f}")
    add("unexpected answers", str(len(seen.unexpected)))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--cycle-minutes", type=float, default=10.0, help="Of both phases.")
    parser.add_argument("--alone-minutes", type=float, default=2.0, help="Without hostile ones.")
    parser.add_argument("--honest-per-s", type=float, default=1.0)
    parser.add_argument("--executor", action="append", choices=list(EXECUTORS))
    parser.add_argument("--out", type=Path, default=None, help="Markdown file.")
    options = parser.parse_args()
    if not 0 < options.alone_minutes < options.cycle_minutes <= options.minutes:
        parser.error("--alone-minutes must be below --cycle-minutes, and those at most --minutes")
    parts, problems = [], []
    for executor in options.executor or ["simulated"]:
        print(executor, file=sys.stderr, flush=True)
        seen = run(
            executor, options.minutes, 60 * options.cycle_minutes, 60 * options.alone_minutes, options.honest_per_s
        )
        found = failures(seen)
        problems += [f"{executor}: {text}" for text in found]
        minutes = (seen.until_s - seen.plan.start_s) / 60
        verdict = "; ".join(found) or "all bars are met"
        parts.append(
            f"## `serve {' '.join(EXECUTORS[executor])}`\n\n{minutes:.0f} minutes: {verdict}.\n\n{table(seen)}\n"
        )
        if seen.interrupted:
            break
    about = (__doc__ or "").split("\n\n")
    text = (
        f"# {options.minutes:g} minutes of `serve` with hostile clients, in real time\n\n"
        f"{about[2].strip()}\n\n"
        f"{datetime.now(UTC):%Y-%m-%d}; {platform.machine()}, {os.cpu_count()} cores, Python "
        f"{platform.python_version()}. {options.honest_per_s:g} honest requests a second of "
        f"{HONEST_IN} tokens in and {HONEST_OUT} out. Of each {options.cycle_minutes:g} minutes "
        f"{options.alone_minutes:g} are undisturbed. Hostile clients: {RATES}.\n\n"
        + "\n".join(parts)
        + "\nPrinted by `benchmarks/serve_hour.py`.\n"
    )
    print(text)
    if options.out is not None:
        options.out.write_text(text, encoding="utf-8")
    for problem in problems:
        print(problem, file=sys.stderr)
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
