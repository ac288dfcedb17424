"""A day of `serve`'s engine in virtual time: honest streams beside a hostile client.

    python benchmarks/serve_day.py --out benchmarks/results/serve_day.md

The simulated engine (qwen3-8b on ml.g5.2xlarge, as `serve --executor simulated` opens it) gets
honest requests at random times, 24 hours long by its own clock. The hostile client sends bursts:
more requests than the engine admits, answers as long as the cache allows, prompts that can never
fit, and streams that it leaves in their middle. Honest latencies are compared with those of the
same requests alone; resident memory after a tenth of the day with that at its end. HTTP is not a
part of it (`benchmarks/soak.py` and `make fuzz` are).
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
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from lmi_bench.core.clock import run_virtual
from lmi_bench.core.errors import CapacityError, OverloadedError
from lmi_bench.core.scenario import parse_scenario
from lmi_bench.engine.scheduling.sampling import SamplingParams
from lmi_bench.targets.simulated import open_simulated_engine

HOUR_S = 3600.0
HONEST_PER_S, HONEST_IN, HONEST_OUT = 0.1, 64, 32
BURST_EVERY_S, BURST = 60.0, 100  # of the hostile client
LIMIT, SLOTS = 64, 32  # max_concurrent_requests, max_rolling_batch_size
SHARE, CHUNK = 0.25, 128  # of slots and queue, of one client; prompt tokens of a step
LONGEST = 2048
PROMPT = list(range(LONGEST))


@dataclass
class Day:
    """What was seen; seconds of each honest request."""

    ttft_s: list[float] = field(default_factory=list)
    e2e_s: list[float] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    memory_mib: list[float] = field(default_factory=list)
    used_blocks: int = 0


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


async def honest(engine, day: Day, hours: float, *, fair: bool) -> None:
    """Requests at random times; a refusal is tried again after a second, as clients do."""
    draw, loop = random.Random(1), asyncio.get_running_loop()
    tasks = set()

    async def one() -> None:
        begin_s = loop.time()
        while True:
            try:
                generation = engine.submit(
                    PROMPT[:HONEST_IN],
                    SamplingParams(max_new_tokens=HONEST_OUT, ignore_eos=True),
                    client="honest" if fair else None,
                )
                break
            except OverloadedError:
                day.counts["honest, refused and tried again"] += 1
                await asyncio.sleep(1.0)
        await generation.wait()
        day.ttft_s.append(generation.first_token_s - begin_s)
        day.e2e_s.append(loop.time() - begin_s)
        day.counts["honest, answered"] += 1

    at_s = 0.0
    while (at_s := at_s + draw.expovariate(HONEST_PER_S)) < hours * HOUR_S:
        await asyncio.sleep(at_s - loop.time())
        task = asyncio.create_task(one())
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    await asyncio.gather(*tasks)


async def hostile(engine, day: Day, hours: float, *, fair: bool) -> None:
    """A burst every minute."""
    draw, loop = random.Random(2), asyncio.get_running_loop()
    tasks: set[asyncio.Task[None]] = set()

    async def leave(generation, after: int) -> None:
        async for _ in generation:
            if len(generation.events) >= after:
                generation.stop("cancelled")
                day.counts["hostile, left in mid-stream"] += 1
                return
        day.counts["hostile, answered"] += 1

    while loop.time() < hours * HOUR_S:
        for number in range(BURST):
            tokens = LONGEST if number % 10 == 0 else draw.randint(1, 200)
            try:
                generation = engine.submit(
                    PROMPT[: draw.randint(1, 400)],
                    SamplingParams(max_new_tokens=tokens, ignore_eos=True),
                    client="hostile" if fair else None,
                )
            except CapacityError:
                day.counts["hostile, cannot fit"] += 1
                continue
            except OverloadedError:
                day.counts["hostile, refused"] += 1
                continue
            after = draw.randint(1, 20) if number % 2 else LONGEST
            task = asyncio.create_task(leave(generation, after))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        await asyncio.sleep(BURST_EVERY_S)
    await asyncio.gather(*tasks)


def run_day(hours: float, *, with_hostile: bool, fair: bool, share: float = 1.0) -> Day:
    day = Day()
    stated = {"max_concurrent_requests": LIMIT, "max_rolling_batch_size": SLOTS}
    if share < 1:
        stated |= {"chunked_prefill": True, "max_rolling_batch_prefill_tokens": CHUNK}
    settings = parse_scenario({"engine": stated}).engine
    parts = open_simulated_engine("qwen3-8b", "ml.g5.2xlarge", settings, max_total_tokens=LONGEST)
    parts = replace(parts, config=replace(parts.config, client_share=share))

    async def watch() -> None:
        for _ in range(10):
            await asyncio.sleep(hours * HOUR_S / 10)
            day.memory_mib.append(resident_mib())

    async def main() -> None:
        async with parts.engine() as engine:
            work = [honest(engine, day, hours, fair=fair), watch()]
            if with_hostile:
                work.append(hostile(engine, day, hours, fair=fair))
            await asyncio.gather(*work)
            engine.audit()
            day.used_blocks = engine.stats().used_blocks

    run_virtual(main())
    return day


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--hours", type=float, default=24.0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows: dict[str, Day] = {}
    for name, with_hostile, fair, share in (
        ("honest alone", False, False, 1.0),
        ("hostile beside", True, False, 1.0),
        ("hostile beside, clients in turn", True, True, 1.0),
        (f"in turn, at most {SHARE:.0%} each, chunks of {CHUNK} tokens", True, True, SHARE),
    ):
        begin_s = time.perf_counter()
        rows[name] = run_day(options.hours, with_hostile=with_hostile, fair=fair, share=share)
        print(f"{name}: {time.perf_counter() - begin_s:.0f} s", file=sys.stderr, flush=True)
    lines = ["| | " + " | ".join(rows) + " |", "|---|" + "---:|" * len(rows)]

    def add(title: str, values) -> None:
        lines.append(f"| {title} | " + " | ".join(values) + " |")

    for title, name in (("TTFT", "ttft_s"), ("E2E", "e2e_s")):
        for q in (50, 99):
            found = [np.percentile(getattr(day, name), q) for day in rows.values()]
            add(f"honest {title} p{q}, s", [f"{s:.2f} ({s / found[0]:.1f} x)" for s in found])
    for kind in sorted({kind for day in rows.values() for kind in day.counts}):
        add(kind, [f"{day.counts[kind]:,}" for day in rows.values()])
    add("resident MiB at a tenth", [f"{day.memory_mib[0]:.1f}" for day in rows.values()])
    add("resident MiB at the end", [f"{day.memory_mib[-1]:.1f}" for day in rows.values()])
    add("KV blocks held at the end", [str(day.used_blocks) for day in rows.values()])
    text = (
        f"# {options.hours:g} hours of the engine in virtual time, with a hostile client\n\n"
        f"{(__doc__ or '').partition(chr(10) * 2)[2].partition(chr(10) * 2)[2].strip()}\n\n"
        f"{datetime.now(UTC):%Y-%m-%d}; {platform.machine()}, Python {platform.python_version()}. "
        f"{HONEST_PER_S:g} honest requests a second of {HONEST_IN} tokens in and {HONEST_OUT} out; "
        f"{BURST} hostile ones at once every {BURST_EVERY_S:g} s. At most {LIMIT} requests in the "
        f"engine, {SLOTS} at once.\n\n" + "\n".join(lines) + "\n\nPrinted by "
        "`benchmarks/serve_day.py`.\n"
    )
    print(text)
    if options.out is not None:
        options.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
