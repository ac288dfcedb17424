"""What HTTP costs the engine: the time between a step's end and the next one's start.

The executor sleeps in a thread in place of a model, so that all CPU time is the server's. 256
requests of 40 tokens run at once: waited for in the process, over HTTP whole, and streamed, with
the clients in another process.

    python benchmarks/serving_gap.py --out benchmarks/results/serving_gap.md
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import aiohttp

from lmi_bench.engine.async_engine import AsyncEngine
from lmi_bench.engine.scheduling.batch import StepBatch, StepOutput
from lmi_bench.engine.scheduling.config import SchedulerConfig
from lmi_bench.engine.scheduling.sampling import SamplingParams
from lmi_bench.engine.scheduling.scheduler import Scheduler
from lmi_bench.engine.server.app import build_app, listening
from lmi_bench.engine.server.codec import PlainTokenizer

REQUESTS, TOKENS, STEP_S = 256, 40, 0.03


class SleepingExecutor:
    """A step sleeps in a thread; every token is 7. Keeps the times of whole steps."""

    block_size = 16
    max_in_flight = 1

    def __init__(self):
        self.worker = ThreadPoolExecutor(1)
        self.gaps_s = []
        self.ended_s = None

    async def execute(self, batch: StepBatch) -> list[StepOutput]:
        loop = asyncio.get_running_loop()
        start_s, end_s = await loop.run_in_executor(self.worker, self._sleep)
        whole = len(batch.entries) == REQUESTS
        if whole and self.ended_s is not None:
            self.gaps_s.append(start_s - self.ended_s)
        self.ended_s = end_s if whole else None
        return [StepOutput(entry.seq_id, (7,) if entry.samples else ()) for entry in batch.entries]

    def _sleep(self):
        start_s = time.perf_counter()
        time.sleep(STEP_S)
        return start_s, time.perf_counter()

    async def close(self):
        self.worker.shutdown()


def clients(url, stream):
    """In a process of its own: all requests at once, every answer read to its end."""

    async def one(session):
        body = {"prompt": [1, 2, 3], "max_tokens": TOKENS, "stream": stream}
        async with session.post("/v1/completions", json=body) as response:
            async for _ in response.content.iter_any():
                pass

    async def main():
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(url, connector=connector) as session:
            await asyncio.gather(*(one(session) for _ in range(REQUESTS)))

    asyncio.run(main())


async def measure(way):
    """Median gap in seconds, and CPU seconds of this process for a token."""
    config = SchedulerConfig(
        num_blocks=4096, max_model_len=256, block_size=16, max_rolling_batch_size=REQUESTS
    )
    executor = SleepingExecutor()
    async with AsyncEngine(Scheduler(config), executor) as engine:
        if way == "engine alone":
            cpu_s = time.process_time()
            sampling = SamplingParams(max_new_tokens=TOKENS)
            running = [engine.submit([1, 2, 3], sampling) for _ in range(REQUESTS)]
            for generation in running:
                await generation.wait()
        else:
            app = build_app(engine, PlainTokenizer(), model_name="toy", max_model_len=256)
            async with listening(app, port=0) as where:
                context = multiprocessing.get_context("spawn")
                process = context.Process(target=clients, args=(where.url, way == "streamed"))
                process.start()
                cpu_s = time.process_time()
                await asyncio.to_thread(process.join)
        cpu_s = time.process_time() - cpu_s
    if not executor.gaps_s:
        raise SystemExit("no two full steps in a row")
    return statistics.median(executor.gaps_s), cpu_s / (REQUESTS * TOKENS)


def spread(values, scale, digits):
    """Median, lowest and highest."""
    middle, low, high = (scale * f(values) for f in (statistics.median, min, max))
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, help="Markdown file; the default is to print")
    asked = parser.parse_args()
    found: dict[str, list[tuple[float, float]]] = {}
    for _ in range(asked.rounds):
        for way in ("engine alone", "HTTP, not streamed", "streamed"):
            found.setdefault(way, []).append(asyncio.run(measure(way)))
    lines = [
        "# What HTTP costs the engine",
        "",
        f"{REQUESTS} requests of {TOKENS} tokens at once, steps of {STEP_S * 1e3:.0f} ms that "
        f"take no CPU; medians of {asked.rounds} rounds, and the lowest and the highest.",
        "",
        "| | between full steps, ms | times | CPU us a token |",
        "|---|---:|---:|---:|",
    ]
    alone = [gap for gap, _ in found["engine alone"]]
    for way, rounds in found.items():
        gaps, cpus = zip(*rounds, strict=True)
        ratios = [gap / base for gap, base in zip(gaps, alone, strict=True)]
        cells = [spread(gaps, 1e3, 1), spread(ratios, 1, 2), spread(cpus, 1e6, 0)]
        lines.append(f"| {way} | {' | '.join(cells)} |")
    text = "\n".join(lines) + "\n"
    print(text) if asked.out is None else asked.out.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
