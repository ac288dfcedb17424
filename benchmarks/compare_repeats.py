"""How often `compare` claims a difference between equal runs, and finds one of the size it names.

    python benchmarks/compare_repeats.py [--pairs 10000] [--seed 0] [--processes N] [--write FILE]

Runs are drawn: four users take the next of 100 requests when they are free; lengths differ by
request and are the same in all runs, times scatter by 10 % and 30 %. A pair of equal runs with any
claim, of all metrics, is a false alarm (at most 5 %). Then B's first tokens are later by what
`compare` called detectable for the TTFT p50, and the share of claims is counted: 80 % if nothing
else differed, more where it does, since Holm's later steps ask for less; and by 1.25 times as much,
which a test with normal errors finds in 94 of 100. The machine does not matter.
"""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from lmi_bench.analysis.results.compare import compare_runs  # noqa: E402
from lmi_bench.core.exchange import Exchange  # noqa: E402
from lmi_bench.core.level import Level  # noqa: E402
from lmi_bench.core.manifest import Manifest  # noqa: E402
from lmi_bench.core.records import RequestRecord  # noqa: E402
from lmi_bench.core.run_store import Run  # noqa: E402

USERS, REQUESTS = 4, 100
TIMES = (1.0, 1.25)
"""Of what is called detectable: an interval that finds 80 % of it finds 94 % of 1.25 times that."""
SCATTERS = (0.1, 0.3)
MANIFEST = {"scenario": {"workload": {"input_tokens": 8, "output_tokens": 8}, "seed": 0}}


def _run(rng: np.random.Generator, scatter: float, slower: float = 1.0) -> Run:
    lengths = np.random.default_rng(7).integers(4, 24, size=REQUESTS)
    free_s, records = [0.0] * USERS, []
    for number, length in enumerate(lengths):
        user = int(np.argmin(free_s))
        sent_s = free_s[user]
        ttft_s = slower * 0.2 * np.exp(scatter * rng.standard_normal())
        gaps_s = 0.02 * np.exp(scatter * rng.standard_normal(length - 1))
        times_s = sent_s + ttft_s + np.concatenate([[0.0], np.cumsum(gaps_s)])
        free_s[user] = float(times_s[-1])
        records.append(RequestRecord(number, sent_s, Exchange(sent_s, tuple(times_s.tolist()))))
    line = Level.from_json({"level": 0, "attempt": 1, "concurrency": USERS, "valid": True})
    return Run(Path("drawn"), Manifest.from_json(MANIFEST), [line], [tuple(records)], None)


def _pair(task: tuple[int, float]) -> tuple[bool, ...]:
    """Whether equal runs got a claim, and whether each change of the TTFT p50 did."""
    seed, scatter = task
    rng = np.random.default_rng(seed)
    a, b = _run(rng, scatter), _run(rng, scatter)
    alike = compare_runs(a, b, seed=seed)
    alarm = any(each.verdict in ("faster", "slower") for each in alike)
    named = next(each.detectable for each in alike if each.metric == "ttft_p50")
    found = []
    for times in TIMES:
        changed = compare_runs(a, _run(rng, scatter, 1 + times * (named or 0.0)), seed=seed)
        verdict = next(each.verdict for each in changed if each.metric == "ttft_p50")
        found.append(verdict == "slower")
    return alarm, *found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, help="default: one a core")
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    lines = [
        "# `compare` on drawn runs",
        "",
        f"Printed by `python benchmarks/compare_repeats.py --pairs {options.pairs} --seed "
        f"{options.seed}`. +-: two standard errors.",
        "",
        "| scatter of a time | pairs | false alarms, any metric | detectable change found | 1.25 times that found |",
        "|---:|---:|---:|---:|---:|",
    ]
    for scatter in SCATTERS:
        tasks = [(options.seed + number, scatter) for number in range(options.pairs)]
        with ProcessPoolExecutor(options.processes) as pool:
            columns = np.array(list(pool.map(_pair, tasks, chunksize=20))).T
        shares = [f"{100 * each.mean():.1f} % +- {200 * each.std() / np.sqrt(each.size):.1f}" for each in columns]
        lines.append(f"| {scatter:.0%} | {options.pairs:,} | {' | '.join(shares)} |")
        print(lines[-1], flush=True)
    text = "\n".join(lines) + "\n"
    if options.write:
        options.write.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
