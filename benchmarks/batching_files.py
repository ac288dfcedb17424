"""The batching post's three serving.properties, served and swept in turns.

    python benchmarks/batching_files.py --out benchmarks/results/batching_files.md

Each file is served by `lmi-bench serve --serving-properties FILE` over HTTP, with a small model in
place of Falcon-40B and one rank in place of eight, and swept at the post's two loads; the files
take turns, since a shared machine drifts. Ratios are of a round's throughputs, with the 95 %
interval of their mean logarithm over rounds (Student's t). A third load, half 20 tokens in and 500
out and half the other way round, has a cache of 24 blocks of 64 tokens: a contiguous cache reserves
each request's whole length of it, a paged one only what is filled.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from scipy.stats import t as student

ROOT = Path(__file__).parents[1]
FILES = ROOT / "tests" / "data" / "deploy"
NAMES = {
    "falcon_dynamic": "dynamic",
    "falcon_continuous": "rolling, contiguous cache",
    "falcon_paged": "rolling, paged cache",
}
TIGHT = ("--max-model-len", "520", "--num-blocks", "24", "--block-size", "64")
# name, settings of the server and of the load, published tok/s of the three files in their order
CASES: tuple[tuple[str, tuple[str, ...], tuple[str, ...], tuple[float, ...] | None], ...] = (
    (
        "32 tokens in, 128 out",
        ("--max-model-len", "520"),
        ("--input-tokens", "32", "--output-tokens", "128"),
        (5.53, 56.04, 59.18),
    ),
    (
        "256 tokens in, 32 out",
        ("--max-model-len", "520"),
        ("--input-tokens", "256", "--output-tokens", "32"),
        (19.96, 46.69, 44.75),
    ),
    ("20 in, 500 out and 500 in, 20 out; a small cache", TIGHT, ("--mix", "20/500,500/20"), None),
)
READY_S = 120


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "lmi_bench", *words]


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@contextlib.contextmanager
def serving(name: str, model: str, cache: tuple[str, ...], folder: Path) -> Iterator[str]:
    """The address of a server of the file, ended on leaving."""
    log = folder / "server.log"
    words = ("serve", "--model", model, "--tp", "1", "--port", "0", *cache)
    with log.open("w") as file:
        server = subprocess.Popen(
            command(*words, "--serving-properties", str(FILES / f"{name}.properties")),
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment(),
            cwd=folder,
        )
    try:
        end_s = time.monotonic() + READY_S
        while not (found := re.search(r"serving .* at (http\S+)", log.read_text())):
            if server.poll() is not None or time.monotonic() > end_s:
                raise RuntimeError(f"{name} did not start:\n{log.read_text()}")
            time.sleep(0.1)
        yield found[1]
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(timeout=30)


def measured(url: str, load: tuple[str, ...], users: int, folder: Path) -> tuple[float, int]:
    """Output tokens a second of one level, and most requests at once in the engine."""
    words = ["sweep", url, "--protocol", "lmi", "--concurrency", str(users), "--out", "run", "-q"]
    words += ["--requests-per-user", "3", *load]
    done = subprocess.run(command(*words), cwd=folder, env=environment(), check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)
    (line,) = (folder / "run" / "levels.jsonl").read_text().splitlines()
    level = json.loads(line)
    assert not level["errors"], level["errors_by_kind"]
    running = level.get("server", {}).get("running", {}).get("max", math.nan)
    return float(level["throughput_tokens_per_s"]), running


def interval(ratios: list[float]) -> str:
    """Geometric mean of the rounds' ratios with its 95 % interval."""
    logs = [math.log(ratio) for ratio in ratios]
    mean = statistics.fmean(logs)
    half = student.ppf(0.975, len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
    low, middle, high = (math.exp(mean + side * half) for side in (-1, 0, 1))
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def table(
    cache: tuple[str, ...], load: tuple[str, ...], published: tuple[float, ...] | None, given: argparse.Namespace
) -> str:
    """Markdown: a row a file, with its ratio to dynamic batching and to the row above."""
    speeds: dict[str, list[float]] = {name: [] for name in NAMES}
    most: dict[str, float] = {}
    for each in range(given.rounds):
        for name in NAMES:
            with tempfile.TemporaryDirectory() as temporary:
                folder = Path(temporary)
                with serving(name, given.model, cache, folder) as url:
                    speed, running = measured(url, load, given.users, folder)
            speeds[name].append(speed)
            most[name] = max(most.get(name, 0), running)
            print(f"{each + 1}/{given.rounds} {name}: {speed:.1f} tok/s", flush=True)
    rows = [
        "| file | tok/s, median | of dynamic | of the row above | most at once | published, of dynamic |",
        "|---|---:|---|---|---:|---:|",
    ]
    names = list(NAMES)
    for place, name in enumerate(names):
        ratios = [
            [own / other for own, other in zip(speeds[name], speeds[names[base]], strict=True)]
            for base in (0, max(0, place - 1))
        ]
        cells = ["1", "1"] if place == 0 else [interval(each) for each in ratios]
        cells.append("–" if published is None else f"{published[place] / published[0]:.2f}")
        rows.append(
            f"| {NAMES[name]} | {statistics.median(speeds[name]):,.0f} | {cells[0]} | {cells[1]} "
            f"| {most[name]:.0f} | {cells[2]} |"
        )
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo-15m")
    parser.add_argument("--users", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=None, help="Markdown file.")
    args = parser.parse_args()
    parts = [
        "# The batching post's three files, in turns",
        f"Printed by `python benchmarks/batching_files.py`: {args.model}, {args.users} users, "
        f"3 requests each, {args.rounds} rounds; {platform.machine()}, {os.cpu_count()} cores, "
        f"Python {platform.python_version()}. The files are "
        "`tests/data/deploy/falcon_*.properties`, as published; `--model` and `--tp 1` stand in "
        "for 40 billion weights on eight GPUs.",
    ]
    for name, cache, load, published in CASES:
        parts.append(f"## {name}")
        parts.append(table(cache, load, published, args))
    text = "\n\n".join(parts) + "\n"
    print(text)
    if args.out is not None:
        args.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
