"""Early stopping: the interval covers the truth however often it was looked at."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lmi_bench.analysis.results.early_stop import QuantileWatch, StopWhen, parse_stop_when
from lmi_bench.core.errors import InputError
from lmi_bench.core.exchange import Exchange
from lmi_bench.core.level import Level
from lmi_bench.core.load import Load
from lmi_bench.core.records import RequestRecord
from lmi_bench.core.workload import LevelSpec
from tests.levels import level_of

SPEC = LevelSpec(0, Load(rate_per_s=10), num_requests=10_000)


def answer(number, ttft_s):
    return RequestRecord(number, 0.0, Exchange(0.0, (ttft_s, ttft_s + 1)), output_tokens=2)


def level(rule, ttfts_s, spec=SPEC):
    """The watch of a level after its end, by the rule or with its last request."""
    watch = QuantileWatch(rule, spec)
    for number, ttft_s in enumerate(ttfts_s):
        if watch.add(answer(number, ttft_s)):
            break
    return watch


def independent(values, quantile):
    """The values in an order in which neighbours lie on different sides of the quantile."""
    for seed in range(100):
        mixed = np.random.default_rng(seed).permutation(np.array(values, dtype=float))
        left = (mixed > np.quantile(mixed, quantile)) - (1 - quantile)
        if left[:-1] @ left[1:] < 0:
            return mixed.tolist()
    raise AssertionError


@pytest.mark.parametrize("rule", ["ttft_p50:10%", "ttft_p90:15%", "ttft_p99:25%"])
def test_batches_whose_requests_depend_on_each_other_are_covered_too(rule):
    """Batches of 8 share half of the variance of a log-normal latency."""
    rule, rng, held = parse_stop_when(rule), np.random.default_rng(1), []
    score = {0.5: 0.0, 0.9: 1.2815515655446004, 0.99: 2.3263478740408408}[rule.quantile]
    for _ in range(300):
        own, shared = (rng.standard_normal(rule.looks[-1]), rng.standard_normal(rule.looks[-1] // 8 + 1))
        values_ms = np.exp(0.4 * (own + np.repeat(shared, 8)[: own.size]) / np.sqrt(2))
        looks = (rule.look(values_ms[:number]) for number in rule.looks)
        found = next(known for known in looks if known.reached)
        held.append(found.low_ms <= np.exp(0.4 * score) <= found.high_ms)
    assert np.mean(held) >= 0.95


def test_the_interval_of_the_level_that_ended_covers_the_truth_in_95_of_100():
    """Exponential TTFTs of mean 1 s: the p90 is ln 10. With 5 % at each look it is 94 of 100."""
    rule, rng, held = StopWhen("ttft", 0.9, 0.15), np.random.default_rng(1), []
    for _ in range(1000):
        values_ms = rng.exponential(1000, size=rule.looks[-1])
        looks = (rule.look(values_ms[:number]) for number in rule.looks)
        found = next(known for known in looks if known.reached)
        held.append(found.low_ms <= 1000 * math.log(10) <= found.high_ms)
    assert np.mean(held) >= 0.95


@pytest.mark.parametrize(("quantile", "least"), [(0.5, 100), (0.9, 100), (0.99, 597), (0.01, 597)])
def test_the_ends_of_the_interval_are_the_order_statistics_of_the_binomial(quantile, least):
    """Ranks by summing the exact probabilities; values equal their ranks, in no order."""
    rule = StopWhen("ttft", quantile, 0.001)
    assert rule.looks[0] == least
    found = level(rule, independent(range(1, least + 1), quantile)).known
    chances = [math.comb(least, k) * quantile**k * (1 - quantile) ** (least - k) for k in range(least + 1)]
    low = max(rank for rank in range(1, least + 1) if sum(chances[:rank]) <= 0.0025 or rank == 1)
    high = min(rank for rank in range(1, least + 1) if sum(chances[rank:]) <= 0.0025)
    assert (found.low_ms, found.high_ms) == (1000 * low, 1000 * high)
    assert (found.requests, found.looks, found.reached) == (least, 1, False)


@pytest.mark.parametrize(("quantile", "rare_ms"), [(0.99, 101.0), (0.01, 99.0)])
@pytest.mark.parametrize("in_a_row", [True, False])
def test_a_look_without_a_value_beyond_the_quantile_is_no_end(quantile, rare_ms, in_a_row):
    """Six rare values in a row know as much as one or two: fewer than 597 independent requests
    have none that lies beyond a p99 in 99.75 of 100 levels. Apart they are as many as requests."""
    values_ms = np.full(597, 100.0)
    values_ms[300:306] = rare_ms
    if not in_a_row:
        values_ms = np.array(independent(values_ms, quantile))
    known = StopWhen("ttft", quantile, 0.05).look(values_ms)
    assert known.reached is not in_a_row
    assert known.within == pytest.approx(1.0 if in_a_row else 0.01, rel=0.05)


def test_a_quantile_of_zero_is_known_only_where_its_interval_is_zero_too():
    """Of 100 values 40 are 5 ms: the median is 0, its interval reaches the 65th value."""
    rule = StopWhen("dispatch_delay", 0.5, 0.05)
    assert rule.look([0.0] * 100).reached
    known = rule.look(independent([0.0] * 60 + [5.0] * 40, 0.5))
    assert (known.low_ms, known.high_ms, known.reached) == (0.0, 5.0, False)


def test_a_level_ends_at_the_first_look_that_is_narrow_enough_and_says_what_was_reached():
    """Equal TTFTs are known at the first look; 100 beside 5 first requests of users."""
    spec = LevelSpec(0, Load(concurrency=5), num_requests=1000, start_requests=5)
    watch = level(StopWhen("ttft", 0.9, 0.05), [9.0] * 5 + [0.5] * 900, spec)
    known = watch.known
    assert (known.requests, known.within, known.low_ms) == (100, 0.0, 500.0)
    line = level_of(known=known.to_json())
    assert Level.from_json(line.to_json()).known == known


def test_requests_that_ended_early_wait_for_those_sent_before_them():
    """99 fast answers and one that is still in flight are no look; nor is a failed request one."""
    watch = QuantileWatch(StopWhen("ttft", 0.5, 0.05), SPEC)
    assert not any(watch.add(answer(number, 0.1)) for number in range(1, 101))
    assert watch.known is None
    failed = RequestRecord(0, 0.0, Exchange(0.0), status="timeout")
    assert watch.add(failed)
    assert watch.known.requests == 100


@pytest.mark.parametrize("text", ["ttft_p99:5%", "ttft_p99 : 5 %"])
def test_a_rule_is_read(text):
    assert parse_stop_when(text) == StopWhen("ttft", 0.99, 0.05)


@pytest.mark.parametrize("text", ["ttft_p99", "itl_p99:5%", "ttft_p100:5%", "ttft_p99:0%"])
def test_what_is_no_rule_names_the_grammar(text):
    with pytest.raises(InputError, match=r"METRIC_pNN:X%"):
        parse_stop_when(text)


def test_a_level_with_too_few_requests_or_conversations_is_refused():
    rule = parse_stop_when("e2e_p97.5:5%")
    with pytest.raises(InputError, match=r"e2e_p97.5: 10 req/s counts 100 requests, the first"):
        rule.check(LevelSpec(0, Load(rate_per_s=10), num_requests=100))
    with pytest.raises(InputError, match="turns of a conversation"):
        rule.check(LevelSpec(0, Load(concurrency=1, sessions=True), num_requests=9999))
    rule.check(LevelSpec(0, Load(rate_per_s=10), duration_s=60))
