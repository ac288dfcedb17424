"""Endpoint seconds of `sweep --search concurrency` beside a doubling search, on known knees.

Both run against the same simulated instances (the engine's own scheduler, predicted steps, virtual
time), with the same size of a deciding level: three requests a user, at least as many as the SLO's
quantile needs. The doubling search doubles until a level misses, then bisects to 5 %, as peers do.
Further tables repeat both on made-up servers with lognormal noise whose knees are known on paper:
how far the values are off, how often the interval holds the knee, and the spread of the share.

    python -m benchmarks.slo_search [--seeds 100]
"""

from __future__ import annotations

import argparse
import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lmi_bench.analysis.level.layouts import Layout, Workload, plan_copy
from lmi_bench.analysis.model.builtin_profiles import TGI_2023
from lmi_bench.analysis.results.latency import summarise_level
from lmi_bench.analysis.results.slo_results import DECIDED, CertainMiss, judge_level, requests_needed
from lmi_bench.analysis.search.slo_search import SloSearch, slo_answer
from lmi_bench.catalog.instances import find_instance
from lmi_bench.catalog.models import find_model
from lmi_bench.core.exchange import Exchange
from lmi_bench.core.findings import SloAnswer
from lmi_bench.core.level import Level
from lmi_bench.core.load import LoadAxis
from lmi_bench.core.records import LevelRun, RequestRecord, with_start_marked
from lmi_bench.core.slo import Slo, parse_slo
from lmi_bench.core.workload import LevelSizes, LevelSpec

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
    workload = Workload(find_model(model), "float16", INPUT_TOKENS, OUTPUT_TOKENS)
    layout = Layout(find_instance(name), degree)
    return plan_copy(layout, workload, TGI_2023, open_loop=False).simulate


def search(run: Run, slo: Slo, axis: LoadAxis = "concurrency") -> SloAnswer:
    """The answer of our search, endpoint seconds included."""
    if axis == "concurrency":
        rule = SloSearch(axis, (slo,), LevelSizes())
    else:
        rule = SloSearch(axis, (slo,), LevelSizes(), start=1.0, least=0.001, most=10_000.0)
    lines: list[Level] = []
    while (spec := rule.next_level(lines)) is not None:
        level = run(spec)
        lines.append(replace(summarise_level(level), search=judge_level(level, [slo])))
    return slo_answer(rule, lines)


def doubling(run: Run, slo: Slo, axis: LoadAxis = "concurrency") -> tuple[float, float]:
    """Value and endpoint seconds of doubling from 1, then bisection to 5 %, with whole levels."""
    seconds, sizes = 0.0, LevelSizes()
    whole = axis == "concurrency"

    def passes(load: float) -> bool:
        nonlocal seconds
        number = max(sizes.requests(axis, load) or 0, requests_needed([slo]))
        level = run(sizes.level(0, axis, load, number))
        seconds += summarise_level(level).wall_s or 0.0
        return judge_level(level, [slo]).passed

    low, high = 0.0, 1.0
    while high <= 4096 and passes(high):
        low, high = high, 2 * high
    while (high - low > 1 or not whole) and high > low * 1.05:
        middle = (low + high) // 2 if whole else (low + high) / 2
        low, high = (middle, high) if passes(middle) else (low, middle)
    return low, seconds


@dataclass(frozen=True, slots=True)
class MadeUp:
    """A server whose p90 passes 2 s at a load that is worked out on paper.

    latency_s  median seconds of an answer at a load
    knee       the load at which the median reaches a time, its inverse
    """

    name: str
    latency_s: Callable[[float], float]
    knee: Callable[[float], float]
    axis: LoadAxis = "concurrency"


LINEAR = MadeUp("e2e = 0.5 + users / 100 s", lambda n: 0.5 + n / 100, lambda s: 100 * (s - 0.5))
SATURATED = MadeUp("e2e = max(1, users / 61) s", lambda n: max(1.0, n / 61), lambda s: 61 * s)
FLAT = MadeUp("e2e = 1 / (1 - users / 120) s", lambda n: 1 / max(1e-3, 1 - n / 120), lambda s: 120 * (1 - 1 / s))
CLIFF = MadeUp("e2e = 0.8 s up to 93 users, then 5 s", lambda n: 0.8 if n <= 93 else 5.0, lambda _: 93.5)
FEW = MadeUp("e2e = users / 4 s", lambda n: n / 4, lambda s: 4 * s)
QUEUE = MadeUp(
    "e2e = 1 / (1 - rate / 20) s, at most 20, open loop",
    lambda rate: 1 / max(0.05, 1 - rate / 20),
    lambda s: 20 * (1 - 1 / s),
    "rate_per_s",
)
QUICK_SATURATED = MadeUp("e2e = max(0.5, users / 122) s", lambda n: max(0.5, n / 122), lambda s: 122 * s)
QUICK_FLAT = MadeUp(
    "e2e = 0.5 / (1 - users / 120) s, at most 10", lambda n: 0.5 / max(0.05, 1 - n / 120), lambda s: 120 * (1 - 0.5 / s)
)
NOISE, HEAVY_NOISE = 0.3, 0.6
NOISY = ((LINEAR, NOISE), (SATURATED, NOISE), (FLAT, NOISE))
HARDER = (
    (LINEAR, HEAVY_NOISE),
    (QUICK_SATURATED, HEAVY_NOISE),
    (QUICK_FLAT, HEAVY_NOISE),
    (CLIFF, NOISE),
    (FEW, NOISE),
    (QUEUE, NOISE),
)


def made_up(server: MadeUp, noise: float, seed: int, slo: Slo | None = None) -> Run:
    """Answers of two tokens, lognormally noisy; each user sends again at once.

    slo  as `sweep --search` does, nothing more is sent once a miss of it is certain
    """
    rng = np.random.default_rng(seed)

    def run(spec: LevelSpec) -> LevelRun:
        load, number = spec.concurrency or spec.rate_per_s or 1.0, spec.num_requests or 0
        open_loop = spec.concurrency is None
        watch = None if slo is None else CertainMiss([slo], spec)
        records: list[RequestRecord] = []
        in_flight: list[tuple[float, int]] = []
        decided = False

        def send(at_s: float) -> None:
            took_s = server.latency_s(load) * math.exp(noise * rng.standard_normal())
            times_s = (at_s + took_s / 2, at_s + took_s)
            records.append(RequestRecord(len(records), at_s, Exchange(at_s, times_s)))
            heapq.heappush(in_flight, (times_s[1], len(records) - 1))

        for _ in range(1 if open_loop else min(int(load), number)):
            send(0.0)
        while in_flight:
            if open_loop and not decided and len(records) < number:
                if (due_s := len(records) / load) <= in_flight[0][0]:
                    send(due_s)
                    continue
            now_s, index = heapq.heappop(in_flight)
            decided = (watch is not None and watch.add(records[index])) or decided
            if not decided and len(records) < number:
                send(len(records) / load if open_loop else now_s)
        marked = with_start_marked(records, spec)
        return LevelRun(spec, 1, marked, DECIDED if decided else None)

    return run


def spread(values: list[float]) -> str:
    """Median and the middle 90 %."""
    low, middle, high = np.percentile(values, (5, 50, 95))
    return f"{middle:.0%} ({low:.0%} to {high:.0%})"


def noisy(servers: Sequence[tuple[MadeUp, float]], seeds: int) -> None:
    """Both searches on each made-up server, once a seed."""
    slo = parse_slo("e2e_p90<=2s")
    print("| server | sigma | knee | off | off, doubling | interval holds the knee | its width | share of the s |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for server, noise in servers:
        knee = server.knee(2 / math.exp(1.28155 * noise))  # a p90 is so much above its median
        off, off_doubling, shares, widths, held = [], [], [], [], 0
        for seed in range(seeds):
            answer = search(made_up(server, noise, seed, slo), slo, server.axis)
            value, seconds = doubling(made_up(server, noise, seed + seeds), slo, server.axis)
            off.append(abs((answer.value or 0.0) / knee - 1))
            off_doubling.append(abs(value / knee - 1))
            shares.append(answer.endpoint_seconds / seconds)
            low, high = answer.low or 0.0, answer.high or math.inf
            held += low <= knee <= high
            widths.append((high - low) / (2 * knee))
        off_text, doubling_text = spread(off), spread(off_doubling)
        print(
            f"| {server.name} | {noise:g} | {knee:.1f} | {off_text} | {doubling_text} | "
            f"{held / seeds:.0%} | +-{np.median(widths):.0%} | {spread(shares)} |",
            flush=True,
        )


def main() -> None:
    """Print a row a case and the shares' range, then the noisy servers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=100, help="searches of each noisy server")
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
        print(
            f"| {case} | {answer.value or 0:g} | {known:g} | {answer.endpoint_seconds:.0f} | "
            f"{usual:.0f} | {shares[-1]:.0%} |",
            flush=True,
        )
    print(f"\nShare of a doubling search's endpoint seconds: {min(shares):.0%} to {max(shares):.0%}.")
    print(f"\nLognormal noise of sigma on every answer, {seeds} searches each; medians and middle 90 %.\n")
    noisy(NOISY, seeds)
    print()
    noisy(HARDER, seeds)


if __name__ == "__main__":
    main()
