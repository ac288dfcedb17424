"""A measured level says kept or missed only where another such level would say the same."""

from __future__ import annotations

import numpy as np
import pytest

from lmi_bench.analysis.fleet.measured_load import MeasuredLoad, pooled, ratio_by_blocks, settled
from lmi_bench.catalog.accelerators import NO_LINK
from lmi_bench.core.exchange import Exchange
from lmi_bench.core.records import RequestRecord
from lmi_bench.core.slo import parse_slo

KEY = ("A10G", NO_LINK, 1)
LIMIT = parse_slo("ttft_p90<=1s")


def record(index, ttft_s, due_s=None, status="ok"):
    due_s = float(index) if due_s is None else due_s
    times = (due_s + ttft_s, due_s + ttft_s + 0.1) if status == "ok" else ()
    return RequestRecord(index, due_s, Exchange(due_s, times), status=status)


def load_of(ttfts_s, **options):
    return MeasuredLoad(KEY, 1.0, tuple(record(i, t) for i, t in enumerate(ttfts_s)), **options)


def with_slow_share(share, requests, seed=0):
    slow = np.random.default_rng(seed).random(requests) < share
    return load_of(np.where(slow, 2.0, 0.5).tolist())


def test_five_per_cent_slow_requests_keep_a_p90():
    assert with_slow_share(0.05, 1000).verdict([LIMIT]) == "kept"


def test_fifteen_per_cent_slow_requests_miss_a_p90():
    assert with_slow_share(0.15, 1000).verdict([LIMIT]) == "missed"


def test_a_share_on_the_line_is_open():
    """Ten of each hundred: the ratio is 0.1 exactly and its error is not 0."""
    ttfts_s = [2.0 if index % 100 < 10 else 0.5 for index in range(450)]
    assert load_of(ttfts_s).verdict([LIMIT]) == "open"


def test_twenty_requests_tell_nothing_however_fast():
    assert load_of([0.1] * 20).verdict([LIMIT]) == "open"


def test_a_level_that_a_stop_rule_ended_has_missed():
    assert load_of([0.1] * 400, cut_short=True).verdict([LIMIT]) == "missed"


def test_failed_requests_count_as_endless():
    records = tuple(record(i, 0.1, status="ok" if i % 5 else "error") for i in range(400))
    assert MeasuredLoad(KEY, 1.0, records).verdict([LIMIT]) == "missed"
    mean = parse_slo("ttft_mean<=1s")
    assert MeasuredLoad(KEY, 1.0, records).verdict([mean]) == "missed"


def test_one_missed_slo_of_two_is_a_miss():
    load = load_of([0.5] * 400)
    assert load.verdict([LIMIT, parse_slo("ttft_p50<=400ms")]) == "missed"


def test_requests_that_move_together_widen_the_error():
    """Half of all blocks slow throughout: the standard error of a mean of 20 blocks, by hand.

    sqrt(sum of (1/2)**2 over 20 blocks / (20 * 19)) = 0.1147, where independent requests would
    give 0.5 / sqrt(400) = 0.025.
    """
    sums = np.repeat([0.0, 1.0] * 10, 20)
    ratio, error = ratio_by_blocks(sums, np.ones(400))
    assert ratio == 0.5
    assert error == pytest.approx(np.sqrt(20 * 0.25 / (20 * 19)))


def test_nine_of_ten_levels_on_the_line_are_not_called_kept():
    """The true share is the limit's own, so `kept` is wrong: at most one level in ten says it."""
    wrong = sum(with_slow_share(0.1, 400, seed).verdict([LIMIT]) == "kept" for seed in range(200))
    assert wrong / 200 < 0.15


def test_levels_at_the_same_rate_are_one_longer_level():
    first, second = load_of([0.5] * 100), load_of([0.5] * 200)
    (both,) = pooled([first, second])
    assert len(both.records) == 300


def test_requests_due_before_the_first_answer_are_the_ramp():
    records = [record(0, 3.0, 0.0), record(1, 0.5, 2.0), record(2, 0.5, 3.5), record(3, 0.5, 4.0)]
    assert [each.request_id for each in settled(records)] == [2, 3]


def test_a_long_level_on_the_line_is_near():
    """Every tenth of 4,000: the blocks agree, so the half interval is far below 5 %."""
    ttfts_s = [2.0 if index % 10 == 0 else 0.5 for index in range(4007)]
    assert load_of(ttfts_s).verdict([LIMIT]) == "near"
