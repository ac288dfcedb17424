"""What HTTP costs the engine: the time between a step's end and the next one's start.

The executor sleeps in a thread in place of a model, so that all CPU time is the server's. 256
requests run at once, of 40 tokens each and of 160: waited for in the process, over HTTP whole, and
streamed, with the clients in another process. A request itself costs as much as many tokens, so
that the longer answers show what a token costs.

`/ping` is asked again and again while a prompt of 12 MiB comes and is refused: by its length, or
after it was encoded, where the tokenizer sets no bound to what a token stands for.

`--uvloop` measures each server on uvloop's event loop too (`pip install uvloop`).

    python benchmarks/serving_gap.py --out benchmarks/results/serving_gap.md
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import selectors
import socket
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lmi_bench.engine.async_engine import AsyncEngine
from lmi_bench.engine.scheduling.batch import StepBatch, StepOutput
from lmi_bench.engine.scheduling.config import SchedulerConfig
from lmi_bench.engine.scheduling.sampling import SamplingParams
from lmi_bench.engine.scheduling.scheduler import Scheduler
from lmi_bench.engine.server.app import build_app, listening, steps_first
from lmi_bench.engine.server.codec import PlainTokenizer
from lmi_bench.engine.tokenizer import Tokenizer

REQUESTS, STEP_S = 256, 0.03
TOKENS = (40, 160)
CHUNK_BYTES = 230
PROMPT_BYTES = 12 * 2**20
PING = b"GET /ping HTTP/1.1\r\nHost: a\r\n\r\n"
PING_EVERY_S = 0.002


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


def clients(host, port, sent=b""):
    """In a process of its own: all requests at once, every answer read to its end. Sockets alone,
    so that the clients take the machine's other processor for as short as they can."""
    selector = selectors.DefaultSelector()
    for _ in range(REQUESTS):
        connection = socket.create_connection((host, port))
        connection.sendall(sent)
        selector.register(connection, selectors.EVENT_READ)
    while selector.get_map():
        for key, _ in selector.select():
            if not key.fileobj.recv(2**16):
                selector.unregister(key.fileobj)
                key.fileobj.close()


def started(function, *arguments):
    process = multiprocessing.get_context("spawn").Process(target=function, args=arguments)
    process.start()
    return process


def cost_of_sends():
    """CPU seconds of the system's `send` for a chunk, without any server."""
    with socket.create_server(("127.0.0.1", 0), backlog=REQUESTS) as listener:
        process = started(clients, *listener.getsockname())
        connections = [listener.accept()[0] for _ in range(REQUESTS)]
    cpu_s = time.process_time()
    for _ in range(TOKENS[0]):
        time.sleep(STEP_S)
        for connection in connections:
            connection.send(bytes(CHUNK_BYTES))
    cpu_s = time.process_time() - cpu_s
    for connection in connections:
        connection.close()
    process.join()
    return cpu_s / (REQUESTS * TOKENS[0])


def completion(prompt, **fields):
    body = json.dumps({"prompt": prompt, **fields})
    return (
        f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n{body}"
    ).encode()


def pings(host, port, waits):
    """In a process of its own: the longest and the median wait for /ping, in seconds, from when the
    long prompt's first byte is sent until its answer has ended."""

    def send():
        with socket.create_connection((host, port)) as connection:
            connection.sendall(long_prompt)
            answer = b""
            while data := connection.recv(2**16):
                answer += data
        refused.append(answer.startswith(b"HTTP/1.1 400"))

    long_prompt, refused, waits_s = completion("a " * (PROMPT_BYTES // 2)), [], []
    sending = threading.Thread(target=send)
    with socket.create_connection((host, port)) as connection:
        sending.start()
        while sending.is_alive():
            start_s = time.perf_counter()
            connection.sendall(PING)
            if not connection.recv(2**16).startswith(b"HTTP/1.1 200"):
                raise SystemExit("/ping was not answered")
            waits_s.append(time.perf_counter() - start_s)
            time.sleep(PING_EVERY_S)
    if refused != [True]:
        raise SystemExit("the long prompt was not refused")
    waits.send((max(waits_s), statistics.median(waits_s)))


def tokenizers():
    """By name: one whose tokens stand for so many bytes at most, and one of words of any length."""
    from tokenizers import Tokenizer as Fast
    from tokenizers import decoders, models, pre_tokenizers

    in_bytes = Fast(models.BPE({name: i for i, name in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    in_bytes.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    in_bytes.decoder = decoders.ByteLevel()
    words = Fast(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return {"refused by its length": Tokenizer(in_bytes), "encoded, then refused": Tokenizer(words)}


async def measure_pings(codec):
    """See `pings`."""
    config = SchedulerConfig(num_blocks=4096, max_model_len=256, block_size=16, max_rolling_batch_size=REQUESTS)
    async with AsyncEngine(Scheduler(config), SleepingExecutor()) as engine:
        app = build_app(engine, codec, model_name="toy", max_model_len=256)
        async with listening(app, port=0) as where:
            received, waits = multiprocessing.Pipe(duplex=False)
            await asyncio.to_thread(started(pings, where.host, where.port, waits).join)
            return received.recv()


async def measure(way, tokens):
    """Median gap in seconds, and CPU seconds of this process for a token."""
    config = SchedulerConfig(num_blocks=4096, max_model_len=256, block_size=16, max_rolling_batch_size=REQUESTS)
    executor = SleepingExecutor()
    async with AsyncEngine(Scheduler(config), executor) as engine:
        if way == "engine alone":
            cpu_s = time.process_time()
            sampling = SamplingParams(max_new_tokens=tokens)
            running = [engine.submit([1, 2, 3], sampling) for _ in range(REQUESTS)]
            with steps_first():  # as in a server
                for generation in running:
                    await generation.wait()
        else:
            app = build_app(engine, PlainTokenizer(), model_name="toy", max_model_len=256)
            async with listening(app, port=0) as where:
                request = completion([1, 2, 3], max_tokens=tokens, stream=way == "streamed")
                process = started(clients, where.host, where.port, request)
                cpu_s = time.process_time()
                await asyncio.to_thread(process.join)
        cpu_s = time.process_time() - cpu_s
    if not executor.gaps_s:
        raise SystemExit("no two full steps in a row")
    return statistics.median(executor.gaps_s), cpu_s / (REQUESTS * tokens)


def spread(values, scale, digits):
    """Median, lowest and highest."""
    middle, low, high = (scale * f(values) for f in (statistics.median, min, max))
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def table(tokens, ways):
    lines = [
        "",
        f"| {tokens} tokens each | between full steps, ms | times | CPU us a token | times |",
        "|---|---:|---:|---:|---:|",
    ]
    alone, alone_cpu = zip(*ways["engine alone"], strict=True)
    for way, rounds in ways.items():
        gaps, cpus = zip(*rounds, strict=True)
        ratios = [gap / base for gap, base in zip(gaps, alone, strict=True)]
        cpu_ratios = [cpu / base for cpu, base in zip(cpus, alone_cpu, strict=True)]
        cells = [spread(gaps, 1e3, 1), spread(ratios, 1, 2)]
        cells += [spread(cpus, 1e6, 1), spread(cpu_ratios, 1, 1)]
        lines.append(f"| {way} | {' | '.join(cells)} |")
    if on_uvloop := ways.get("streamed, uvloop"):
        ratios = [uv / own for (_, uv), (_, own) in zip(on_uvloop, ways["streamed"], strict=True)]
        lines += ["", f"CPU of a streamed token on uvloop over that on asyncio's loop: {spread(ratios, 1, 2)}."]
    return lines


def loops(with_uvloop):
    """What makes an event loop, by what is put behind the name of a row."""
    if not with_uvloop:
        return {"": asyncio.new_event_loop}
    import uvloop

    return {"": asyncio.new_event_loop, ", uvloop": uvloop.new_event_loop}


def measured(num_rounds, with_uvloop):
    """By row: of each length of answers `measure` of each round, then `pings`, then `cost_of_sends`."""
    found: dict[int, dict[str, list[tuple[float, float]]]] = {tokens: {} for tokens in TOKENS}
    waits: dict[str, list[tuple[float, float]]] = {}
    sends, codecs, in_turn = [], tokenizers(), list(loops(with_uvloop).items())
    for _ in range(num_rounds):
        sends.append(cost_of_sends())
        for behind, loop in in_turn:
            for tokens, ways in found.items():
                for way in ("engine alone", "HTTP, not streamed", "streamed"):
                    with asyncio.Runner(loop_factory=loop) as runner:
                        ways.setdefault(way + behind, []).append(runner.run(measure(way, tokens)))
            for name, codec in codecs.items():
                with asyncio.Runner(loop_factory=loop) as runner:
                    waits.setdefault(name + behind, []).append(runner.run(measure_pings(codec)))
        in_turn.reverse()
    return found, waits, sends


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--uvloop", action="store_true", help="measure each server on uvloop's event loop too")
    parser.add_argument("--out", type=Path, help="Markdown file; the default is to print")
    asked = parser.parse_args()
    found, waits, sends = measured(asked.rounds, asked.uvloop)
    lines = [
        "# What HTTP costs the engine",
        "",
        f"{REQUESTS} requests at once, steps of {STEP_S * 1e3:.0f} ms that take no CPU; medians of "
        f"{asked.rounds} rounds, and the lowest and the highest. Load of the machine's "
        f"{os.cpu_count()} processors at the end: {os.getloadavg()[0]:.1f}.",
    ]
    for tokens, ways in found.items():
        lines += table(tokens, ways)
    lines += [
        "",
        f"The system's `send` alone, of {CHUNK_BYTES} bytes to each of {REQUESTS} sockets a step: "
        f"{spread(sends, 1e6, 1)} us of CPU a token.",
        "",
        f"| `/ping` beside a prompt of {PROMPT_BYTES // 2**20} MiB | longest, ms | median, ms |",
        "|---|---:|---:|",
    ]
    for name, rounds in waits.items():
        cells = [spread(values, 1e3, 1) for values in zip(*rounds, strict=True)]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    text = "\n".join(lines) + "\n"
    print(text) if asked.out is None else asked.out.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
