"""The highest load under an SLO, on servers whose knees are known by construction."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from lmi_bench.analysis.results.latency import summarise_level
from lmi_bench.analysis.results.slo_results import CertainMiss, judge_level
from lmi_bench.analysis.search.slo_search import SloSearch, slo_answer
from lmi_bench.core.exchange import Exchange
from lmi_bench.core.level import Judgement, Level, Statistics
from lmi_bench.core.load import Load
from lmi_bench.core.records import LevelRun, RequestRecord
from lmi_bench.core.slo import parse_slo
from lmi_bench.core.workload import LevelSizes, LevelSpec
from tests.analysis.search.servers import MadeUpServer, Queue, run_search

SLOS = (parse_slo("e2e_p90<=2s"),)


def search_over(axis="concurrency", **options):
    return SloSearch(axis, SLOS, LevelSizes(), **options)


def answer_of(search, server, **options):
    lines, _ = run_search(search, server, **options)
    return slo_answer(search, lines)


# latency of a load, and the load at which it reaches 2 s, by hand
KNOWN = {
    "linear": (lambda c: 0.5 + c / 100, 150),
    "quadratic": (lambda c: 1 + (c / 137) ** 2, 137),
    "saturated": (lambda c: max(0.8, c / 61), 122),
    "steep": (lambda c: 0.3 * c, 6),
    "wide": (lambda c: 0.1 + c / 900, 1710),
}


def doubling_search_seconds(latency, *, tolerance=0.05):
    """Seconds that doubling and then bisection take with whole levels: the usual way."""

    def level_s(users):
        return math.ceil(max(3 * users, 29) / users) * latency(users)

    low, high, seconds = 0, 1, level_s(1)
    while latency(high) <= 2:
        low, high = high, 2 * high
        seconds += level_s(high)
    while high - low > 1 and high > low * (1 + tolerance):
        middle = (low + high) // 2
        seconds += level_s(middle)
        low, high = (middle, high) if latency(middle) <= 2 else (low, middle)
    return seconds


@pytest.mark.parametrize("name", KNOWN)
def test_the_highest_load_is_found_to_five_percent(name):
    latency, knee = KNOWN[name]
    answer = answer_of(search_over(), MadeUpServer(latency))
    assert answer.value <= knee < answer.first_breach
    assert answer.first_breach - answer.value <= max(1, 0.05 * answer.value)
    assert answer.low <= knee <= answer.high
    assert answer.binding == "e2e_p90<=2000ms"
    assert answer.boundary == "smooth"


@pytest.mark.parametrize("name", KNOWN)
def test_it_takes_less_than_half_the_time_of_a_doubling_search(name):
    latency, _ = KNOWN[name]
    answer = answer_of(search_over(), MadeUpServer(latency))
    assert answer.endpoint_seconds <= 0.5 * doubling_search_seconds(latency)


def test_a_cliff_is_told_from_a_slope_and_found_to_its_step():
    answer = answer_of(search_over(), MadeUpServer(lambda c: 1.0 if c <= 93 else 9.0))
    assert (answer.boundary, answer.value <= 93 < answer.first_breach) == ("cliff", True)


def test_requests_that_fail_beyond_a_limit_are_a_cliff():
    answer = answer_of(search_over(), MadeUpServer(lambda c: 1.0, error_above=40))
    assert answer.boundary == "cliff"
    assert answer.value <= 40 < answer.first_breach


P90 = math.exp(1.28155 * 0.3)
"""Of a lognormal of sigma 0.3, over its median."""
NOISY = {
    "linear": (KNOWN["linear"][0], 100 * (2 / P90 - 0.5), 0.63),
    "saturated": (KNOWN["saturated"][0], 61 * 2 / P90, 1.0),
    "flat": (lambda c: 1 / max(1e-3, 1 - c / 120), 120 * (1 - P90 / 2), 0.36),
}
"""Latency of a load, where 2 s / P90 is reached, and by how much of 1 % it grows there with 1 % of
load, by hand."""


def noisy_doubling_seconds(server):
    """What the usual way pays on a noisy server, as it meets it."""

    def passes(users):
        nonlocal seconds
        run = server.level(LevelSpec(0, Load(concurrency=users), num_requests=max(3 * users, 29)), SLOS)
        seconds += summarise_level(run).wall_s
        return judge_level(run, SLOS).passed

    low, high, seconds = 0, 1, 0.0
    while passes(high):
        low, high = high, 2 * high
    while high - low > 1 and high > low * 1.05:
        middle = (low + high) // 2
        low, high = (middle, high) if passes(middle) else (low, middle)
    return seconds


@pytest.mark.parametrize("name", NOISY)
def test_a_noisy_boundary_is_in_the_interval_and_costs_less_than_half(name):
    """95 % of 8 searches, two standard errors below; the doubling search is cut short as ours.

    The p90 of n such times has a standard error of 0.3 * sqrt(0.09 / n) / 0.1755, 0.1755 being the
    normal density there; the value is as near as a whole level at the knee alone could tell, and
    half the tolerance.
    """
    latency, knee, growth = NOISY[name]
    one_level = 0.3 * math.sqrt(0.09 / (3 * knee)) / 0.1755 / growth
    held, shares, off = [], [], []
    for seed in range(8):
        answer = answer_of(search_over(), MadeUpServer(latency, noise=0.3, seed=seed))
        usual = noisy_doubling_seconds(MadeUpServer(latency, noise=0.3, seed=seed + 100))
        held.append(answer.low <= knee <= answer.high)
        shares.append(answer.endpoint_seconds / usual)
        off.append(abs(answer.value / knee - 1))
        assert answer.high - answer.low < 3 * knee
    assert np.mean(held) >= 0.75
    assert np.median(shares) <= 0.5
    assert np.median(off) <= one_level + 0.025


def test_a_noisy_boundary_lies_in_the_interval_for_nineteen_of_twenty_seeds():
    """p90 of a lognormal is its median times exp(1.2816 sigma): 0.5 + c / 100 = 2 / that."""
    held = []
    for seed in range(15):
        for name, knee in (
            ("linear", 100 * (2 / math.exp(1.28155 * 0.3) - 0.5)),
            ("saturated", 61 * 2 / math.exp(1.28155 * 0.3)),
        ):
            answer = answer_of(search_over(), MadeUpServer(KNOWN[name][0], noise=0.3, seed=seed))
            held.append(answer.low <= knee <= answer.high)
            assert answer.value == pytest.approx(knee, rel=0.25)
    assert np.mean(held) >= 0.87  # 95 % of 30, two standard errors below


def test_levels_far_from_the_limit_are_looks_and_the_first_strides_are_long():
    lines, _ = run_search(search_over(), MadeUpServer(KNOWN["wide"][0]))
    loads = [line.load.concurrency for line in lines]
    assert loads[:2] == [4, 16]
    assert [line.requests for line in lines[:2]] == [3 * 4, 3 * 16]
    assert sum(line.counted >= 3 * line.load.concurrency for line in lines) <= 2


@pytest.mark.parametrize(
    ("slo", "knee"),
    [
        ("ttft_p90<=750ms", 100),  # the first token comes after half of 0.5 + c / 100
        ("ttft_mean<=750ms", 100),
        ("itl_p50<=750ms", 100),
        ("tpot_p99<=750ms", 100),
        ("e2e_p99<=1500ms", 100),
    ],
)
def test_any_metric_and_statistic_is_searched(slo, knee):
    search = SloSearch("concurrency", (parse_slo(slo),), LevelSizes())
    answer = answer_of(search, MadeUpServer(KNOWN["linear"][0]))
    assert answer.value <= knee < answer.first_breach <= 1.051 * answer.value
    assert answer.binding == str(search.slos[0])


def test_of_several_slos_the_first_that_breaks_is_binding():
    """The first token's limit is reached at 100 users, that of the whole answer at 150."""
    slos = (parse_slo("e2e_p90<=2s"), parse_slo("ttft_p90<=750ms"))
    search = SloSearch("concurrency", slos, LevelSizes())
    answer = answer_of(search, MadeUpServer(KNOWN["linear"][0]))
    assert (answer.binding, answer.value <= 100 < answer.first_breach) == (str(slos[1]), True)


def test_a_noisy_rate_is_found_within_its_interval():
    """Median 1 / (1 - rate / 20) passes 2 s / P90 at 20 * (1 - P90 / 2)."""
    knee, held = 20 * (1 - P90 / 2), []
    for seed in range(8):
        server = MadeUpServer(lambda rate: 1 / max(0.1, 1 - rate / 20), noise=0.3, seed=seed)
        answer = answer_of(search_over("rate_per_s", least=0.01, start=1.0), server)
        held.append(answer.low <= knee <= answer.high)
        assert answer.value == pytest.approx(knee, rel=0.35)
    assert np.mean(held) >= 0.75


def test_a_rate_is_searched_upwards_and_downwards():
    """Latency 1 / (capacity - rate) passes 2 s at capacity - 0.5."""
    for capacity in (0.7, 8.0):
        server = MadeUpServer(lambda rate, most=capacity: 1 / max(1e-3, most - rate))
        answer = answer_of(search_over("rate_per_s", least=0.01), server)
        knee = capacity - 0.5
        assert answer.value <= knee <= answer.first_breach <= 1.0501 * answer.value


@pytest.mark.parametrize(("slots", "service_s"), [(8, 0.12), (2, 0.9), (200, 1.2)])
def test_a_rate_that_a_queue_hardly_cannot_carry_is_seen_to_grow(slots, service_s):
    """More than slots / service_s never ends well; a level of ten answers would not show 5 %."""
    carried = slots / service_s
    answer = answer_of(search_over("rate_per_s", least=0.01, start=1.0), Queue(slots, service_s))
    assert carried / 1.051 <= answer.value <= 1.051 * carried
    assert answer.low <= carried <= answer.first_breach <= 1.051 * 1.051 * carried


def test_an_slo_that_not_even_one_user_meets_has_no_value():
    answer = answer_of(search_over(), MadeUpServer(lambda c: 5.0))
    assert (answer.value, answer.first_breach, answer.high) == (None, 1, 1)


def test_a_server_that_never_breaks_is_followed_to_the_most_allowed_only():
    answer = answer_of(search_over(most=64), MadeUpServer(lambda c: 1.0))
    assert (answer.value, answer.first_breach, answer.high) == (64, None, None)
    assert answer.to_json()["value"] == 64


def test_the_ends_of_the_bracket_rest_on_enough_requests():
    """A p90 needs 29; a miss by every one of 14 needs no more: 0.1 ** 14 by chance."""
    lines, _ = run_search(search_over(), MadeUpServer(lambda c: 0.3 * c))
    last = {line.load.concurrency: line for line in lines}
    assert last[6].requests >= 29
    assert last[7].search.planned >= 29 or last[7].search.sure


@pytest.mark.parametrize(("over", "sure"), [(3, False), (6, False), (7, True), (20, True)])
def test_a_miss_is_sure_where_chance_hardly_makes_it(over, sure):
    """Of 20 with a tenth allowed over the limit: P(6 or more) is 0.0113, P(7 or more) 0.0024."""
    times = [10.0] * over + [1.0] * (20 - over)
    records = tuple(RequestRecord(i, 0.0, Exchange(0.0, (t / 2, t))) for i, t in enumerate(times))
    spec = LevelSpec(0, Load(concurrency=1), num_requests=20)
    judged = judge_level(LevelRun(spec, 1, records), SLOS)
    assert (judged.passed, judged.sure) == (False, sure)
    assert not judge_level(LevelRun(spec, 1, records), (parse_slo("e2e_mean<=1ms"),)).sure


def test_a_resumed_search_goes_on_as_it_would_have_gone():
    search = search_over()
    lines, _ = run_search(search, MadeUpServer(KNOWN["linear"][0]))
    for done in range(len(lines)):
        spec = search.next_level(lines[:done])
        assert (spec.index, spec.concurrency) == (done, lines[done].load.concurrency)


def test_a_whole_search_asks_for_nothing_more():
    lines, _ = run_search(search_over(), MadeUpServer(KNOWN["linear"][0]))
    assert search_over().next_level(lines) is None


@pytest.mark.parametrize(
    ("slo", "n", "over"), [("e2e_p90<=2s", 30, 3), ("e2e_p50<=2s", 11, 6), ("e2e_p99<=2s", 300, 4)]
)
def test_a_miss_is_certain_exactly_when_the_rest_cannot_save_it(slo, n, over):
    """`over` slow answers and otherwise instant ones miss; one slow answer less does not."""
    slos = (parse_slo(slo),)

    def finished(slow):
        times = [10.0] * slow + [1.0] * (n - slow)
        return [RequestRecord(i, 0.0, Exchange(0.0, (t / 2, t))) for i, t in enumerate(times)]

    def misses(slow):
        spec = LevelSpec(0, Load(concurrency=1), num_requests=n)
        return not judge_level(LevelRun(spec, 1, tuple(finished(slow))), slos).passed

    watch = CertainMiss(slos, LevelSpec(0, Load(concurrency=1), num_requests=n))
    certain = [watch.add(record) for record in finished(n)]
    first = certain.index(True) + 1
    # linear quantiles reach between two values, so a miss may come one slow answer earlier
    assert misses(first)
    assert first - 1 <= over <= first
    assert not misses(first - 2)


def test_a_mean_is_lost_once_the_sum_is():
    spec = LevelSpec(0, Load(concurrency=1), num_requests=4)
    watch = CertainMiss((parse_slo("e2e_mean<=1s"),), spec)
    answers = [RequestRecord(i, 0.0, Exchange(0.0, (1.0, 2.0))) for i in range(3)]
    assert [watch.add(record) for record in answers] == [False, False, True]


def test_a_failed_request_is_endless():
    """One failure in ten is above a p90's place, two are not."""
    good = [RequestRecord(i, 0.0, Exchange(0.0, (0.5, 1.0))) for i in range(19)]
    bad = RequestRecord(19, 0.0, Exchange(0.0, ended_s=0.1), status="overloaded")
    spec = LevelSpec(0, Load(concurrency=1), num_requests=20)
    one = judge_level(LevelRun(spec, 1, (*good, bad)), SLOS)
    three = judge_level(LevelRun(spec, 1, (*good[:17], bad, bad, bad)), SLOS)
    assert (one.passed, three.passed, three.ratio) == (True, False, math.inf)
    assert three.to_json()["ratio"] is None


def test_a_level_that_time_outs_ended_has_missed_however_fast_its_first_answers_were():
    records = tuple(RequestRecord(i, 0.0, Exchange(0.0, (0.5, 1.0))) for i in range(30))
    run = LevelRun(LevelSpec(0, Load(concurrency=1), num_requests=40), 1, records, "timeout")
    assert not judge_level(run, SLOS).passed
    assert summarise_level(run).stopped_by == "timeout"


def line_of(users, ratio, noise, *, requests=None):
    """A finished level's line, as far as a search reads it."""
    sent = 3 * users if requests is None else requests
    judged = Judgement(ratio <= 1, ratio, "e2e_p90<=2000ms", sent, noise=noise)
    return Level(0, 1, Load(concurrency=users), requests=sent, search=judged)


def test_a_bracket_that_all_other_levels_contradict_gets_another_level_where_they_see_it():
    """Ratios of users / 50 at 20, 40, 80 and 100, told well; 60 and 62 are vague."""
    known = [line_of(20, 0.4, 0.02), line_of(40, 0.8, 0.02), line_of(80, 1.6, 0.02), line_of(100, 2.0, 0.02)]
    vague = [line_of(60, 0.99, 0.3), line_of(62, 1.02, 0.3)]
    level = search_over().next_level(known + vague)
    assert level.concurrency == pytest.approx(50, abs=2)
    assert level.counted_requests == 3 * level.concurrency
    clear = [line_of(48, 0.96, 0.02), line_of(50, 1.01, 0.02)]
    assert search_over().next_level(known + clear) is None


def test_an_end_rests_on_its_neighbours_requests_too():
    """A look at 100 users needs 300 requests, or the rest of them from within 5 %."""
    far = [line_of(50, 0.8, 0.1), line_of(200, 1.3, 0.1)]
    look = line_of(100, 0.99, 0.1, requests=200)
    assert search_over().next_level([*far, look, line_of(104, 1.01, 0.1)]) is None
    alone = search_over().next_level([*far, look, line_of(105, 1.01, 0.1, requests=20)])
    assert (alone.concurrency, alone.counted_requests) == (100, 300)


def test_a_rate_that_a_look_passed_is_tried_in_a_whole_level():
    """However sure the curve is: an idle answer of 1 s of 2 s leaves 1 s / (5 % * 0.9) = 22.2 s."""
    clear = [line_of(5, 0.5, 1e-3), line_of(20, 2.0, 1e-3)]
    ends = [line_of(9.9, 0.99, 1e-3, requests=40), line_of(10.1, 1.01, 1e-3, requests=400)]
    lines = [
        replace(line, load=Load(rate_per_s=line.load.concurrency), latency={"e2e": Statistics(mean=1000.0)})
        for line in clear + ends
    ]
    level = search_over("rate_per_s", least=0.01).next_level(lines)
    assert (level.rate_per_s, level.num_requests) == (9.9, math.ceil(9.9 / (0.05 * 0.9)))


SHAPES = (
    lambda c: 1.2 + c / 80,
    lambda c: max(0.4, c / 9),
    lambda c: 0.6 if c <= 37 else 7.0,
    lambda c: 0.7 / max(0.05, 1 - c / 70),
    lambda c: 1.6 * (1 + 0.3 * math.sin(c)),  # falls with the load, which no server ought to
)


@pytest.mark.parametrize("noise", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("shape", range(len(SHAPES)))
def test_any_server_ends_in_a_bracket_of_five_percent_that_the_interval_holds(shape, noise):
    search = search_over(most=200.0)
    server = MadeUpServer(SHAPES[shape], noise=noise, seed=shape, error_above=150)
    lines, _ = run_search(search, server)
    answer = slo_answer(search, lines)
    assert len(lines) < 25
    assert answer.first_breach is not None
    if answer.value is None:
        assert (answer.first_breach, answer.low) == (1, 0.0)
        return
    assert answer.first_breach - answer.value <= max(1, 0.051 * answer.value)
    assert 0 <= answer.low <= answer.value < answer.first_breach <= answer.high < math.inf
