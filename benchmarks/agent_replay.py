"""Whether recorded agent sessions are played as recorded: order, waits, fan-out, shared blocks.

    python benchmarks/agent_replay.py --out benchmarks/results/agent_replay.md

Sessions of Weka's form are made up (seed 0), served by the bundled server with a simulated engine
in real time, and swept over HTTP. What should have happened is read from the file by the code
below, which shares none with the program: a request's parents, its wait, and which of its blocks a
cache without a limit has seen, in the order in which the requests were sent.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
BLOCK = 64
SERVER = ("serve", "--executor", "simulated", "--instance", "ml.g6e.2xlarge", "--model")
SERVER += ("qwen3-8b", "--prefix-caching", "--block-size", str(BLOCK), "--port", "0")


def made_up(draw: random.Random) -> dict[str, Any]:
    """A session: calls whose context grows by whole blocks, sub-agents side by side."""
    ids, t, requests = iter(range(1, 10**6)), 0.0, []
    context = [next(ids) for _ in range(draw.randint(20, 60))]

    def call(at: float, blocks: list[int]) -> dict[str, Any]:
        tokens = BLOCK * len(blocks) - draw.randrange(BLOCK)
        took = round(draw.uniform(0.3, 1.5), 3)
        return {
            "t": round(at, 3),
            "type": "s",
            "model": "m",
            "in": tokens,
            "api_time": took,
            "out": draw.randint(8, 24),
            "hash_ids": blocks,
        }

    for _ in range(draw.randint(4, 8)):
        requests.append(call(t, list(context)))
        t += requests[-1]["api_time"] + draw.uniform(0.2, 1.5)
        if draw.random() < 0.5:
            ends = [t]
            for number in range(draw.randint(2, 4)):
                own, inner_t, inner = [*context[:8], next(ids)], 0.0, []
                for _ in range(draw.randint(1, 3)):
                    inner.append(call(inner_t, list(own)))
                    inner_t += inner[-1]["api_time"] + draw.uniform(0.1, 0.8)
                    own += [next(ids) for _ in range(draw.randint(1, 6))]
                requests.append(
                    {
                        "t": round(t, 3),
                        "type": "subagent",
                        "agent_id": f"a{number}",
                        "subagent_type": "Explore",
                        "requests": inner,
                    }
                )
                ends.append(t + inner[-1]["t"] + inner[-1]["api_time"])
            t = max(ends) + draw.uniform(0.1, 0.5)
        context += [next(ids) for _ in range(draw.randint(4, 20))]
    return {"id": "x", "block_size": BLOCK, "hash_id_scope": "local", "requests": requests}


def expected(session: dict[str, Any]) -> list[tuple[list[int], float, list[int], int]]:
    """Of each request, in the file's order: its parents, its wait, its blocks, its tokens."""
    found: list[tuple[list[int], float, list[int], int]] = []
    ends: list[float] = []

    def add(entry: dict[str, Any], offset: float, parents: list[int]) -> int:
        start = offset + entry["t"]
        wait = start - max((ends[each] for each in parents), default=start)
        found.append((parents, max(0.0, wait), entry["hash_ids"], entry["in"]))
        ends.append(start + entry["api_time"])
        return len(found) - 1

    parents: list[int] = []
    last: list[int] = []
    for entry in session["requests"]:
        if entry["type"] == "subagent":
            inside = last
            for each in entry["requests"]:
                inside = [add(each, entry["t"], inside)]
            parents = parents + inside
        else:
            last = parents = [add(entry, 0.0, parents)]
    return found


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[str]:
    log = folder / "server.log"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with log.open("w") as file:
        command = [sys.executable, "-m", "lmi_bench", *SERVER]
        server = subprocess.Popen(command, stdout=file, stderr=file, env=environment, cwd=folder)
    try:
        end = time.monotonic() + 60
        while not (found := re.search(r"serving .* at (http\S+)", log.read_text())):
            if server.poll() is not None or time.monotonic() > end:
                raise RuntimeError(log.read_text())
            time.sleep(0.1)
        yield found[1]
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(timeout=30)


def played(folder: Path, url: str, sessions: int, lanes: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The lines of requests.jsonl of a sweep of the folder's sessions, each once, and its level."""
    command = [sys.executable, "-m", "lmi_bench", "sweep", url, "--agent-trace", "trace", "-q"]
    command += ["--concurrency", str(lanes), "--sessions-per-level", str(sessions), "--out", "run"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    lines, levels = ((folder / "run" / f"{name}.jsonl").open() for name in ("requests", "levels"))
    return [json.loads(line) for line in lines], json.loads(next(levels))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sessions", type=int, default=24)
    parser.add_argument("--lanes", type=int, default=6)
    parser.add_argument("--out", type=Path, default=None, help="Markdown file.")
    args = parser.parse_args()
    draw = random.Random(0)
    sessions = [made_up(draw) for _ in range(args.sessions)]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "trace").mkdir()
        for number, session in enumerate(sessions):
            (folder / "trace" / f"{number:03d}.json").write_text(json.dumps(session))
        with serving(folder) as url:
            lines, level = played(folder, url, args.sessions, args.lanes)
    shapes = {tuple(row[3] for row in expected(each)): expected(each) for each in sessions}
    plays: dict[int, dict[int, dict[str, Any]]] = {}
    for line in lines:
        plays.setdefault(line["session"], {})[line["turn"]] = line
    late_ms, spread_ms, wait_error, hits, tokens = [], [], [], 0, 0
    for play in plays.values():
        rows = shapes[tuple(play[turn]["input_tokens"] for turn in sorted(play))]
        for turn, (parents, wait, _, _) in enumerate(rows):
            if not parents:
                continue
            end = max(play[parent]["ended_s"] for parent in parents)
            late_ms.append(1e3 * (play[turn]["sent_s"] - end - wait))
            if wait >= 0.5:
                wait_error.append((play[turn]["sent_s"] - end) / wait - 1)
        fans: dict[tuple[tuple[int, ...], float], list[float]] = {}
        for turn, (parents, wait, _, _) in enumerate(rows):
            fans.setdefault((tuple(parents), round(wait, 3)), []).append(play[turn]["sent_s"])
        spread_ms += [1e3 * (max(each) - min(each)) for each in fans.values() if len(each) > 1]
        seen: set[tuple[int, ...]] = set()
        for turn in sorted(play, key=lambda each: play[each]["sent_s"]):
            _, _, ids, count = rows[turn]
            full = [tuple(ids[: n + 1]) for n in range(count // BLOCK)]
            known = sum(each in seen for each in full)
            hits, tokens = hits + min(known * BLOCK, count - 1), tokens + count
            seen.update(full)
    quantiles = np.quantile(late_ms, (0, 0.5, 0.99, 1))
    lateness = ", ".join(f"{each:.3f}" for each in quantiles)
    fans_ms = f"{np.median(spread_ms):.3f}, {max(spread_ms):.3f} ({len(spread_ms)} fan-outs)"
    waits = f"{np.median(wait_error):.4%}, {max(wait_error):.4%} ({len(wait_error)} waits)"
    facts = {
        "requests that wait for others": f"{len(late_ms)}",
        "sent later than due, ms: least, p50, p99, most": lateness,
        "fan-outs: first to last send, ms: p50, most": fans_ms,
        "waits of 0.5 s and more: relative error, p50, most": waits,
        "prompt tokens in the server's cache": f"{level['server']['prefix_cache_hit_rate']:.2%}",
        "the same by a reader of the file": f"{hits / tokens:.2%}",
        "the level": "valid" if level["valid"] else f"invalid: {level['invalid_reason']}",
    }
    text = (
        "# Agent sessions, played as recorded\n\n"
        f"Printed by `python benchmarks/agent_replay.py`: {args.sessions} sessions of {len(lines)} "
        f"requests in {args.lanes} lanes, over HTTP\nto the bundled server, simulated engine; "
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}.\n\n"
        "| what | found |\n|---|---|\n"
    )
    text += "".join(f"| {what} | {found} |\n" for what, found in facts.items())
    print(text)
    if args.out is not None:
        args.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
