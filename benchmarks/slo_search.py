"""Endpoint seconds of `sweep --search concurrency` beside a doubling search, on known knees.

Both run against the same simulated instances (the engine's own scheduler, predicted steps, virtual
time), with the same size of a deciding level: three requests a user, at least as many as the SLO's
quantile needs. The doubling search doubles until a level misses, then bisects to 5 %, as peers do.

    python -m benchmarks.slo_search
"""

from __future__ import annotations

from collections.abc import Callable

from lmi_bench.analysis.builtin_profiles import TGI_2023
from lmi_bench.analysis.capacity import scheduler_config_for, step_time_model_for
from lmi_bench.analysis.latency import summarise_level
from lmi_bench.analysis.level_sizes import LevelSizes
from lmi_bench.analysis.simulator import simulate_level
from lmi_bench.analysis.slo_boundary import slo_answer
from lmi_bench.analysis.slo_judgement import judge_level, requests_needed
from lmi_bench.analysis.slo_search import SEARCH_KEY, SloSearch
from lmi_bench.catalog.instances import find_instance
from lmi_bench.catalog.models import find_model
from lmi_bench.records import LevelRun
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


def search(run: Run, slo: Slo) -> tuple[float | None, float]:
    """Value and endpoint seconds of our search."""
    rule = SloSearch("concurrency", (slo,), LevelSizes())
    lines, records = [], []
    while (spec := rule.next_level(lines)) is not None:
        level = run(spec)
        lines.append({**summarise_level(level), SEARCH_KEY: judge_level(level, [slo]).to_dict()})
        records.append(level.records)
    answer = slo_answer(rule, lines, records)
    return answer.value, answer.endpoint_seconds


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


def main() -> None:
    """Print a row a case and the shares' range."""
    print(f"{'case':58} {'ours':>6} {'doubling':>9} {'s':>7} {'s':>9} {'share':>7}")
    shares = []
    for model, name, degree, text in CASES:
        run, slo = instance(model, name, degree), parse_slo(text)
        value, seconds = search(run, slo)
        known, usual = doubling(run, slo)
        shares.append(seconds / usual)
        case = f"{model} on {name} TP {degree}, {text}"
        print(f"{case:58} {value or 0:6g} {known:9} {seconds:7.0f} {usual:9.0f} {shares[-1]:7.0%}")
    print(f"share of a doubling search's endpoint seconds: {min(shares):.0%} to {max(shares):.0%}")


if __name__ == "__main__":
    main()
