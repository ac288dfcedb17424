"""The step back ends on cores that others use too: `lmi-bench sweep` of the bundled engine.

Client, event loop and engine share the machine's cores, as they do for whoever runs the command.
Each back end is swept with the machine to itself and with one core burnt by another process of
equal priority. A back end is fit to be the default where it is never slower than the other.

    python benchmarks/shared_cores.py --out benchmarks/results/shared_cores.md
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parent.parent
BACK_ENDS = ("torch", "native")


@contextmanager
def burner(running: bool) -> Iterator[None]:
    """Another process that wants a core all the time."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"]) if running else None
    try:
        yield
    finally:
        if process is not None:
            process.kill()
            process.wait()


def sweep(model: str, back_end: str, users: list[int], tokens: int, limit_s: float) -> list[float]:
    """Output tokens a second of each level; those that the time did not suffice for are missing."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        command = [sys.executable, "-m", "lmi_bench", "sweep", "--target", "engine"]
        command += ["--model", model, "--backend", back_end, "--out", str(out)]
        command += ["--concurrency", ",".join(map(str, users)), "--requests-per-user", "1"]
        command += ["--input-tokens", "32", "--output-tokens", str(tokens)]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        levels = out / "levels.jsonl"
        lines = levels.read_text().splitlines() if levels.is_file() else []
    return [level["output_tokens"] / level["wall_s"] for level in map(json.loads, lines)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["demo-15m", "demo-110m"])
    parser.add_argument("--users", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=32, help="Of each answer.")
    parser.add_argument("--limit-s", type=float, default=60.0, help="Of each sweep.")
    parser.add_argument("--out", type=Path, default=None, help="Markdown file.")
    order = parser.parse_args()
    lines = [
        "# The step back ends on shared cores",
        "",
        f"`lmi-bench sweep --target engine`, output tok/s of one run a cell, 32 tokens in and "
        f"{order.tokens} out, one request a user; {os.cpu_count()} cores, {platform.machine()}, "
        f"Python {platform.python_version()}. Burnt: another process computes all the time on one "
        f"core. A sweep that took longer than {order.limit_s:.0f} s was ended.",
        "",
        "| model | users | torch | native | ratio | torch, burnt | native, burnt | ratio |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for model in order.models:
        speeds: dict[tuple[str, bool], list[float]] = {}
        for burnt in (False, True):
            for back_end in BACK_ENDS:
                with burner(burnt):
                    found = sweep(model, back_end, order.users, order.tokens, order.limit_s)
                speeds[back_end, burnt] = found
                print(model, back_end, "burnt" if burnt else "alone", *map(round, found), flush=True)
        for number, users in enumerate(order.users):
            cells = [model, str(users)]
            for burnt in (False, True):
                pair = [speeds[name, burnt][number : number + 1] for name in BACK_ENDS]
                cells += [f"{speed[0]:.0f}" if speed else "" for speed in pair]
                cells.append(f"{pair[1][0] / pair[0][0]:.1f}" if all(pair) else "")
            lines.append("| " + " | ".join(cells) + " |")
    text = "\n".join(lines) + "\n"
    print(text)
    if order.out is not None:
        order.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
