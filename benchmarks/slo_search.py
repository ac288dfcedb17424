"""Endpoint seconds of `sweep --search concurrency` beside a doubling search, on known knees.

Both run against the same simulated instances (the engine's own scheduler, predicted steps, virtual
time), with the same size of a deciding level: three requests a user, at least as many as the SLO's
quantile needs. The doubling search doubles until a level misses, then bisects to 5 %, as peers do.
A second table repeats both on made-up servers with lognormal noise whose knees are known on paper:
how far the values are off, how often the interval holds the knee, and the spread of the share.

    python -m benchmarks.slo_search [--seeds 40]
"""

from __future__ import annotations

import argparse
import heapq
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from lmi_bench.analysis.builtin_profiles import TGI_2023
from lmi_bench.analysis.capacity import scheduler_config_for, step_time_model_for
from lmi_bench.analysis.latency import summarise_level
from lmi_bench.analysis.level_sizes import LevelSizes
from lmi_bench.analysis.simulator import simulate_level
from lmi_bench.analysis.slo_boundary import SloAnswer, slo_answer
from lmi_bench.analysis.slo_judgement import (
    DECIDED,
    CertainMiss,
    judge_level,
    requests_needed,
)
from lmi_bench.analysis.slo_search import SEARCH_KEY, SloSearch
from lmi_bench.catalog.instances import find_instance
from lmi_bench.catalog.models import find_model
from lmi_bench.records import LevelRun, RequestRecord
from lmi_bench.slo import Slo, parse_slo
from lmi_bench.workload import LevelSpec, PlannedRequest

CASES = (
    ("llama-2-7b", "ml.g5.2xlarge", 1, "latency_per_token_p90<=60ms"),
    ("llama-2-7b", "ml.g5.2xlarge", 1, "ttft_p90<=2s"),
    ("llama-2-7b", "ml.g5.12xlarge", 4, "e2e_p90<=10s"),
    ("llama-2-13b", "ml.g5.12xlarge", 4, "tpot_p90<=40ms"),
    ("llama-2-70b", "ml.p4d.24xlarge", 8, "e2e_p90<=20s"),
)
INPUT_TOKENS = OUTPUT_TOKENS = 256
Run = Callable[[LevelSpec], LevelRun]


def instance(model: str, name: str, degree: int) -> Run:
    """A level on a simulated instance; nothing is cut short, so both searches pay in full."""
    shape, machine = find_model(model), find_instance(name)
    total = INPUT_TOKENS + OUTPUT_TOKENS
    config = scheduler_config_for(shape, machine, degree, "float16", TGI_2023, total)
    steps = step_time_model_for(shape, machine, degree, "float16", TGI_2023)

    def request(number: int) -> PlannedRequest:
        return PlannedRequest(number, 0.0, INPUT_TOKENS, OUTPUT_TOKENS)

    return lambda spec: simulate_level(spec, request, config, steps)


def search(run: Run, slo: Slo) -> SloAnswer:
    """The answer of our search, endpoint seconds included."""
    rule = SloSearch("concurrency", (slo,), LevelSizes())
    lines: list[dict[str, Any]] = []
    while (spec := rule.next_level(lines)) is not None:
        level = run(spec)
        lines.append({**summarise_level(level), SEARCH_KEY: judge_level(level, [slo]).to_dict()})
    return slo_answer(rule, lines)


def doubling(run: Run, slo: Slo) -> tuple[float, float]:
    """Value and endpoint seconds of doubling, then bisection."""
    seconds = 0.0

    def passes(users: int) -> bool:
        nonlocal seconds
        number = max(3 * users, requests_needed([slo]))
        level = run(LevelSpec(0, concurrency=users, num_requests=number))
        seconds += summarise_level(level)["wall_s"]
        return judge_level(level, [slo]).passed

    low, high = 0, 1
    while high <= 4096 and passes(high):
        low, high = high, 2 * high
    while high - low > 1 and high > low * 1.05:
        middle = (low + high) // 2
        low, high = (middle, high) if passes(middle) else (low, middle)
    return low, seconds


NOISE = 0.3
P90 = math.exp(1.28155 * NOISE)
"""Of a lognormal, over its median."""
MADE_UP = (
    ("e2e = 0.5 + users / 100 s", lambda users: 0.5 + users / 100, 100 * (2 / P90 - 0.5)),
    ("e2e = max(1, users / 61) s", lambda users: max(1.0, users / 61), 61 * 2 / P90),
    ("e2e = 1 / (1 - users / 120) s", lambda users: 1 / max(1e-3, 1 - users / 120),
     120 * (1 - P90 / 2)),
)  # fmt: skip
"""Servers whose p90 passes 2 s at a knee that is worked out on paper."""


def made_up(latency_s: Callable[[float], float], seed: int, slo: Slo | None = None) -> Run:
    """Answers of two tokens, lognormally noisy; each user sends again at once.

    slo  as `sweep --search` does, nothing more is sent once a miss of it is certain
    """
    rng = np.random.default_rng(seed)

    def run(spec: LevelSpec) -> LevelRun:
        users, number = spec.concurrency or 1, spec.num_requests or 0
        watch = None if slo is None else CertainMiss([slo], number, open_loop=False)
        records: list[RequestRecord] = []
        decided = False

        def send(at_s: float) -> None:
            took_s = latency_s(users) * math.exp(NOISE * rng.standard_normal())
            times_s = (at_s + took_s / 2, at_s + took_s)
            records.append(RequestRecord(len(records), at_s, at_s, times_s))
            heapq.heappush(in_flight, (times_s[1], len(records) - 1))

        in_flight: list[tuple[float, int]] = []
        for _ in range(min(users, number)):
            send(0.0)
        while in_flight:
            now_s, index = heapq.heappop(in_flight)
            decided = (watch is not None and watch.add(records[index])) or decided
            if not decided and len(records) < number:
                send(now_s)
        return LevelRun(spec, 1, tuple(records), DECIDED if decided else None)

    return run


def spread(values: list[float]) -> str:
    """Median and the middle 90 %."""
    low, middle, high = np.percentile(values, (5, 50, 95))
    return f"{middle:.0%} ({low:.0%} to {high:.0%})"


def noisy(seeds: int) -> None:
    """Both searches on each made-up server, once a seed."""
    slo = parse_slo("e2e_p90<=2s")
    print(f"\nLognormal noise, sigma {NOISE:g}, {seeds} searches each; medians and middle 90 %.\n")
    print("| server | knee | off | off, doubling | interval holds the knee | share of the s |")
    print("|---|---:|---:|---:|---:|---:|")
    for name, latency_s, knee in MADE_UP:
        off, off_doubling, shares, held = [], [], [], 0
        for seed in range(seeds):
            answer = search(made_up(latency_s, seed, slo), slo)
            value, seconds = doubling(made_up(latency_s, seed + seeds), slo)
            off.append(abs((answer.value or 0.0) / knee - 1))
            off_doubling.append(abs(value / knee - 1))
            shares.append(answer.endpoint_seconds / seconds)
            held += answer.low is not None and answer.low <= knee <= (answer.high or math.inf)
        print(f"| {name} | {knee:.1f} | {spread(off)} | {spread(off_doubling)} | "
              f"{held / seeds:.0%} | {spread(shares)} |", flush=True)  # fmt: skip


def main() -> None:
    """Print a row a case and the shares' range, then the noisy servers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=40, help="searches of each noisy server")
    seeds = parser.parse_args().seeds
    print("| case | ours | doubling | s | s, doubling | share |")
    print("|---|---:|---:|---:|---:|---:|")
    shares = []
    for model, name, degree, text in CASES:
        run, slo = instance(model, name, degree), parse_slo(text)
        answer = search(run, slo)
        known, usual = doubling(run, slo)
        shares.append(answer.endpoint_seconds / usual)
        case = f"{model} on {name} TP {degree}, {text}"
        print(f"| {case} | {answer.value or 0:g} | {known} | {answer.endpoint_seconds:.0f} | "
              f"{usual:.0f} | {shares[-1]:.0%} |", flush=True)  # fmt: skip
    print(
        f"\nShare of a doubling search's endpoint seconds: {min(shares):.0%} to {max(shares):.0%}."
    )
    noisy(seeds)


if __name__ == "__main__":
    main()
