"""How often a step in a level's speed is found, and how often one is found where there is none.

    python benchmarks/speed_steps.py [--levels 100] [--write FILE]

Simulated levels of mixed lengths (4 and 16 users, open loop of 2 req/s), with a noise
of the clock rate that lasts: 5 %, correlated over half a second. Then time runs slower from a
random moment in the middle half on; or the time to first token alone, with a noise of 10 % of its
own, is another one; or the server stops once, for 0.3 s, while it streams. In the loads with long prompts it
pauses to compute them, which is no such stop. The machine does not matter.
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
from lmi_bench.analysis.results.pauses import pauses  # noqa: E402
from lmi_bench.analysis.results.window import first_token_step, speed_step  # noqa: E402
from lmi_bench.core.run_store import load_run  # noqa: E402
from lmi_bench.core.steadiness import SpeedStep  # noqa: E402

LOADS = {
    "4 users": ("ml.g5.2xlarge", "--concurrency", "4", "--requests-per-level", "120"),
    "16 users": ("ml.g5.2xlarge", "--concurrency", "16", "--requests-per-level", "240"),
    "64 users": ("ml.g5.2xlarge", "--concurrency", "64", "--requests-per-level", "640"),
    "2 req/s": ("ml.g6e.2xlarge", "--rate", "2", "--requests-per-level", "200"),
    "8 req/s, more than it carries": ("ml.g6e.2xlarge", "--rate", "8", "--requests-per-level", "400"),
    "16 users, long prompts": (
        "ml.g5.2xlarge",
        "--concurrency",
        "16",
        "--requests-per-level",
        "160",
        "--input-lengths",
        "lognormal(4000,3000)",
    ),
    "1 req/s, long prompts": (
        "ml.g6e.2xlarge",
        "--rate",
        "1",
        "--requests-per-level",
        "200",
        "--input-lengths",
        "lognormal(4000,3000)",
    ),
}
SLOWER, FIRST, FIRST_NOISE = (1.0, 1.1, 1.2, 1.5), (1.0, 1.3, 1.5, 2.0, 0.5), 0.1
NOISE, GRID_S, NOISE_S = 0.05, 0.05, 0.5
PAUSE_S = 0.3


def _level(load: tuple[str, ...], seed: int, folder: Path) -> tuple[Columns, np.ndarray]:
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
    records = load_run(folder).records[0]
    return columns_of(records), np.array([each.input_tokens for each in records], dtype=float)


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


def _other_ttft(columns: Columns, factor: float, rng: np.random.Generator) -> Columns:
    """The level with another time to first token from a moment on."""
    first_s, sent_s = columns.each_s(open_loop=False)["ttft_from_sent"], columns.sent_s
    since_s = np.quantile(sent_s, rng.uniform(0.25, 0.75))
    factors = np.exp(FIRST_NOISE * rng.standard_normal(len(sent_s))) * np.where(sent_s < since_s, 1.0, factor)
    more_s = np.nan_to_num(first_s) * (factors - 1)
    moved = {name: getattr(columns, name) + more_s for name in ("last_s", "ended_s")}
    return replace(columns, times_s=columns.times_s + more_s[columns.owner], **moved, found={})


def _paused(columns: Columns, *, is_open: bool, rng: np.random.Generator) -> tuple[Columns, float]:
    """The level with a pause of all streams at a moment with tokens, and that moment; in an open
    loop requests are sent as before."""
    from_s, to_s = np.quantile(columns.times_s, [0.05, 0.95])
    at_s = float(rng.choice(columns.times_s[(columns.times_s > from_s) & (columns.times_s < to_s)]))
    names = ("times_s", "ended_s", "last_s", *(() if is_open else ("due_s", "sent_s")))
    values_s = {name: getattr(columns, name) for name in names}
    later = {name: each + PAUSE_S * (each > at_s) for name, each in values_s.items()}
    return replace(columns, **later, found={}), at_s


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
        + " | median error of the moment, s | of the size, points |"
        + "".join(f" TTFT x {factor:g} |" for factor in FIRST)
        + " levels with pauses where there is none | a pause of 0.3 s found |",
        "|---|" + "---:|" * (len(SLOWER) + 4 + len(FIRST)),
    ]
    for name, load in LOADS.items():
        counts, moments, sizes = dict.fromkeys(SLOWER, 0), [], []
        first = dict.fromkeys(FIRST, 0)
        stops = [0, 0]
        for seed in range(options.levels):
            with tempfile.TemporaryDirectory() as folder:
                columns, input_tokens = _level(load, seed, Path(folder) / "run")
            rng = np.random.default_rng(seed)
            for slower in SLOWER:
                level, since_s = _warped(columns, slower, rng)
                found = speed_step(level)
                if isinstance(found, SpeedStep):
                    counts[slower] += 1
                    if slower > 1:
                        moments.append(abs(found.at_s - since_s))
                        sizes.append(100 * abs(found.change - (slower - 1)))
            for factor in FIRST:
                first[factor] += first_token_step(_other_ttft(columns, factor, rng), input_tokens) is not None
            steady, _ = _warped(columns, 1.0, rng)
            stopped, at_s = _paused(steady, is_open="--rate" in load, rng=rng)
            found_stop = pauses(stopped, input_tokens)
            stops[0] += pauses(steady, input_tokens) is not None
            stops[1] += found_stop is not None and any(0 <= at_s - each < PAUSE_S for each in found_stop.at_s)
        cells = [*map(str, counts.values()), f"{np.median(moments):.2f}", f"{np.median(sizes):.1f}"]
        lines.append(f"| {name} | {' | '.join([*cells, *map(str, [*first.values(), *stops])])} |")
        print(lines[-1], flush=True)
    if options.write:
        options.write.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
