"""How often `sweep --stop-when` and `sweep --against` are right, and what they save.

    python benchmarks/stopping.py [--levels 1000] [--runs 40] [--contests 300] [--served 10]
        [--write FILE]

`--stop-when`: latencies of a level are drawn from a log-normal distribution, each for itself or
in batches that share half of the variance; an interval that does not hold the true percentile is a
miss (at most 5 %). Then whole sweeps of a simulated server, whose requests do depend on each other;
the percentile of all runs together stands for the true one.

`--against`: rounds of two targets are drawn, three levels each. An attempt's throughput scatters by
1 % or 4 %, and drifts by 2 % a round for both. Two equal targets that are called different are a
false alarm (at most 5 %, for all levels together). The machine does not matter.

Then real endpoints: two `serve` processes of the trained model, B with the same settings, or with
fewer sequences in its batch than there are users. Here the machine matters.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from lmi_bench.analysis.results.columns import columns_of  # noqa: E402
from lmi_bench.analysis.results.early_stop import parse_stop_when  # noqa: E402
from lmi_bench.analysis.results.repeats import LOOKS, MAX_ATTEMPTS, paired_changes, parse_until  # noqa: E402
from lmi_bench.core.level import Level  # noqa: E402
from lmi_bench.core.run_store import load_run  # noqa: E402
from lmi_bench.core.scenario import parse_scenario  # noqa: E402
from lmi_bench.jobs.sweep.run import sweep_scenario  # noqa: E402

RULES = ("ttft_p50:5%", "ttft_p90:10%", "ttft_p99:10%")
SPREADS, BATCH = (0.2, 0.5), 8
SIMULATED = ("ttft_p90:10%", "e2e_p90:10%")
SERVER = {
    "target": "sim:ml.g5.2xlarge",
    "model": "qwen3-8b",
    "workload": {"input_lengths": "lognormal(300,200)", "output_lengths": "lognormal(60,40)"},
}
USERS, REQUESTS = 8, 2500
LOAD = {"concurrency": [USERS], "requests_per_level": REQUESTS}
LEVELS, DRIFT = 3, 0.02
SCATTERS, CHANGES, UNTIL = (0.01, 0.04), (0.0, 0.015, 0.03, 0.06, 0.1), "throughput +-3%"


def _drawn(levels: int) -> Iterator[str]:
    yield "| percentile | spread | requests | missed | known | requests sent, median | of |"
    yield "|---|---:|---|---:|---:|---:|---:|"
    for text in RULES:
        rule = parse_stop_when(text)
        most = rule.looks[-1]
        for spread in SPREADS:
            true = float(np.exp(spread * _NORMAL[rule.quantile]))
            for in_batches in (False, True):
                rng = np.random.default_rng(1)
                missed, ended, sent = 0, 0, []
                for _ in range(levels):
                    scores = rng.standard_normal(most)
                    if in_batches:
                        shared = np.repeat(rng.standard_normal(most // BATCH + 1), BATCH)[:most]
                        scores = (scores + shared) / np.sqrt(2)
                    values_ms = np.exp(spread * scores)
                    for count in rule.looks:
                        known = rule.look(values_ms[:count].tolist())
                        if known.reached:
                            break
                    ended += known.reached
                    sent.append(known.requests)
                    missed += not known.low_ms <= true <= known.high_ms
                how = f"batches of {BATCH}" if in_batches else "independent"
                yield (
                    f"| {text} | {spread:g} | {how} | {missed / levels:.1%} | "
                    f"{ended / levels:.0%} | {np.median(sent):,.0f} | {most:,} |"
                )


_NORMAL = {0.5: 0.0, 0.9: 1.2815515655446004, 0.99: 2.3263478740408408}


def _sweeps(runs: int) -> Iterator[str]:
    yield "| percentile | runs | missed | known | requests sent, median | of |"
    yield "|---|---:|---:|---:|---:|---:|"
    most = REQUESTS + USERS
    for text in SIMULATED:
        rule, found, pooled = parse_stop_when(text), [], []
        for seed in range(runs):
            scenario = parse_scenario(SERVER | {"seed": seed, "load": LOAD | {"stop_when": text}, "name": "stopping"})
            with tempfile.TemporaryDirectory() as folder:
                run = load_run(sweep_scenario(scenario, out=Path(folder) / "run").folder)
            found.append((run.levels[0].known, run.levels[0].requests))
            pooled.append(columns_of(run.records[0]).values_ms(rule.metric, open_loop=False)[0])
        true = float(np.quantile(np.concatenate(pooled), rule.quantile))
        missed = sum(not known.low_ms <= true <= known.high_ms for known, _ in found)
        ended = sum(known.reached for known, _ in found)
        sent = np.median([requests for _, requests in found])
        yield f"| {text} | {runs} | {missed} | {ended} | {sent:,.0f} | {most:,} |"


def _side(rng: np.random.Generator, scatter: float, drifts: list[float], factor: float) -> list[Level]:
    """The lines of one target, level after level in each round."""
    return [
        Level.from_json(
            {
                "level": level,
                "attempt": 1 + place,
                "concurrency": 4 * 2**level,
                "valid": True,
                "throughput_tokens_per_s": 100 * factor * np.exp(drift + scatter * rng.standard_normal()),
            }
        )
        for place, drift in enumerate(drifts)
        for level in range(LEVELS)
    ]


def _contests(contests: int) -> Iterator[str]:
    yield (
        "| scatter of an attempt | B against A | called different | called no different | "
        "not sure | rounds, median | of |"
    )
    yield "|---:|---:|---:|---:|---:|---:|---:|"
    until = parse_until(UNTIL)
    for scatter in SCATTERS:
        for change in CHANGES:
            rng = np.random.default_rng(2)
            verdicts = {"different": 0, "no": 0, "": 0}
            ended = []
            for _ in range(contests):
                drifts = np.cumsum(DRIFT * rng.standard_normal(MAX_ATTEMPTS)).tolist()
                a = _side(rng, scatter, drifts, 1.0)
                b = _side(rng, scatter, drifts, 1.0 + change)
                for rounds in LOOKS:
                    part = slice(0, LEVELS * rounds)
                    found = [each.verdict for each in paired_changes(a[part], b[part], until)]
                    if all(found):
                        break
                ended.append(rounds)
                if any(each in ("more", "less") for each in found):
                    verdicts["different"] += 1
                elif all(found):
                    verdicts["no"] += 1
                else:
                    verdicts[""] += 1
            shares = " | ".join(f"{count / contests:.1%}" for count in verdicts.values())
            yield (f"| {scatter:.0%} | {change:+.1%} | {shares} | {np.median(ended):.0f} | {MAX_ATTEMPTS} |")


SERVED = {"the same settings": (), "2 sequences in a batch": ("--max-batch", "2")}
SERVED_LOAD = (
    "--concurrency",
    "2,4",
    "--input-tokens",
    "16",
    "--output-tokens",
    "32",
    "--requests-per-level",
    "32",
    "--until",
    UNTIL,
)


@contextlib.contextmanager
def _server(*options: str) -> Iterator[str]:
    """The address of a `serve` of its own, one thread of arithmetic."""
    command = [sys.executable, "-m", "lmi_bench", "serve", "--model", "demo-15m", "--threads", "1"]
    process = subprocess.Popen(
        [*command, "--port", "0", *options],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout is not None
        found = re.search(r"http://[\d.]+:\d+", process.stdout.readline())
        if found is None:
            raise SystemExit(f"serve {' '.join(options)} did not start")
        yield found[0]
    finally:
        process.terminate()
        process.wait()


def _served(contests: int) -> Iterator[str]:
    yield (
        "| B against A | comparisons | called different | called no different | not sure | "
        "throughput of B, median | rounds, median | of |"
    )
    yield "|---|---:|---:|---:|---:|---:|---:|---:|"
    for name, options in SERVED.items():
        verdicts = {"different": 0, "no": 0, "": 0}
        rounds, logs = [], dict[str, list[float]]()
        for _ in range(contests):
            with _server() as a, _server(*options) as b, tempfile.TemporaryDirectory() as folder:
                out = Path(folder) / "ab"
                command = [sys.executable, "-m", "lmi_bench", "sweep", a, "--against", b]
                subprocess.run(
                    [*command, *SERVED_LOAD, "--out", str(out), "--quiet"],
                    check=True,
                    cwd=ROOT,
                    stdout=subprocess.DEVNULL,
                )
                lines_a, lines_b = (load_run(out / side).levels for side in "ab")
            changes = paired_changes(lines_a, lines_b, parse_until(UNTIL))
            found = [each.verdict for each in changes]
            is_different = any(each in ("more", "less") for each in found)
            verdicts["different" if is_different else "no" if all(found) else ""] += 1
            rounds.append(max(level.attempt for level in lines_a))
            for each in changes:  # of levels that are valid on both sides
                logs.setdefault(each.level, []).append(each.log.mean or 0.0)
        shares = " | ".join(map(str, verdicts.values()))
        changed = ", ".join(f"{level} {np.expm1(np.median(logs[level])):+.1%}" for level in logs)
        yield (f"| {name} | {contests} | {shares} | {changed} | {np.median(rounds):.0f} | {MAX_ATTEMPTS} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--levels", type=int, default=1000)
    parser.add_argument("--runs", type=int, default=40)
    parser.add_argument("--contests", type=int, default=300)
    parser.add_argument("--served", type=int, default=10)
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    parts = (
        (f"`--stop-when`, {options.levels:,} drawn levels a row", _drawn(options.levels)),
        ("`--stop-when`, sweeps of a simulated server", _sweeps(options.runs)),
        (f"`--against`, {options.contests:,} drawn comparisons a row", _contests(options.contests)),
        ("`--against`, two `serve` processes with the trained model", _served(options.served)),
    )
    called = f"--levels {options.levels} --runs {options.runs} --contests {options.contests}"
    called += f" --served {options.served}"
    lines = ["# Levels and comparisons that end when they are sure", ""]
    lines += [f"Printed by `python benchmarks/stopping.py {called}`.", ""]
    for title, rows in parts:
        lines += [f"## {title}", ""]
        for row in rows:
            print(row, flush=True)
            lines.append(row)
        lines.append("")
    if options.write:
        options.write.write_text("\n".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
