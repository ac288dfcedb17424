"""Kills commands at random moments: is a file half written, or a finished level lost?

Each command is run once undisturbed, which gives its duration, then again and again until a signal
drawn from SIGKILL, SIGTERM and SIGINT ends it at a moment drawn from that duration. After each kill

    - every file at its own path is whole: JSON that parses, HTML to its last tag, lines of JSON up
      to a torn last one; a file that was there before is the old one or a whole new one;
    - every run folder can be read;
    - a sweep, a search and a matrix continue with --resume: the finished levels and their requests
      are kept byte for byte, and at the end each level of the undisturbed run is there once, with
      all its requests;
    - SIGTERM and SIGINT leave no traceback and no unfinished file beside the others.

    python benchmarks/kills.py --kills 200 --out benchmarks/results/kills.md
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from lmi_bench.core.run_store import load_run  # noqa: E402

LIMIT_S = 300.0
CODES = {
    signal.SIGKILL: (-signal.SIGKILL,),
    signal.SIGTERM: (-signal.SIGTERM, 128 + signal.SIGTERM, -signal.SIGINT, 130),
    signal.SIGINT: (-signal.SIGINT, 130),
}
"""Exit codes of a command that a signal ended: Python may end by the signal itself, and a sweep
turns SIGTERM into SIGINT."""
A10G, MODEL = "sim:ml.g5.2xlarge", ("--model", "qwen3-8b")
LENGTHS = ("--isl", "64", "--osl", "16")
MATRIX = f"""
targets:
  - {{name: a, target: "{A10G}", model: qwen3-8b}}
  - {{name: b, target: "sim:ml.g6.2xlarge", model: qwen3-8b}}
payloads:
  - {{name: short, workload: {{input_tokens: 16, output_tokens: 4}}}}
  - {{name: long, workload: {{input_tokens: 64, output_tokens: 8}}}}
defaults: {{load: {{concurrency: [1, 2, 4], requests_per_user: 3}}}}
"""
RECIPE = """
model: demo-15m
evaluate: {input_tokens: 8, output_tokens: 8, concurrency: [1]}
variants:
  - {name: int8, engine: {quantize: int8}, save: true}
"""


@dataclass(frozen=True, slots=True)
class Job:
    """A command of a folder. share: of all kills; resumes: it continues with --resume."""

    name: str
    args: tuple[str, ...]
    share: float
    resumes: bool = False


SWEEP = ("sweep", A10G, *MODEL, *LENGTHS, "--out", "run")
JOBS = (
    Job("sweep", (*SWEEP, "--concurrency", "1,2,4,8,16"), 0.2, resumes=True),
    Job("search", (*SWEEP, "--search", "concurrency", "--slo", "ttft_p90<=300ms"), 0.2, True),
    Job("matrix", ("sweep", "--matrix", "../matrix.yaml", "--out", "run"), 0.2, resumes=True),
    Job("calibrate", ("calibrate", "../base/run", "-o", "profile.json"), 0.1),
    Job("report", ("report", "../base/run", "-o", "r.html", "--markdown", "r.md"), 0.1),
    Job(
        "recommend",
        (
            *("recommend", *MODEL, "--input-tokens", "64", "--output-tokens", "16"),
            *("--rate", "2", "--slo", "ttft_p90<=1s", "--instance", "ml.g5.2xlarge"),
            *("--json", "rec.json"),
        ),
        0.08,
    ),
    Job(
        "verify",
        (
            *("verify", "../base/rec.json", "--target", A10G, "--requests", "100"),
            *("--out", "run", "--json", "verified.json"),
        ),
        0.08,
    ),
    Job("optimize", ("optimize", "../recipe.yaml", "--out", "job"), 0.04),
)


class DamageError(Exception):
    """What a kill must not leave behind."""


def prepare(folder: Path) -> None:
    """What the commands read: a run, a recommendation, a matrix and a recipe."""
    (folder / "matrix.yaml").write_text(MATRIX)
    (folder / "recipe.yaml").write_text(RECIPE)
    base = folder / "base"
    base.mkdir()
    finish(start(JOBS[0].args, base))
    finish(start(next(job.args for job in JOBS if job.name == "recommend"), base))


def start(args: Sequence[str], folder: Path) -> subprocess.Popen[str]:
    """Begin a command in a folder."""
    return subprocess.Popen(
        [sys.executable, "-m", "lmi_bench", *args],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "NO_COLOR": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def finish(process: subprocess.Popen[str]) -> None:
    """Wait for a command that nothing disturbs."""
    _, said = process.communicate(timeout=LIMIT_S)
    if process.returncode != 0:
        raise DamageError(f"exit {process.returncode}: {said[-500:]}")


def lines_of(path: Path) -> list[str]:
    """The whole lines of a file; a torn last one is none."""
    return path.read_text().split("\n")[:-1] if path.exists() else []


def check_whole(folder: Path, before: dict[Path, bytes]) -> int:
    """Raise DamageError for a half file; the number of unfinished ones under names of their own."""
    unfinished = 0
    for path in sorted(folder.rglob("*")):
        if not path.is_file() or before.get(path) == path.read_bytes():
            continue
        try:
            if path.suffix == ".new":
                unfinished += 1
            elif path.suffix == ".json":
                json.loads(path.read_text())
            elif path.suffix == ".jsonl":
                [json.loads(line) for line in lines_of(path)]
            elif path.suffix == ".html" and not path.read_text().rstrip().endswith("</html>"):
                raise ValueError("it does not end")
        except ValueError as exc:
            raise DamageError(f"{path.relative_to(folder)} is half a file: {exc}") from exc
    for path in before:
        if not path.exists():
            raise DamageError(f"{path.relative_to(folder)} is gone")
    for manifest in folder.rglob("manifest.json"):
        load_run(manifest.parent)
    return unfinished


def requests_of(run: Path, levels: Sequence[str]) -> list[str]:
    """The lines of a run's requests that belong to the levels of these lines."""

    def level_of(line: str) -> tuple[int, int]:
        found = json.loads(line)
        return found["level"], found["attempt"]

    of = {level_of(line) for line in levels}
    return [line for line in lines_of(run / "requests.jsonl") if level_of(line) in of]


def levels_of(folder: Path) -> dict[str, Counter[tuple[int, str, int]]]:
    """(level, load, requests) of each run below a folder, by its path."""
    found = {}
    for manifest in sorted(folder.rglob("manifest.json")):
        levels = [json.loads(line) for line in lines_of(manifest.with_name("levels.jsonl"))]
        requests = [json.loads(line) for line in lines_of(manifest.with_name("requests.jsonl"))]
        per = Counter((each["level"], each["attempt"]) for each in requests)
        found[str(manifest.parent.relative_to(folder))] = Counter(
            (each["level"], f"{each['concurrency']} {each['rate_per_s']}", per[each["level"], each["attempt"]])
            for each in levels
        )
    return found


@dataclass(frozen=True, slots=True)
class Undisturbed:
    """A job's run without a kill: its duration and levels."""

    seconds: float
    levels: dict[str, Counter[tuple[int, str, int]]]


def undisturbed(job: Job, folder: Path) -> Undisturbed:
    folder.mkdir()
    begin_s = time.perf_counter()
    finish(start(job.args, folder))
    found = Undisturbed(time.perf_counter() - begin_s, levels_of(folder))
    check_whole(folder, {})
    return found


def kill_once(job: Job, whole: Undisturbed, folder: Path, draw: random.Random) -> Counter[str]:
    """One kill, what it left, and the run continued to its end; counts for the table.

    Raises DamageError.
    """
    counts: Counter[str] = Counter(kills=1)
    folder.mkdir()
    before = {}
    if not job.resumes and draw.random() < 0.5:  # there is something to lose
        for name in ("profile.json", "r.html", "r.md", "rec.json", "verified.json"):
            if name in job.args:
                before[folder / name] = b"the old file\n"
                (folder / name).write_bytes(before[folder / name])
    by = draw.choice(sorted(CODES))
    process = start(job.args, folder)
    try:
        _, said = process.communicate(timeout=draw.uniform(0.02, 1.02) * whole.seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(by)
        sent_s = time.perf_counter()
        _, said = process.communicate(timeout=LIMIT_S)
        ended = process.returncode == 0  # the signal came when all was done
        if ended and time.perf_counter() - sent_s > max(5.0, 0.2 * whole.seconds):
            raise DamageError(f"{by.name} was not heeded: it went on to its end") from None
        counts["in time"] += not ended
        counts[by.name] += not ended
        if not ended and process.returncode not in CODES[by]:
            raise DamageError(f"{by.name}: exit {process.returncode}: {said[-500:]}") from None
    if "Traceback" in said and by != signal.SIGKILL:
        raise DamageError(f"{by.name}: {said[said.index('Traceback') :][:4000]}")
    unfinished = check_whole(folder, before)
    if unfinished and by != signal.SIGKILL:
        raise DamageError(f"{by.name} left {unfinished} unfinished file(s)")
    counts["unfinished"] += unfinished
    if job.resumes:
        kept = {path: lines_of(path) for path in folder.rglob("levels.jsonl")}
        sent = {path: requests_of(path.parent, lines) for path, lines in kept.items()}
        counts["kept"] += sum(map(len, kept.values()))
        finish(start((*job.args, "--resume"), folder))
        check_whole(folder, {})
        for path, lines in kept.items():
            if lines_of(path)[: len(lines)] != lines:
                raise DamageError(f"{path}: a finished level was changed or lost")
            if requests_of(path.parent, lines) != sent[path]:
                raise DamageError(f"{path.parent}: a finished level's requests are not the same")
        if levels_of(folder) != whole.levels:
            raise DamageError(f"levels {levels_of(folder)} instead of {whole.levels}")
        counts["resumed"] += 1
    return counts


def kill_often(jobs: Sequence[Job], kills: int, seed: int) -> Iterator[tuple[Job, Counter[str]]]:
    """The counts of each job; raises DamageError with the seed of the kill."""
    total = sum(job.share for job in jobs)
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        prepare(root)
        for job in jobs:
            whole = undisturbed(job, root / f"{job.name} whole")
            counts: Counter[str] = Counter()
            for number in range(max(1, round(kills * job.share / total))):
                at = f"{seed}-{job.name}-{number}"
                folder = root / at
                try:
                    counts += kill_once(job, whole, folder, random.Random(at))
                except Exception as exc:
                    raise DamageError(f"kill {at}: {exc}") from exc
                shutil.rmtree(folder)
            yield job, counts


COLUMNS = {
    "kills": "kills",
    "in time": "while it ran",
    "SIGKILL": "SIGKILL",
    "SIGTERM": "SIGTERM",
    "SIGINT": "SIGINT",
    "kept": "finished levels kept",
    "resumed": "resumed to the end",
    "unfinished": "unfinished files of SIGKILL",
}


def table(rows: Sequence[tuple[str, Counter[str]]]) -> str:
    lines = ["| command | " + " | ".join(COLUMNS.values()) + " |", "|---|" + "---:|" * len(COLUMNS)]
    for name, counts in rows:
        lines.append(f"| {name} | " + " | ".join(f"{counts[key]:,}" for key in COLUMNS) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", action="append", choices=[job.name for job in JOBS])
    parser.add_argument("--out", type=Path, default=None, help="Markdown file.")
    args = parser.parse_args()
    jobs = [job for job in JOBS if args.only is None or job.name in args.only]
    rows = []
    for job, counts in kill_often(jobs, args.kills, args.seed):
        rows.append((job.name, counts))
        print(f"{job.name}: {dict(counts)}", file=sys.stderr)
    rows.append(("all", sum((counts for _, counts in rows), Counter())))
    text = (
        f"# Kills: {rows[-1][1]['kills']} signals at random moments\n\n"
        f"Seed {args.seed}; {platform.machine()}, {os.cpu_count()} cores, "
        f"Python {platform.python_version()}. Simulated endpoints; `optimize` has the bundled "
        "engine.\n\n"
        f"{table(rows)}\n\n"
        "No file at its own path was half written, no finished level was changed or lost, no file "
        "that was there\nbefore is gone, and SIGTERM and SIGINT left neither a traceback nor an "
        "unfinished file. After SIGKILL a file\nunder its temporary name may stay (the last "
        "column).\n\nPrinted by `benchmarks/kills.py`.\n"
    )
    print(text)
    if args.out is not None:
        args.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
