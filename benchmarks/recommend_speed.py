"""Prints how long a recommendation over the whole catalog takes, and what it decides.

python benchmarks/recommend_speed.py [--runs 3]

The command as a user types it, with the import of all modules: medians of wall and CPU seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SLOS = ("--slo", "ttft_p90<=2s", "--slo", "latency_per_token_p90<=80ms")
CASES: tuple[tuple[str, int, int, tuple[str, ...]], ...] = (
    ("qwen3-8b", 1000, 250, ("--rate", "4", *SLOS)),
    ("llama-3.1-70b", 1000, 250, ("--rate", "4", *SLOS)),
    ("gpt-oss-120b", 1000, 500, ("--rate", "10", *SLOS)),
    ("qwen3-235b-a22b", 2000, 500, ("--rate", "4", *SLOS)),
    ("deepseek-r1", 4000, 1000, ("--rate", "4", *SLOS)),
    ("deepseek-r1", 1000, 1000, ("--rate", "5", *SLOS)),
    ("llama-3.1-70b", 1000, 250, ("--users", "200", "--think-time", "10")),
)


def timed(command: list[str]) -> tuple[float, float]:
    """Wall and CPU seconds of a command that must succeed."""
    start_s, before = time.perf_counter(), os.times()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    after, wall_s = os.times(), time.perf_counter() - start_s
    cpu_s = after.children_user + after.children_system
    return wall_s, cpu_s - before.children_user - before.children_system


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    runs = parser.parse_args().runs
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder, "answer.json")
        for model, prompt, answer, load in CASES:
            lengths = ("--input-tokens", str(prompt), "--output-tokens", str(answer))
            command = [sys.executable, "-m", "lmi_bench", "recommend", "--model", model, *lengths]
            times = [timed([*command, *load, "--json", str(found)]) for _ in range(runs)]
            wall_s, cpu_s = map(statistics.median, zip(*times, strict=True))
            best = json.loads(found.read_text())["recommended"]
            named = "nothing" if best is None else f"{best['instances']} x {best['instance']}"
            asked = f"{prompt} / {answer} {' '.join(load[:2])}"
            print(f"{model:16s} {asked:24s} {wall_s:5.1f} s wall, {cpu_s:5.1f} s CPU; {named}")


if __name__ == "__main__":
    main()
