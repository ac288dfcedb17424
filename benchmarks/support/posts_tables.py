"""The four published tables, every cell beside its prediction or simulation.

A cell agrees where the published figure lies in the prediction's 80 % interval, or no further from
it than published repeats of one set-up are from each other: 8 % in throughput, 13 % in latency
(their 90th percentiles).
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.support.posts_program import AGREES, DIFFERS, ROOT, Program
from lmi_bench.analysis.model.memory import weight_bytes
from lmi_bench.catalog.instances import find_instance
from lmi_bench.catalog.models import find_model
from lmi_bench.core.units import MS_PER_S

DATA = Path("lmi_bench/catalog/data/published")
_REPEATS = {"throughput_tokens_per_s": 0.08, "latency_ms_per_token": 0.13}
_UNITS = {"throughput_tokens_per_s": "tok/s", "latency_ms_per_token": "ms/token"}
_BATCHING = {
    "Dynamic Batching": "--policy dynamic --batch-size 4",
    "Continuous Batching": "--policy rolling --kv-layout contiguous",
    "Continuous Batching with PagedAttention": "--policy rolling --kv-layout paged",
}
FALCON_USERS = 64
_FULL = 0.8  # share of a device that weights take, above which its cache decides


@dataclass(frozen=True)
class Cell:
    """One published figure: where, what the program gives, and the verdict."""

    where: str
    published: str
    given: str
    is_fitted: bool
    verdict: str


def rows_of(name: str) -> list[dict[str, str]]:
    text = (ROOT / DATA / name).read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines()))


def command(name: str) -> str:
    return f"validate {DATA / name} --profile tgi-2023"


def jumpstart(program: Program, name: str) -> list[Cell]:
    """Every figure of one of the JumpStart tables."""
    rows, judged = rows_of(name), program.run(command(name)).data
    found = []
    for row, given in zip(rows, judged, strict=True):
        for key, tolerance in _REPEATS.items():
            if row.get(key):
                found.append(_cell(row, given, key, tolerance))
    return found


def _cell(row: dict[str, str], given: dict[str, Any], key: str, tolerance: float) -> Cell:
    copies = row.get("instance_count") or "1"
    where = f"{row['model']}, {'' if copies == '1' else copies + ' x '}{row['instance']}"
    where += f", TP {row['tp']}, {row['concurrency']} users"
    claimed, unit = float(row[key]), _UNITS[key]
    value, low, high = (given[f"{kind}_{key}"] for kind in ("predicted", "low", "high"))
    if value is None:
        text, verdict = "none", f"{DIFFERS} the planner says that it does not fit"
    else:
        text = f"{value:,.0f} ({low:,.0f} to {high:,.0f})"
        if low <= claimed <= high:
            verdict = f"{AGREES} (interval)"
        elif abs(value / claimed - 1) <= tolerance:
            verdict = f"{AGREES} ({tolerance:.0%}, as repeats)"
        else:
            verdict = f"{DIFFERS} {_reason(row, given, where)}"
    return Cell(where, f"{claimed:,.0f} {unit}", text, row["fit"] == "yes", verdict)


def _reason(row: dict[str, str], given: dict[str, Any], where: str) -> str:
    """Why a prediction misses, by what binds the cell; raises ValueError where nothing is known."""
    shape, devices = find_model(row["model"]), int(row["tp"])
    memory = find_instance(row["instance"]).accelerator.memory_bytes
    share = weight_bytes(shape, "float16") / devices / memory
    if shape.is_moe:
        return "TGI of 2023 launched each expert's kernels, and the profile saw a dense model alone"
    if share > _FULL:
        return (
            f"weights fill {share:.0%} of each device: how many users run at once hangs on a few "
            "GB of cache, which the plan estimates"
        )
    if row["concurrency"] == "1" and devices > 1:
        return (
            f"a lone step at TP {devices} is the host's ({given['regime']}), which is planned by "
            f"layers, {shape.num_layers} against the fitted 32; published, both sizes take 22 ms"
        )
    rate, latency_ms = (row.get(key) for key in _REPEATS)
    planned = given["predicted_throughput_tokens_per_s"]
    if rate and latency_ms and planned:
        users = float(row["concurrency"])
        spread = float(latency_ms) * float(rate) / users / MS_PER_S
        wider = given["predicted_latency_ms_per_token"] * planned / users / MS_PER_S
        if wider > spread:
            return (
                "prompts that wait for TGI's rule to join spread the planned p90 to "
                f"{wider:.2f} times the mean that its throughput gives; published is {spread:.2f}"
            )
    raise ValueError(f"{where} differs, and no reason is known")


def falcon(program: Program) -> Iterator[tuple[dict[str, str], str, float, float]]:
    """Each row with its command, and simulated tokens a second and p90 latency in seconds."""
    for row in rows_of("falcon40b_batching.csv"):
        total = int(row["input_tokens"]) + int(row["output_tokens"])
        limits = "" if row["batch_size"] else " --max-batch 32 --prefill-tokens 1024"
        text = (
            "sweep --target sim:ml.g5.48xlarge --model falcon-40b --tp 8 --profile tgi-2023 "
            f"--concurrency {FALCON_USERS} --requests-per-user 3 --max-model-len {total} "
            f"--input-tokens {row['input_tokens']} --output-tokens {row['output_tokens']} "
            f"{_BATCHING[row['batching_strategy']]}{limits}"
        )
        out = program.run(text)
        (speed,) = out.levels("throughput_tokens_per_s").values()
        (p90,) = out.levels("e2e_ms.p90").values()
        yield row, text, speed, p90 / 1000
