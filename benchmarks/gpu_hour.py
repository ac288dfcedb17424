"""Everything that a GPU is wanted for, in one hour that may be cut at any point.

    TRITON_INTERPRET=0 PYTHONPATH=. python benchmarks/gpu_hour.py --limit-s 3000

runs the kernels' tests, the engine's tests on a GPU, the tables of engine_gpu.py and the tokens of
gpu_parity.py, each in processes of its own: one that loses its GPU leaves it to the next. What has
ended is noted in --state, what it printed lies beside; run it again and it goes on behind that.
engine_gpu.py and gpu_parity.py keep their own tables. The exit code is 1 if a stage failed, 2 if
time ran out before the last. Delete --state to begin anew, as after a change of the code.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
TESTS = "tests/engine/triton_backend"
LOST_GPU = 3  # exit code of engine_gpu.py
MOST_STARTS = 4


@dataclass(frozen=True)
class Stage:
    """A command that gets at most `share` (0 to 1) of the whole time.

    resumes  it keeps its own tables and takes --limit-s: cut, or without its GPU, it goes on
    """

    name: str
    command: tuple[str, ...]
    share: float
    resumes: bool = False


def tests(name: str, share: float) -> Stage:
    command = ("-m", "pytest", "-q", "-W", "default", "-p", "no:cacheprovider", f"{TESTS}/{name}.py")
    return Stage(name, command, share)


STAGES = (
    tests("test_kernels", 0.06),
    tests("test_quantized", 0.06),
    tests("test_float8_cache", 0.06),
    tests("test_gpu", 0.25),
    Stage("engine_gpu", ("benchmarks/engine_gpu.py",), 0.45, resumes=True),
    Stage("gpu_parity", ("benchmarks/gpu_parity.py",), 0.3, resumes=True),
)


def run(stages: Sequence[Stage], state: Path, limit_s: float) -> dict[str, int]:
    """Run what has not ended yet; returns the exit codes so far, by stage."""
    state.mkdir(parents=True, exist_ok=True)
    note, start_s = state / "stages.json", time.monotonic()
    ended: dict[str, int] = json.loads(note.read_text("utf-8")) if note.is_file() else {}
    for stage in stages:
        starts = 0
        while stage.name not in ended and starts < MOST_STARTS:
            left_s = limit_s - (time.monotonic() - start_s)
            if left_s < 20:
                return ended
            starts += 1
            code = run_one(stage, state, min(left_s, stage.share * limit_s))
            if code is None and (stage.resumes or left_s < stage.share * limit_s):
                break  # it goes on in the next hour
            if code == LOST_GPU and stage.resumes:
                continue
            ended[stage.name] = 124 if code is None else code
            unfinished = note.with_suffix(".unfinished")
            unfinished.write_text(json.dumps(ended), encoding="utf-8")
            unfinished.replace(note)
    return ended


def run_one(stage: Stage, state: Path, limit_s: float) -> int | None:
    """The exit code; None if its time ran out."""
    command = [sys.executable, *stage.command]
    if stage.resumes:  # the last table takes longer than its beginning
        command += ["--limit-s", f"{0.8 * limit_s:.0f}", "--state", str(state / f"{stage.name}.json")]
    print(f"{stage.name}: at most {limit_s:.0f} s", flush=True)
    log = state / f"{stage.name}.txt"
    with log.open("a", encoding="utf-8") as file:
        started_s = time.monotonic()
        try:
            done = subprocess.run(
                command, stdout=file, stderr=subprocess.STDOUT, timeout=limit_s, check=False, cwd=ROOT
            )
        except subprocess.TimeoutExpired:
            print(f"{stage.name}: cut after {limit_s:.0f} s, see {log}", flush=True)
            return None
    took_s = time.monotonic() - started_s
    last = (log.read_text("utf-8").strip().splitlines() or [""])[-1]
    print(f"{stage.name}: exit code {done.returncode} after {took_s:.0f} s: {last}", flush=True)
    return done.returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--limit-s", type=float, default=3000.0)
    parser.add_argument("--state", type=Path, default=ROOT / "build" / "gpu_hour")
    asked = parser.parse_args()
    ended = run(STAGES, asked.state, asked.limit_s)
    failed = [stage.name for stage in STAGES if ended.get(stage.name, 0)]
    missing = [stage.name for stage in STAGES if stage.name not in ended]
    print(f"failed: {', '.join(failed) or 'none'}; not ended: {', '.join(missing) or 'none'}")
    return 2 if missing else int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
