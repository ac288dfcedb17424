"""Two runs of made-up requests: chance is no difference, and a tenth is one."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from lmi_bench.analysis.results.compare import _worked_through_s, are_paired, compare_runs, workload_differences
from lmi_bench.core.errors import InputError
from lmi_bench.core.exchange import Exchange
from lmi_bench.core.manifest import Manifest, RunScenario
from lmi_bench.core.records import RequestRecord
from lmi_bench.core.run_store import Run
from tests.levels import level_of

SCENARIO = {"workload": {"input_tokens": 8, "output_tokens": 8}, "seed": 0}


def records_of(seed, *, n=120, slower=1.0, users=4, lengths_seed=7):
    """Who is free takes the next; lengths differ by request, and are the same for every seed."""
    own = np.random.default_rng(lengths_seed).integers(4, 40, size=n)
    rng = np.random.default_rng(seed)
    free, records = [0.0] * users, []
    for number in range(n):
        user = free.index(min(free))
        sent = free[user]
        ttft = slower * 0.2 * np.exp(0.1 * rng.standard_normal())
        gaps = slower * 0.02 * np.exp(0.1 * rng.standard_normal(own[number] - 1))
        times = sent + ttft + np.concatenate([[0.0], np.cumsum(gaps)])
        free[user] = float(times[-1])
        records.append(RequestRecord(number, sent, Exchange(sent, tuple(times.tolist()))))
    return tuple(records)


def sent_at_a_rate(seed, *, slower=1.0, server_s=0.0, lost=()):
    """60 requests, 2 a second, of 32 tokens in 8 s +-10 %, or by a server in turn."""
    rng = np.random.default_rng(seed)
    free_s, records = 0.0, []
    for number in range(60):
        sent_s, noise = number / 2, 1 + 0.1 * rng.standard_normal()
        free_s = max(free_s, sent_s) + slower * server_s * noise
        end_s = free_s if server_s else sent_s + slower * 8.0 * noise
        times_s = np.linspace(sent_s, end_s, 33)[1:]
        if number not in lost:
            records.append(RequestRecord(number, sent_s, Exchange(sent_s, tuple(times_s.tolist()))))
    return tuple(records)


def run_of(*levels, path="run", scenario=None, load="concurrency"):
    """A run of (concurrency, records) levels, or of (rate, records)."""
    lines = [level_of(level=i, valid=True, **{load: value}) for i, (value, _) in enumerate(levels)]
    manifest = Manifest.from_json({"scenario": scenario or SCENARIO})
    return Run(Path(path), manifest, lines, [kept for _, kept in levels], None)


def verdicts(a, b, **options):
    return {d.metric: d for d in compare_runs(a, b, **options)}


def test_a_run_against_its_like_differs_in_one_of_twenty_at_most():
    """Over 30 pairs of seeds: of nine intervals each one in twenty leaves out zero, but of the
    pairs one in twenty has a verdict at all: five or more of 30 would have a chance of 1.6 %."""
    held, same = [], []
    for seed in range(30):
        found = verdicts(run_of((4, records_of(2 * seed))), run_of((4, records_of(2 * seed + 1))), seed=seed)
        held += [d.low <= 0 <= d.high for d in found.values()]
        same.append({d.verdict for d in found.values()} == {"no difference"})
    assert len(held) == 30 * 9
    assert 0.91 <= np.mean(held) <= 0.99
    assert sum(same) >= 26


def test_a_level_ends_when_its_last_user_does():
    """Two users: 3 | 1 1 1 s end together, after 1 1 | 3 one of them works on to 4 s."""
    took_s = _worked_through_s(np.array([[3.0, 1.0, 1.0, 1.0], [1.0, 1.0, 3.0, 0.0]]), 2)
    assert took_s.tolist() == [3.0, 4.0]


def test_a_tenth_is_found_in_every_metric_and_lies_in_the_interval():
    slower, held = [], []
    for seed in range(10):
        found = verdicts(run_of((4, records_of(seed))), run_of((4, records_of(100 + seed, slower=1.1))))
        for metric, difference in found.items():
            truth = 1 / 1.1 - 1 if metric == "throughput" else 0.1
            slower.append(difference.verdict == "slower")
            held.append(difference.low <= truth <= difference.high)
        assert found["throughput"].worse_by > 0
        assert found["ttft_p50"].worse_by > 0
    assert np.mean(slower) >= 0.97
    assert np.mean(held) >= 0.88  # 95 % of 90, three standard errors below


def test_a_change_of_the_detectable_size_is_claimed_in_80_of_100_comparisons():
    """40 pairs with a seed of their own: fewer than 26 claims, or 39 and more, have 2 %."""
    alike = verdicts(run_of((4, records_of(1))), run_of((4, records_of(2))))
    slower = 1 + alike["ttft_p50"].detectable
    assert 1.02 < slower < 1.1
    claimed = [
        verdicts(run_of((4, records_of(1000 + seed))), run_of((4, records_of(seed, slower=slower))))["ttft_p50"].verdict
        for seed in range(40)
    ]
    assert 26 <= claimed.count("slower") <= 38


def test_a_longer_run_would_see_a_smaller_change():
    short, long = (verdicts(run_of((4, records_of(1, n=n))), run_of((4, records_of(2, n=n)))) for n in (100, 400))
    for metric in ("throughput", "ttft_p50", "itl_p50", "tpot_p50"):
        assert 0.4 < long[metric].detectable / short[metric].detectable < 0.7, metric


def test_half_a_percent_takes_repeats_to_be_claimed():
    """Every time of B is 0.5 % longer, so each interval leaves out zero; runs differ by more."""

    def steady(slower):
        times = [0.1, 0.12, 0.14]
        return tuple(RequestRecord(n, 0.0, Exchange(0.0, tuple(slower * t for t in times))) for n in range(40))

    once = [run_of((4, steady(1.0))), run_of((4, steady(1.005)))]
    assert {d.verdict for d in verdicts(*once).values()} == {"no difference"}
    thrice = [run_of(*[(4, steady(slower))] * 3) for slower in (1.0, 1.005)]
    assert {d.verdict for d in verdicts(*thrice).values()} == {"slower"}


def at_a_rate(attempts, seed, **more):
    levels = [(2.0, sent_at_a_rate(100 * seed + each, **more)) for each in range(attempts)]
    return run_of(*levels, load="rate_per_s")


@pytest.mark.parametrize("lost", [((), ()), ((3,), (40,))], ids=["all", "one lost"])
@pytest.mark.parametrize("attempts", [1, 3])
def test_when_the_last_answer_of_a_rate_came_is_chance(attempts, lost):
    """All lengths are equal, so only the ends differ: by 2.7 % with one attempt a side."""
    found = []
    for seed in range(20):
        a, b = (at_a_rate(attempts, seed + 50 * side, lost=lost[side]) for side in (0, 1))
        found.append(verdicts(a, b)["throughput"])
    spread = np.std([math.log1p(each.change) for each in found])
    assert np.mean([each.noise for each in found]) == pytest.approx(spread, rel=0.3)
    assert [each.verdict for each in found].count("no difference") >= 19


@pytest.mark.parametrize("attempts", [1, 3])
def test_a_server_that_does_not_keep_up_and_is_a_tenth_slower_is_found(attempts):
    for seed in range(10):
        a = at_a_rate(attempts, seed, server_s=0.6)
        b = at_a_rate(attempts, 50 + seed, server_s=0.6, slower=1.1)
        difference = verdicts(a, b)["throughput"]
        assert difference.verdict == "slower"
        assert -0.15 < difference.change < -0.03


def test_the_other_way_round_it_is_faster():
    found = verdicts(run_of((4, records_of(0, slower=1.1))), run_of((4, records_of(1))))
    assert {d.verdict for d in found.values()} == {"faster"}


def test_pairs_cancel_what_makes_one_request_longer_than_another():
    """Lengths spread e2e by half; without pairs the interval would be several times wider."""
    a = run_of((4, records_of(0)))
    paired = verdicts(a, run_of((4, records_of(1))))["e2e_p50"]
    shifted = tuple(
        RequestRecord(r.request_id + 1000, r.due_s, Exchange(r.sent_s, r.token_times_s)) for r in records_of(1)
    )
    apart = verdicts(a, run_of((4, shifted)))["e2e_p50"]
    assert paired.high - paired.low < 0.5 * (apart.high - apart.low)


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"workload": {"input_tokens": 8, "output_tokens": 9}, "seed": 0}, "workload.output_tokens is 8 and 9"),
        ({**SCENARIO, "load": {"arrivals": "constant"}}, "load.arrivals is None and 'constant'"),
    ],
)
def test_unlike_workloads_are_refused_by_name(other, named):
    a, b = run_of((4, records_of(0))), run_of((4, records_of(1)), scenario=other)
    with pytest.raises(InputError, match=named):
        compare_runs(a, b)


@pytest.mark.parametrize(
    ("first", "second", "named"),
    [
        (
            {"arrivals": "gamma", "burstiness": 0.15},
            {"arrivals": "gamma", "burstiness": 4.0},
            "load.burstiness is 0.15 and 4.0",
        ),
        ({"ramp_s": 20.0}, {}, "load.ramp_s is 20.0 and 0.0"),
        ({}, {"max_in_flight": 2}, "load.max_in_flight is None and 2"),
        ({"arrivals": "poisson", "burstiness": 0.15}, {"arrivals": "poisson"}, ""),
        ({"ramp_s": 0.0, "max_sessions": None, "max_in_flight": None}, {}, ""),
    ],
)
def test_arrivals_are_alike_in_all_that_shapes_them(first, second, named):
    """A burstiness is of gamma arrivals alone."""
    found = [RunScenario.from_json({**SCENARIO, "load": load}) for load in (first, second)]
    assert workload_differences(*found) == ([named] if named else [])


def test_a_run_older_than_a_field_is_comparable_with_one_that_does_not_use_it():
    used = {"begins_within": True, "agents": ""}
    old, new, other = (
        RunScenario.from_json({"workload": {**SCENARIO["workload"], **later}})
        for later in ({}, {"begins_within": False, "shared_prefix": 0, "agents": None}, used)
    )
    assert workload_differences(old, new) == []
    assert len(workload_differences(old, other)) == len(used)


def test_runs_of_two_seeds_are_compared_without_pairs():
    """Against itself a run has no difference at all in pairs; without pairs it has its scatter."""
    first = run_of((4, records_of(0)))
    other = run_of((4, records_of(0)), scenario={**SCENARIO, "seed": 1})
    assert are_paired(first, first)
    assert not are_paired(first, other)
    paired, unpaired = verdicts(first, first), verdicts(first, other)
    assert all(d.low == d.high == 0 for d in paired.values() if d.change is not None)
    assert all(d.low < 0 < d.high for d in unpaired.values() if d.change is not None)
    assert {d.verdict for d in unpaired.values()} <= {"no difference", "unknown"}


def test_another_target_is_what_comparing_is_for():
    a = run_of((4, records_of(0)), scenario={**SCENARIO, "target": "http://a", "model": "x"})
    b = run_of((4, records_of(1)), scenario={**SCENARIO, "target": "http://b", "model": "y"})
    assert compare_runs(a, b)


def test_runs_without_a_level_in_common_are_refused():
    with pytest.raises(InputError, match="no valid level in common: 4 against 8"):
        compare_runs(run_of((4, records_of(0))), run_of((8, records_of(1))))


def test_too_few_requests_give_no_verdict_and_say_so():
    """A p90 needs 29 requests."""
    few = verdicts(run_of((4, records_of(0, n=20))), run_of((4, records_of(1, n=20))))
    assert few["ttft_p90"].verdict == "unknown"
    assert few["ttft_p90"].reason == "p90 needs 29 samples, has 20"
    assert few["ttft_p50"].verdict != "unknown"


def test_attempts_at_one_level_are_pooled():
    a = run_of((4, records_of(0)), (4, records_of(1)))
    b = run_of((4, records_of(2)), (4, records_of(3)))
    one = verdicts(run_of((4, records_of(0))), run_of((4, records_of(2))))["ttft_p50"]
    two = verdicts(a, b)["ttft_p50"]
    assert two.high - two.low < one.high - one.low


def test_a_difference_that_attempts_of_one_run_have_too_is_no_claim():
    """Each attempt is faster or slower as a whole, as under other tenants: 3 % on average."""
    sides = [
        run_of(*((4, records_of(10 * side + i, slower=slower)) for i, slower in enumerate(speeds)))
        for side, speeds in enumerate([(0.95, 1.0, 1.05), (0.98, 1.03, 1.08)])
    ]
    found = verdicts(*sides)
    assert {d.verdict for d in found.values()} == {"no difference"}
    ttft = found["ttft_p50"]
    assert ttft.freedom == 4
    assert ttft.low < 0 < ttft.high
    assert ttft.detectable > 0.1
    faster = run_of(*((4, records_of(30 + i, slower=0.5)) for i in range(3)))
    assert verdicts(sides[0], faster)["ttft_p50"].verdict == "faster"
