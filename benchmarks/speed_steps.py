"""How often a step in a level's speed is found, and how often one is found where there is none.

    python benchmarks/speed_steps.py [--levels 100] [--write FILE]

Simulated levels of mixed lengths (4 and 16 users, open loop of 2 req/s), with a noise
of the clock rate that lasts: 5 %, correlated over half a second. Then time runs slower from a
random moment in the middle half on. The machine does not matter.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from lmi_bench.analysis.results.columns import Columns, columns_of  # noqa: E402
from lmi_bench.analysis.results.window import speed_step  # noqa: E402
from lmi_bench.core.level import SpeedStep  # noqa: E402
from lmi_bench.core.run_store import load_run  # noqa: E402

LOADS = {
    "4 users": ("ml.g5.2xlarge", "--concurrency", "4", "--requests-per-level", "120"),
    "16 users": ("ml.g5.2xlarge", "--concurrency", "16", "--requests-per-level", "240"),
    "2 req/s": ("ml.g6e.2xlarge", "--rate", "2", "--requests-per-level", "200"),
}
SLOWER = (1.0, 1.1, 1.2, 1.5)
NOISE, GRID_S, NOISE_S = 0.05, 0.05, 0.5


def _level(load: tuple[str, ...], seed: int, folder: Path) -> Columns:
    instance, *options = load
    command = [
        sys.executable,
        "-m",
        "lmi_bench",
        "sweep",
        "--target",
        f"sim:{instance}",
        "--model",
        "qwen3-8b",
        "--input-lengths",
        "lognormal(300,200)",
        "--output-lengths",
        "lognormal(150,80)",
        "--seed",
        str(seed),
        *options,
        "--out",
        str(folder),
        "--quiet",
    ]
    subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    return columns_of(load_run(folder).records[0])


def _warped(columns: Columns, slower: float, rng: np.random.Generator) -> tuple[Columns, float]:
    """The level on a clock that wavers, and from a moment on runs slower; and that moment."""
    times_s = columns.times_s
    grid_s = np.arange(0.0, times_s.max() + GRID_S, GRID_S)
    kept = np.exp(-GRID_S / NOISE_S)
    noise = np.zeros(len(grid_s))
    for place in range(1, len(grid_s)):
        noise[place] = kept * noise[place - 1] + np.sqrt(1 - kept**2) * rng.standard_normal()
    since = rng.uniform(0.25, 0.75) * times_s.max()
    pace = np.exp(NOISE * noise) * np.where(grid_s >= since, slower, 1.0)
    clock_s = np.concatenate([[0.0], np.cumsum(pace * GRID_S)])[:-1]
    names = ("times_s", "due_s", "sent_s", "ended_s", "last_s")
    warped = {name: np.interp(getattr(columns, name), grid_s, clock_s) for name in names}
    return replace(columns, **warped, found={}), float(np.interp(since, grid_s, clock_s))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--levels", type=int, default=100)
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    lines = [
        "# Steps in the speed of a level",
        "",
        f"Printed by `python benchmarks/speed_steps.py --levels {options.levels}`: how many of "
        f"{options.levels} levels were called unsteady.",
        "",
        "| load | "
        + " | ".join(f"{s - 1:.0%} slower" if s > 1 else "steady" for s in SLOWER)
        + " | median error of the moment, s | of the size, points |",
        "|---|" + "---:|" * (len(SLOWER) + 2),
    ]
    for name, load in LOADS.items():
        counts, moments, sizes = dict.fromkeys(SLOWER, 0), [], []
        for seed in range(options.levels):
            with tempfile.TemporaryDirectory() as folder:
                columns = _level(load, seed, Path(folder) / "run")
            rng = np.random.default_rng(seed)
            for slower in SLOWER:
                level, since_s = _warped(columns, slower, rng)
                found = speed_step(level)
                if isinstance(found, SpeedStep):
                    counts[slower] += 1
                    if slower > 1:
                        moments.append(abs(found.at_s - since_s))
                        sizes.append(100 * abs(found.change - (slower - 1)))
        cells = [str(counts[slower]) for slower in SLOWER]
        cells += [f"{np.median(moments):.2f}", f"{np.median(sizes):.1f}"]
        lines.append(f"| {name} | {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    if options.write:
        options.write.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
