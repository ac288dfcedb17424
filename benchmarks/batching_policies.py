"""The batching policies and KV layouts on the bundled engine, on requests of mixed length.

Half the requests are 20 tokens in and 500 out, half the other way round. A dynamic batch runs to
the end of its longest member, so most of its slots stand idle; a rolling batch fills them. A
contiguous cache reserves each request's whole length, so fewer fit into the same memory; the last
two rows show it with a cache of 1,536 tokens, which is less than three requests' reservation.

Repeats run in turns, since a shared machine drifts; each figure is the median.

    python benchmarks/batching_policies.py --repeats 3 --out benchmarks/results/batching_policies.md
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
from pathlib import Path
from typing import Any

from lmi_bench.analysis.latency import summarise_level
from lmi_bench.cli.bench import open_bench
from lmi_bench.loadgen.levels import levels_of
from lmi_bench.loadgen.sweep import run_sweep
from lmi_bench.scenario import Scenario, load_scenario

ROOT = Path(__file__).parent.parent
SMALL_CACHE = {"num_blocks": 24, "block_size": 64, "max_model_len": 520}
ROWS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("none", {"policy": "none"}),
    ("dynamic, batch_size 4", {"policy": "dynamic", "batch_size": 4}),
    ("rolling", {"policy": "rolling"}),
    ("rolling, small cache, contiguous", {"kv_layout": "contiguous", **SMALL_CACHE}),
    ("rolling, small cache, paged", {"kv_layout": "paged", **SMALL_CACHE}),
)
BASELINE, ROLLING = ROWS[1][0], ROWS[2][0]


def measure(scenario: Scenario) -> dict[str, Any]:
    """The line of the scenario's only level."""
    bench = open_bench(scenario)
    result = bench.run(
        lambda target: run_sweep(
            levels_of(scenario),
            target,
            None,
            prompts=bench.prompts("batching"),
            summarise=summarise_level,
            timeout_s=None,
            seed=scenario.seed,
        )
    )
    (line,) = result.levels
    assert not line["errors"], line["errors_by_kind"]
    return dict(line)


def table(lines: dict[str, list[dict[str, Any]]]) -> str:
    """Markdown: one row a policy, medians over the repeats."""

    def median(name: str, *keys: str) -> float:
        values = []
        for line in lines[name]:
            value: Any = line
            for key in keys:
                value = value[key]
            values.append(float(value))
        return statistics.median(values)

    base = median(BASELINE, "throughput_tokens_per_s")
    rows = [
        "| policy | tok/s | of dynamic | decode slots idle | cache slots empty | most at once "
        "| preemptions | ms/token mean |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name in lines:
        speed = median(name, "throughput_tokens_per_s")
        rows.append(
            f"| {name} | {speed:.1f} | {speed / base:.2f} "
            f"| {median(name, 'engine', 'slot_waste_frac'):.1%} "
            f"| {median(name, 'engine', 'cache_waste_frac'):.1%} "
            f"| {median(name, 'engine', 'peak_running'):.0f} "
            f"| {median(name, 'engine', 'preemptions'):.0f} "
            f"| {median(name, 'latency_ms_per_token', 'mean'):.1f} |"
        )
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo-15m")
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--requests-per-user", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument(
        "--row",
        action="append",
        choices=[name for name, _ in ROWS],
        help="Only this one beside dynamic and rolling.",
    )
    parser.add_argument("--out", type=Path, default=None, help="Markdown file.")
    args = parser.parse_args()

    scenario = load_scenario(ROOT / "scenarios" / "mixed-20-500.yaml").with_overrides(
        {
            "model": args.model,
            "load.concurrency": (args.concurrency,),
            "load.requests_per_user": args.requests_per_user,
            "engine.threads": args.threads,
        }
    )
    rows = [row for row in ROWS if args.row is None or row[0] in (*args.row, BASELINE, ROLLING)]
    lines: dict[str, list[dict[str, Any]]] = {name: [] for name, _ in rows}
    for repeat in range(args.repeats):
        for name, settings in rows:
            overrides = {f"engine.{key}": value for key, value in settings.items()}
            line = measure(scenario.with_overrides(overrides))
            lines[name].append(line)
            print(
                f"{repeat + 1}/{args.repeats} {name}: {line['throughput_tokens_per_s']:.1f} tok/s"
            )
    ratios = [
        rolling["throughput_tokens_per_s"] / dynamic["throughput_tokens_per_s"]
        for rolling, dynamic in zip(lines[ROLLING], lines[BASELINE], strict=True)
    ]
    text = (
        f"# Batching policies, {args.model}, 20/500 and 500/20 tokens\n\n"
        f"{args.concurrency} users, {args.requests_per_user} requests each, medians of "
        f"{args.repeats}; {platform.machine()}, {os.cpu_count()} cores, "
        f"{args.threads or 'all'} thread(s) of the engine, Python {platform.python_version()}.\n\n"
        f"{table(lines)}\n\n"
        f"rolling over dynamic, repeat by repeat: {', '.join(f'{r:.2f}' for r in ratios)}; "
        f"median {statistics.median(ratios):.2f}.\n"
    )
    print(text)
    if args.out is not None:
        args.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
