"""Compiled decode steps: what they cost at start, and what they save in a step.

Each row is a process from its start to its first token, and then its milliseconds a token over a
longer answer: eager; compiling at start; the same again, which finds what was compiled; with a
folder of `lmi-bench compile`. All answers must be equal.

    python benchmarks/compiled_steps.py --model demo-110m --shapes 1x512 --out results/compiled.md
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PROMPT = "the quick brown fox jumps over the lazy dog " * 4


TIMED = re.compile(r"([0-9.]+) s: [0-9.,]+ tok/s, first token after ([0-9.]+) ms")


def seconds(command: list[str], environ: dict[str, str]) -> tuple[float, str, str]:
    """Of one process, the text that it printed, and its figures."""
    start_s = time.perf_counter()
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environ)
    return time.perf_counter() - start_s, done.stdout, " ".join(done.stderr.split())


def ms_a_token(figures: str, tokens: int) -> float:
    """Behind the first token, by the process's own clock: its start is longer than an answer."""
    found = TIMED.search(figures)
    assert found is not None, figures
    return (float(found[1]) * 1e3 - float(found[2])) / (tokens - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo-110m")
    parser.add_argument("--shapes", default="1x512")
    parser.add_argument("--tokens", type=int, default=129)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    base = [sys.executable, "-m", "lmi_bench"]
    with tempfile.TemporaryDirectory() as folder:
        caches = {"XDG_CACHE_HOME": f"{folder}/cache", "TORCHINDUCTOR_CACHE_DIR": f"{folder}/torch"}
        environ = {**os.environ, **caches}
        common = ["--model", args.model, "--backend", "torch", "--dtype", args.dtype]
        common += ["--num-blocks", "64"]
        generate = [*base, "generate", *common, "-p", PROMPT, "--ignore-eos"]
        jit = ["--compile", "--compile-shapes", args.shapes]
        seconds([*generate, "--max-new-tokens", "1"], environ)  # makes a demo model
        first, _, _ = seconds([*generate, *jit, "--max-new-tokens", "1"], environ)
        artefact = Path(folder) / "artefact"
        compile_command = [*base, "compile", args.model, *common[2:], "-o", str(artefact)]
        compiling, _, _ = seconds([*compile_command, "--shapes", args.shapes], environ)
        kinds = {"eager": [], "`--compile`, found": jit, "`--artefact`": ["--artefact", str(artefact)]}
        starts: dict[str, list[float]] = {name: [] for name in kinds}
        steps: dict[str, list[float]] = {name: [] for name in kinds}
        texts = set()
        for _ in range(args.repeats):
            for name, options in kinds.items():
                one, _, _ = seconds([*generate, *options, "--max-new-tokens", "1"], environ)
                command = [*generate, *options, "--max-new-tokens", str(args.tokens)]
                _, text, figures = seconds(command, environ)
                starts[name].append(one)
                steps[name].append(ms_a_token(figures, args.tokens))
                texts.add(text)
    lines = [
        f"{args.model}, {args.dtype}, shapes {args.shapes}, {os.cpu_count()} CPUs, "
        f"{platform.machine()}; medians of {args.repeats}.",
        "",
        "| start | s from process start to first token | ms a token |",
        "|---|---:|---:|",
        f"| `--compile`, first time | {first:.1f} | |",
    ]
    for name in kinds:
        start, step = statistics.median(starts[name]), statistics.median(steps[name])
        lines.append(f"| {name} | {start:.1f} | {step:.2f} |")
    lines += [
        "",
        f"`lmi-bench compile`: {compiling:.1f} s. Answers of {args.tokens} tokens: "
        + ("all equal." if len(texts) == 1 else f"{len(texts)} different ones."),
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    if args.out is not None:
        args.out.write_text("# Compiled decode steps\n\n" + text, encoding="utf-8")


if __name__ == "__main__":
    main()
