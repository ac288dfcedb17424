"""Whether the ratios of `optimize` repeat: jobs of equal engines, and of two kinds of drafts.

    python benchmarks/optimize_repeats.py equal [--jobs 40] [--busy 0]
    python benchmarks/optimize_repeats.py drafts [--jobs 10]

`equal` sweeps the baseline, a variant with its own settings, and the baseline again. About 5 % of
the 95 % intervals should exclude 1. `drafts` sweeps both kinds of speculation: a repeat holds where
its interval contains the ratio of all other repeats together (mean of the logarithms) and not 1.
Every job is the command that a user types. `--busy N` keeps N loops running beside.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
SHORT: dict[str, Any] = {"input_tokens": 64, "text_tokens": 512, "agreement_prompts": 4}
EQUAL = {
    "evaluate": SHORT | {"concurrency": [4], "output_tokens": 32, "requests_per_user": 8},
    "variants": [{"name": "same", "engine": {}}],
}
DRAFTS = {
    "evaluate": SHORT | {"concurrency": [1], "output_tokens": 64, "requests_per_user": 12, "rounds": 5},
    "variants": [
        {"name": "draft", "engine": {"draft": "demo-text-draft"}},
        {"name": "ngram", "engine": {"draft": "ngram"}},
    ],
}


def job(recipe: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The variants of a job's optimize.json, by name."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "recipe.yaml").write_text(yaml.safe_dump(recipe))
        command = [sys.executable, "-m", "lmi_bench", "optimize", "recipe.yaml", "--out", "job"]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True)
        found = json.loads((Path(folder) / "job" / "optimize.json").read_text())
    return {each["name"]: each for each in found["variants"]}


def ratio(variant: dict[str, Any]) -> list[float] | None:
    """[ratio, low, high] of a variant's only level; None where a level was invalid."""
    found = next(iter(variant["throughput_ratios"].values()), None)
    return found if found and None not in found else None


def equal(jobs: int) -> None:
    print("| job | the same settings | the baseline again | intervals without 1 |")
    print("|---:|---|---|---:|")
    wrong = counted = wrong_jobs = 0
    for number in range(1, jobs + 1):
        variants = job(EQUAL)
        shown, missed = [], 0
        for name in ("same", "baseline-again"):
            found = ratio(variants[name])
            shown.append("no ratio" if found is None else "{:.3f} ({:.3f} to {:.3f})".format(*found))
            if found is not None:
                counted += 1
                missed += not found[1] <= 1 <= found[2]
        wrong += missed
        wrong_jobs += bool(missed)
        print(f"| {number} | {shown[0]} | {shown[1]} | {missed} |", flush=True)
    print(f"\n{wrong} of {counted} intervals exclude 1, in {wrong_jobs} of {jobs} jobs")


def drafts(jobs: int) -> None:
    print("| repeat | variant | guesses held | tok/s against the baseline | same tokens |")
    print("|---:|---|---:|---|---:|")
    found: dict[str, list[list[float]]] = {"draft": [], "ngram": []}
    for number in range(1, jobs + 1):
        variants = job(DRAFTS)
        for name, kept in found.items():
            quality, measured = variants[name]["quality"], ratio(variants[name])
            if measured is None:
                print(f"| {number} | {name} | | no ratio | |", flush=True)
                continue
            kept.append(measured)
            print(
                f"| {number} | {name} | {quality['accepted_frac']:.1%} | {{:.2f}} ({{:.2f}} to {{:.2f}}) | ".format(
                    *measured
                )
                + f"{quality['agreement_frac']:.1%} |",
                flush=True,
            )
    print()
    for name, kept in found.items():
        held = 0
        for number, (_, low, high) in enumerate(kept):
            others = [math.log(each[0]) for at, each in enumerate(kept) if at != number]
            held += low <= math.exp(statistics.fmean(others)) <= high and not low <= 1 <= high
        print(f"{name}: the interval holds in {held} of {jobs} repeats")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=("equal", "drafts"))
    parser.add_argument("--jobs", type=int)
    parser.add_argument("--busy", type=int, default=0, help="busy loops beside the jobs")
    options = parser.parse_args()
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(options.busy)]
    try:
        if options.what == "equal":
            equal(options.jobs or 40)
        else:
            drafts(options.jobs or 10)
    finally:
        for loop in loops:
            loop.kill()


if __name__ == "__main__":
    main()
