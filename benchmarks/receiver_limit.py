"""What a core can take from the truth server on the other core: a reader that only reads, and ours.

    python benchmarks/receiver_limit.py --write benchmarks/results/receiver_limit.md

Three readers take turns at each number of streams: `bare` (C, epoll and one recvmsg with the
kernel's time for each event, nothing kept), `harvest` (the native receiver alone, driven from C)
and `sweep` (a whole level of the program). CPU is in seconds for 100,000 token events, of the
kernel's work for the reader too. `server late` is the p99 by which the server missed its own
schedule: where it grows, the server is at its limit, not the reader. `valid`: how many of the
sweep's levels pass its own check.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import loadgen_accuracy as accuracy

HARVEST = Path(__file__).parents[1] / "lmi_bench" / "loadgen" / "http" / "harvest.c"
TITLES = ("streams", "reader", "events/s", "CPU, s per 100,000", "server late p99, ms", "valid")

Reading = tuple[float, float, float, bool | None]


def build(folder: Path) -> Path:
    reader = folder / "bare_reader"
    define = f'-DHARVEST="{HARVEST}"'
    source = accuracy.SUPPORT / "bare_reader.c"
    subprocess.run(["cc", "-O2", "-w", define, "-o", reader, source], check=True)
    return reader


def read(reader: Path, way: str, streams: int, options: argparse.Namespace, folder: Path) -> Reading:
    """Events a second, CPU seconds for 100,000 of them, the server's lateness in ms, and whether a
    sweep's level is valid."""
    if way == "sweep":
        accuracy.take_cores(accuracy.CLIENT_CORE, realtime=options.realtime)
        row = accuracy.Row(streams, rounds=options.rounds)
        result = accuracy.measure(options.port, row, options.rounds, options, folder)
        return result.events_per_s, result.cpu_level, result.server_late_p99_ms, result.valid
    accuracy.call(options.port, "/truth/reset", "POST")
    words = [reader, options.port, streams, options.rounds, way]
    done = subprocess.run(
        [str(word) for word in words],
        capture_output=True,
        check=True,
        preexec_fn=lambda: accuracy.take_cores(accuracy.CLIENT_CORE, realtime=options.realtime),
    )
    truth = accuracy.call(options.port, "/truth/stats", "GET")
    cpu_s = json.loads(done.stdout)["cpu_s"] / truth["tokens"] * 1e5
    return truth["tokens_per_s"], cpu_s, truth["lateness"]["p99_ms"], None


def spread(values: Sequence[float], pattern: str) -> str:
    """Median, lowest and highest."""
    middle, low, high = (pattern.format(f(values)) for f in (statistics.median, min, max))
    return f"{middle} ({low} to {high})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", default="512,1024,2048,2560,3072")
    parser.add_argument("--rounds", type=int, default=3, help="requests of each stream")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--ttft-ms", type=float, default=200.0)
    parser.add_argument("--itl-ms", type=float, default=20.0)
    parser.add_argument("--realtime", action="store_true", help="as in loadgen_accuracy.py")
    parser.add_argument("--write", type=Path, help="this Markdown file")
    parser.add_argument("--port", type=int, default=18431)
    options = parser.parse_args()
    options.timestamps = None
    lines = ["# What a core can receive", "", *__doc__.split("\n\n", 2)[2].strip().splitlines()]
    lines += [
        "",
        f"{options.tokens} tokens an answer, {options.itl_ms:g} ms apart; median, lowest "
        f"and highest of {options.repeat} runs.",
        "",
    ]
    lines += ["| " + " | ".join(TITLES) + " |", "|---:|---|---:|---:|---:|---:|"]
    with tempfile.TemporaryDirectory() as name, accuracy.unthrottled(options.realtime):
        folder = Path(name)
        reader = build(folder)
        for streams in map(int, options.streams.split(",")):
            found: dict[str, list[Reading]] = {}
            with accuracy.truth_server("c", folder, options.port, options):
                for _ in range(options.repeat):
                    for way in ("bare", "harvest", "sweep"):
                        each = read(reader, way, streams, options, folder)
                        found.setdefault(way, []).append(each)
            for way, runs in found.items():
                events, cpu_s, late_ms, valid = zip(*runs, strict=True)
                cells = [spread(events, "{:,.0f}"), spread(cpu_s, "{:.2f}"), spread(late_ms, "{:.2f}")]
                cells.append(f"{sum(valid)} of {len(valid)}" if way == "sweep" else "")
                lines.append(f"| {streams:,} | {way} | {' | '.join(cells)} |")
                print(lines[-1], flush=True)
    if options.write is not None:
        options.write.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
