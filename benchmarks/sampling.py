"""CPU time of sampling, beside taking the likeliest token: 64 rows of a large vocabulary.

    python benchmarks/sampling.py --out benchmarks/results/sampling.md

Each row of the table is the median of rounds in which all settings take turns. Logits are drawn
from a normal distribution of standard deviation 3, which is flatter than a model's: its likeliest
1,024 tokens hold about a tenth of the mass.
"""

from __future__ import annotations

import argparse
import platform
import random
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from lmi_bench.engine.scheduling.sampling import SamplingParams
from lmi_bench.engine.torch_backend.sampler import RowRequest, choose

CASES: dict[str, dict[str, Any]] = {
    "likeliest (greedy)": {"temperature": 0.0},
    "temperature 1": {"temperature": 1.0},
    "top-k 50": {"temperature": 1.0, "top_k": 50},
    "top-p 0.9": {"temperature": 1.0, "top_p": 0.9},
    "top-p 0.5": {"temperature": 1.0, "top_p": 0.5},
    "top-k 50, top-p 0.9": {"temperature": 1.0, "top_k": 50, "top_p": 0.9},
    "min-p 0.05": {"temperature": 1.0, "min_p": 0.05},
    "repetition penalty 1.1": {"temperature": 1.0, "repetition_penalty": 1.1},
    "presence and frequency 0.5": {"temperature": 1.0, "presence_penalty": 0.5, "frequency_penalty": 0.5},
}


def times(each_s: list[float]) -> str:
    low, high = min(each_s), max(each_s)
    return f"{statistics.median(each_s) * 1e3:.1f} ({low * 1e3:.1f} to {high * 1e3:.1f})"


def ratios(each_s: list[float], base_s: list[float]) -> str:
    """Times over the greedy ones of the same round."""
    found = [own / base for own, base in zip(each_s, base_s, strict=True)]
    return f"{statistics.median(found):.2f} ({min(found):.2f} to {max(found):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--vocab", type=int, default=128_256)
    parser.add_argument("--history", type=int, default=2048, help="tokens before each row")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, help="Markdown file; the default is to print")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    chance = random.Random(0)
    logits = torch.randn(asked.rows, asked.vocab) * 3
    histories = [[chance.randrange(asked.vocab) for _ in range(asked.history)] for _ in range(asked.rows)]
    times_s: dict[str, list[float]] = {name: [] for name in CASES}
    for number in range(asked.rounds + 1):
        for name, settings in CASES.items():
            sampling = SamplingParams(**settings)
            rows = [
                RowRequest(sampling, asked.history + number, history, i, num_generated=1024)
                for i, history in enumerate(histories)
            ]
            start_s = time.process_time()
            choose(logits, rows)
            if number:  # the first round warms up
                times_s[name].append(time.process_time() - start_s)
    base = next(iter(times_s.values()))
    lines = [
        "# CPU time of sampling",
        "",
        f"{asked.rows} rows x {asked.vocab:,} tokens, {asked.history:,} tokens before each, torch "
        f"{torch.__version__}, one thread, {platform.processor() or platform.machine()}; median of "
        f"{asked.rounds} rounds, and the lowest and the highest.",
        "",
        "| setting | CPU ms a step | times greedy |",
        "|---|---:|---:|",
        *(f"| {name} | {times(each)} | {ratios(each, base)} |" for name, each in times_s.items()),
    ]
    text = "\n".join(lines) + "\n"
    print(text) if asked.out is None else asked.out.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
