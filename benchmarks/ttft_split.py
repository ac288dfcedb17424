"""Puts a known delay between client and server and looks where the split of TTFT shows it.

    python benchmarks/ttft_split.py [--turns 5] [--write FILE]

A relay on this machine holds each direction back by half of the delay, and measures for how long it
really did; a sweep runs with and without it, in turns. The server is `serve` with the trained
model on this machine's CPU.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from lmi_bench.core.run_store import load_run  # noqa: E402

PORT, RELAY_PORT, DELAY_MS = 8471, 8472, 20.0
HELD_MS: tuple[list[float], list[float]] = ([], [])
PARTS = ("client_ms", "network_ms", "queue_ms", "prefill_ms", "other_ms")


async def _pass_on(reader, writer, held_ms):
    """Each read is written half of the delay after it came, however many are under way."""
    loop, last, delay_s = asyncio.get_running_loop(), None, DELAY_MS / 2e3

    def write(data, came_s):
        writer.write(data)
        held_ms.append((loop.time() - came_s) * 1e3)

    while data := await reader.read(65536):
        last = loop.call_later(delay_s, write, data, loop.time())
    if last is not None:
        await asyncio.sleep(2 * delay_s)
    writer.close()


async def _relay():
    async def accept(reader, writer):
        there = await asyncio.open_connection("127.0.0.1", PORT)
        await asyncio.gather(_pass_on(reader, there[1], HELD_MS[0]), _pass_on(there[0], writer, HELD_MS[1]))

    server = await asyncio.start_server(accept, "127.0.0.1", RELAY_PORT)
    await server.serve_forever()


def _split(port: int, load: list[str]) -> list[dict[str, float]]:
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [
            sys.executable,
            "-m",
            "lmi_bench",
            "sweep",
            f"http://127.0.0.1:{port}",
            *load,
            "--input-tokens",
            "64",
            "--output-tokens",
            "16",
            "--requests-per-level",
            "60",
            "--metrics-url",
            f"http://127.0.0.1:{PORT}/metrics",
            "--out",
            str(run),
            "--quiet",
        ]
        subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
        return [level.ttft_split.to_json() for level in load_run(run).levels]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    lines: list[str] = []

    def say(line: str) -> None:
        print(line, flush=True)
        lines.append(line)

    command = [sys.executable, "-m", "lmi_bench", "serve", "--model", "demo-15m", "--port", str(PORT)]
    server = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
    threading.Thread(target=lambda: asyncio.run(_relay()), daemon=True).start()
    try:
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{PORT}/ping", timeout=1)
                break
            except OSError:
                time.sleep(0.2)
        say("# A known delay in the split of TTFT\n")
        say(f"Printed by `python benchmarks/ttft_split.py --turns {options.turns}`. A relay of")
        say(f"{DELAY_MS:g} ms; medians of the turns, ms.\n")
        say("| load | part | without | with | difference |\n|---|---|---:|---:|---:|")
        for load in (["--concurrency", "1,4"], ["--rate", "4"]):
            turns = [(_split(PORT, load), _split(RELAY_PORT, load)) for _ in range(options.turns)]
            for level, name in enumerate(load[1].split(",")):
                for part in PARTS:
                    near, far = (statistics.median(turn[side][level][part] for turn in turns) for side in (0, 1))
                    figures = f"{near:.2f} | {far:.2f} | {far - near:+.2f}"
                    say(f"| {load[0][2:]} {name} | {part} | {figures} |")
        held = sum(map(statistics.fmean, HELD_MS))
        say(f"\nThe relay held both directions for {held:.2f} ms in the mean.")
        if options.write:
            options.write.write_text("\n".join(lines) + "\n", encoding="utf-8")
    finally:
        server.terminate()


if __name__ == "__main__":
    main()
