"""Knees on a published sweep and on curves whose knee is known by construction."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from lmi_bench.analysis.results.knee import KNEE_RULES, bend_index, find_knees, kneedle_index
from lmi_bench.analysis.results.knee_cause import KneeFacts
from lmi_bench.analysis.results.repeats import spread
from lmi_bench.core.exchange import Exchange
from lmi_bench.core.records import RequestRecord
from lmi_bench.core.server_metrics import ServerMetrics
from tests.levels import changed, level_of

# Llama 2 7B, FP16, TGI of late 2023, ml.g5.2xlarge, 256 in and 256 out: (concurrency, tok/s,
# ms/token). Source: AWS Machine Learning Blog, "Benchmark and optimize endpoint deployment in
# Amazon SageMaker JumpStart", table of the instance comparison.
G5_2XLARGE = [(1, 30, 33), (2, 54, 33), (4, 115, 35), (8, 208, 39), (16, 343, 48), (32, 475, 97), (64, 486, 159)]
# The same table, ml.p4d.24xlarge with tensor-parallel degree 8.
P4D_24XLARGE = [
    (1, 49, 21),
    (2, 85, 23),
    (4, 178, 22),
    (8, 353, 23),
    (16, 654, 26),
    (32, 1079, 31),
    (64, 1544, 44),
    (128, 2312, 58),
    (256, 2905, 92),
    (512, 2944, 165),
]


def line(concurrency, throughput, p90_ms, **more):
    keys = {
        "concurrency": concurrency,
        "rate_per_s": None,
        "requests": 3 * concurrency,
        "errors": 0,
        "valid": True,
        "stopped_by": None,
        "throughput_tokens_per_s": throughput,
        "latency_ms_per_token": {"p90": p90_ms},
    } | more
    return level_of(**keys)


def levels(rows):
    return [line(*row) for row in rows]


def knees_of(lines, **options):
    return {knee.rule: knee for knee in find_knees(lines, **options)}


@pytest.mark.parametrize(("rows", "limit", "half"), [(G5_2XLARGE, 32, 16), (P4D_24XLARGE, 256, 32)])
def test_the_published_sweeps_have_the_knees_that_the_rules_say(rows, limit, half):
    """g5: 97 <= 100 < 159, 48 <= 66 < 97. p4d: 92 <= 100 < 165, 31 <= 42 < 44."""
    knees = knees_of(levels(rows))
    assert knees["latency_limit"].load == limit
    assert knees["half_latency"].load == half
    assert list(knees) == list(KNEE_RULES)


def test_kneedle_on_the_published_sweep_is_where_the_distance_from_the_chord_is_largest():
    """x = 0..6 over 6, y = (tok/s - 30) / 456: the distances peak at 32 with 0.976 - 0.833."""
    assert knees_of(levels(G5_2XLARGE))["kneedle"].load == 32
    assert kneedle_index(np.arange(7.0), np.array([row[1] for row in G5_2XLARGE], dtype=float)) == 5


@pytest.mark.parametrize("knee_at", [2, 4, 6])
def test_kneedle_finds_the_corner_of_a_broken_line(knee_at):
    x = np.arange(9.0)
    y = np.minimum(x, knee_at) + 0.05 * x
    assert kneedle_index(x, y) == knee_at


# tok/s of four sweeps of one quiet server at 1, 2, 4 ... users
QUIET_SERVER = [
    (270, 415, 739, 997, 1224, 1187, 1333, 1226),
    (258, 495, 759, 1025, 1079, 1253, 1247, 1201),
    (275, 450, 663, 899, 1174, 1278, 1334, 1248),
    (282, 475, 737, 1000, 1144, 1206, 1222, 1207),
]


@pytest.mark.parametrize("throughput", QUIET_SERVER)
def test_repeated_sweeps_of_one_server_have_one_bend(throughput):
    loads = 2.0 ** np.arange(8)
    assert loads[bend_index(loads, np.array(throughput, dtype=float))] == 16


def test_noise_of_five_percent_hardly_moves_the_bend():
    rng = np.random.default_rng(0)
    loads = 2.0 ** np.arange(8)
    curve = np.mean(QUIET_SERVER, axis=0)
    drawn = curve * np.exp(rng.normal(0, 0.05, (200, 8)))
    found = [bend_index(loads, row) for row in drawn]
    assert sum(i != 4 for i in found) < 20
    assert sum(kneedle_index(np.log2(loads), row) != 4 for row in drawn) > 60


@pytest.mark.parametrize(("taken", "recommended"), [(0.0, 1), (0.15, 1), (0.5, 0)])
def test_no_knee_is_recommended_where_others_took_the_cpu_time(taken, recommended):
    server = ServerMetrics(cpu_taken_frac=taken)
    lines = [replace(each, server=server) for each in levels(P4D_24XLARGE)]
    knees = find_knees(lines)
    assert sum(knee.recommended for knee in knees) == recommended
    if not recommended:
        assert "took 50% of this machine's CPU time" in knees[0].why


@pytest.mark.parametrize("y", [[1, 2, 4, 8, 16], [1, 2, 3, 4, 5], [5, 5, 5, 5, 5], [5, 4, 3, 2, 1]])
def test_a_curve_that_does_not_bend_has_no_kneedle_knee(y):
    assert kneedle_index(np.arange(5.0), np.array(y, dtype=float)) is None


def test_without_records_the_interval_is_the_neighbouring_levels():
    knee = knees_of(levels(G5_2XLARGE))["latency_limit"]
    assert (knee.low, knee.high) == (16, 64)


def requests_at(ms_per_token, spread_ms, n, rng):
    """n requests of 100 tokens with normally spread latency, one after the other."""
    records = []
    for index in range(n):
        e2e_s = 0.1 * max(1.0, ms_per_token + spread_ms * rng.standard_normal())
        times = tuple(np.linspace(e2e_s / 100, e2e_s, 100))
        records.append(RequestRecord(index, 0.0, Exchange(0.0, times), input_tokens=8))
    return records


def test_the_bootstrap_interval_is_tight_far_from_the_limit_and_wide_at_it():
    """At 32 the p90 is 97 + 1.28 sd: with sd 0.1 a sure pass, with sd 2.3 a toss-up with 16."""

    def interval(spread_ms):
        rng = np.random.default_rng(1)
        records = [requests_at(row[2], spread_ms, max(30, 3 * row[0]), rng) for row in G5_2XLARGE]
        knee = knees_of(levels(G5_2XLARGE), records=records)["latency_limit"]
        return knee.low, knee.high

    assert interval(0.1) == (32, 64)  # 64 fails: the limit is reached between them
    assert interval(2.3) == (16, 64)


def test_failed_requests_count_as_endless_in_the_knee():
    """A fifth failed: the p90 of all requests is endless though the answered ones were fast."""
    rng = np.random.default_rng(2)
    good = requests_at(30, 0.1, 40, rng)
    bad = [RequestRecord(i, 0.0, Exchange(0.0), status="timeout") for i in range(10)]
    lines = [line(1, 30, 30), line(8, 200, 30, requests=50, errors=10)]
    assert knees_of(lines, records=[good, good + bad])["latency_limit"].load == 1
    assert knees_of(lines)["latency_limit"].load == 1


def test_an_invalid_or_cut_level_is_no_knee():
    lines = levels(G5_2XLARGE)
    lines[5] = replace(lines[5], valid=False, invalid_reason="client: loop lag 80 ms")
    knee = knees_of(lines)["latency_limit"]
    assert knee.load == 16
    assert knee.cause == "client"
    lines[5] = replace(lines[5], valid=True, stopped_by="timeout")
    assert knees_of(lines)["latency_limit"].load == 16


@pytest.mark.parametrize(
    ("facts", "cause"),
    [
        (KneeFacts(b_max=40, max_batch=256), "kv_memory"),
        (KneeFacts(b_max=40, b_max_expected=80, max_batch=48), "server_limit"),
        (KneeFacts(b_max=400, max_batch=256, binding={64: "host"}), "host"),
        (KneeFacts(b_max=400, binding={64: "link"}), "link"),
        (KneeFacts(b_max=400, binding={64: "bandwidth"}), "bandwidth"),
        (KneeFacts(b_max=400, b_star=50), "compute"),
        (KneeFacts(b_max=400, b_star=math.inf), "unknown"),
        (KneeFacts(), "unknown"),
    ],
)
def test_the_cause_is_the_fact_that_lies_between_the_knee_and_the_next_level(facts, cause):
    knee = knees_of(levels(G5_2XLARGE), facts=facts)["latency_limit"]
    assert knee.load == 32
    assert knee.cause == cause
    assert knee.change


def test_a_server_that_refuses_requests_is_named_as_the_limit():
    lines = levels(G5_2XLARGE)
    lines[6] = replace(lines[6], errors=20, errors_by_kind={"overloaded": 20}, requests=192)
    knee = knees_of(lines)["latency_limit"]
    assert knee.cause == "server_limit"
    assert "refused 20 requests at concurrency 64" in knee.change


@pytest.mark.parametrize(
    ("server", "cause", "said"),
    [
        (
            {"running": {"mean": 31.0, "max": 32.0}, "waiting": {"mean": 30.0, "max": 32.0}},
            "server_limit",
            "ran at most 32 sequences at once while 30 waited",
        ),
        (
            {
                "running": {"mean": 31.0, "max": 33.0},
                "waiting": {"mean": 30.0, "max": 32.0},
                "kv_usage_frac": {"mean": 0.9, "max": 0.98},
            },
            "kv_memory",
            "98% in use",
        ),
        ({"preemptions": 3.0}, "kv_memory", "more room"),
        ({"running": {"mean": 60.0, "max": 64.0}, "waiting": {"mean": 0.1}}, "unknown", "State"),
    ],
)
def test_what_waits_by_the_servers_own_metrics_is_the_cause(server, cause, said):
    """Of a URL nothing else is known: its /metrics, read during the next level, tell."""
    lines = levels(G5_2XLARGE)
    lines[6] = changed(lines[6], server=server)
    knee = knees_of(lines)["latency_limit"]
    assert (knee.load, knee.cause) == (32, cause)
    assert said in knee.change


def test_a_knee_at_the_top_of_the_sweep_is_not_given_a_cause():
    knee = knees_of(levels(G5_2XLARGE[:5]), facts=KneeFacts(b_max=2))["latency_limit"]
    assert knee.load == 16
    assert knee.cause == "unknown"
    assert knee.high is None  # a bound: the knee is at 16 or above
    assert "sweep beyond concurrency 16" in knee.change


@pytest.mark.parametrize(
    ("facts", "load", "cause"),
    [
        (KneeFacts(b_max=18, b_max_expected=24, b_star=116.7), 18, "kv_memory"),
        (KneeFacts(b_max=180, b_star=46.7), 46.7, "compute"),
        (KneeFacts(b_max=18, b_star=math.inf), 18, "kv_memory"),
    ],
)
def test_theory_is_the_lower_of_memory_and_critical_batch(facts, load, cause):
    knee = knees_of(levels(G5_2XLARGE), facts=facts)["theory"]
    assert knee.load == pytest.approx(load)
    assert knee.cause == cause
    assert knee.low <= knee.load <= knee.high


def test_theory_beyond_the_sweep_is_no_knee_of_it():
    knee = knees_of(levels(G5_2XLARGE), facts=KneeFacts(b_max=2730, b_star=208.3))["theory"]
    assert knee.load is None
    assert "compute binds from 208.3 on: beyond the 64 in flight" in knee.why


def test_no_knee_is_recommended_where_the_first_token_takes_longer_than_ten_seconds():
    """tok/s and ms/token of 64 users are fine, but 15 s pass before the first token."""
    lines = levels([(1, 30, 33), (16, 343, 48), (64, 486, 79)])
    lines[2] = changed(lines[2], ttft_ms={"p90": 15_206.0})
    knees = knees_of(lines)
    assert (knees["latency_limit"].load, knees["latency_limit"].recommended) == (16, True)
    assert "TTFT p90 <= 10 s; next level" in knees["latency_limit"].why
    assert "TTFT 15,206 ms" in knees["latency_limit"].why
    late = knees_of([changed(each, ttft_ms={"p90": 10_001.0}) for each in lines])
    assert not any(knee.recommended for knee in late.values())


@pytest.mark.parametrize(("again", "starred"), [(200.0, True), (120.0, False)])
def test_no_knee_is_recommended_where_a_level_differs_from_itself(again, starred):
    """208 and 200 tok/s differ by 4 % of their mean, 208 and 120 by 54 %."""
    lines = levels(G5_2XLARGE)
    lines[3] = replace(lines[3], spread={"throughput": spread([208.0, again])})
    knees = knees_of(lines)
    assert any(knee.recommended for knee in knees.values()) is starred
    said = "concurrency 8 differed by 54% in throughput" in knees["latency_limit"].why
    assert said is not starred


@pytest.mark.parametrize(("requests", "starred"), [(29, True), (10, False)])
def test_no_knee_is_recommended_at_a_level_that_its_time_cut_to_a_few_requests(requests, starred):
    lines = levels(G5_2XLARGE)
    lines[5] = replace(lines[5], stopped_by="duration", requests=requests)
    knees = knees_of(lines)
    assert any(knee.recommended for knee in knees.values()) is starred
    said = "32 counted 10 requests in its time, and a p90 needs 29" in knees["latency_limit"].why
    assert said is not starred


def test_theory_over_rates_goes_through_littles_law():
    """18 sequences fit; 2 req/s holds 12 in flight, 4 req/s holds 30."""
    lines = [
        level_of(
            rate_per_s=rate,
            mean_concurrency=in_flight,
            throughput_tokens_per_s=100 * rate,
            latency_ms_per_token={"p90": 40},
        )
        for rate, in_flight in [(1.0, 5.0), (2.0, 12.0), (4.0, 30.0)]
    ]
    knee = knees_of(lines, facts=KneeFacts(b_max=18))["theory"]
    assert (knee.axis, knee.load) == ("rate_per_s", 2.0)
    assert knee.to_json()["rate_per_s"] == 2
    assert knee.to_json()["concurrency"] is None


def test_a_single_level_has_a_latency_limit_and_no_knee_to_recommend():
    knees = knees_of(levels(G5_2XLARGE[3:4]))
    assert knees["latency_limit"].load == 8
    assert not knees["latency_limit"].recommended
    assert "None is recommended: only 1 usable level(s)" in knees["latency_limit"].why
    assert knees["half_latency"].load is None
    assert "two usable levels" in knees["half_latency"].why
    assert "three usable levels" in knees["kneedle"].why


def test_throughput_that_never_grows_is_not_called_growing():
    """One request after the other: 30.1 tok/s at every load, and only the wait grows."""
    knees = knees_of([line(1, 30.1, 33.3), line(8, 30.1, 90), line(32, 30.1, 1065)])
    assert knees["kneedle"].load is None
    assert "does not grow with the load: 30.1 tok/s" in knees["kneedle"].why
    assert knees["latency_limit"].recommended
    assert "more load adds waiting and no throughput" in knees["latency_limit"].why


def test_no_level_at_all_gives_no_knee_and_no_crash():
    knees = find_knees([])
    assert [knee.load for knee in knees] == [None] * 4
    assert not any(knee.recommended for knee in knees)


def test_one_knee_is_recommended_and_it_is_the_lower_of_limit_and_bend():
    """p4d: the limit allows 256, the curve bends at 256 too; with twice the latency it binds at 64."""
    knees = find_knees(levels([(users, rate, 2 * p90_ms) for users, rate, p90_ms in P4D_24XLARGE]))
    recommended = [knee for knee in knees if knee.recommended]
    assert [(knee.rule, knee.load) for knee in recommended] == [("latency_limit", 64)]
    assert "binds before the curve bends" in recommended[0].why


def test_with_too_few_requests_for_a_p90_the_slowest_request_stands_in():
    lines = [line(1, 30, None), line(2, 55, None), line(4, 60, None)]
    lines = [
        changed(each, latency_ms_per_token={"p90": None, "max": slowest, "mean": slowest - 5})
        for each, slowest in zip(lines, (33, 40, 120), strict=True)
    ]
    knee = knees_of(lines)["latency_limit"]
    assert knee.load == 2
    assert "the slowest request" in knee.why


def test_the_last_attempt_of_a_level_counts():
    lines = [line(1, 30, 33), line(8, 100, 300), line(8, 200, 40)]
    assert knees_of(lines)["latency_limit"].load == 8


def test_knees_json_holds_the_agreed_keys():
    for knee in find_knees(levels(G5_2XLARGE)):
        entry = knee.to_json()
        assert {"rule", "concurrency", "low", "high", "cause", "recommended", "why"} <= set(entry)


def test_without_a_usable_level_nobody_is_told_to_sweep_lower():
    found = knees_of([line(4, 100.0, 20.0, valid=False)])["latency_limit"]
    assert found.load is None
    assert found.why == "no level is valid and was answered"
