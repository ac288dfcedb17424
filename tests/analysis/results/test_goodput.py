"""Goodput and SLO verdicts on requests whose latencies are known."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lmi_bench.analysis.results.slo_results import check_slo, goodput
from lmi_bench.core.exchange import Exchange
from lmi_bench.core.records import RequestRecord
from lmi_bench.core.slo import parse_slo
from tests.levels import level_of


def request(index, first, last, **more):
    """Two tokens: the first after `first` seconds, the last after `last`."""
    return RequestRecord(index, 0.0, Exchange(0.0, (first, last)), **more)


def test_a_good_request_meets_every_slo_and_a_failed_one_none():
    """TTFT 0.5 and 1.5 s, TPOT 0.5, 0.5 and 4 s; the last to answer ends at 5 s."""
    records = [
        request(0, 0.5, 1.0),
        request(1, 1.5, 2.0),
        request(2, 0.5, 4.5),
        RequestRecord(3, 0.0, Exchange(0.0, ended_s=5.0), status="timeout"),
    ]
    slos = [parse_slo("ttft_p90<=1s"), parse_slo("tpot_mean<=600ms")]
    result = goodput(records, slos, open_loop=False)
    assert (result.good, result.requests) == (1, 4)
    assert result.share == pytest.approx(0.25)
    assert result.per_s == pytest.approx(1 / 5)


def test_itl_of_a_request_is_judged_by_the_statistic_over_its_own_gaps():
    """Gaps 0.1, 0.1 and 0.4 s: mean 0.2, and the p99 close to 0.4."""
    record = RequestRecord(0, 0.0, Exchange(0.0, (1.0, 1.1, 1.2, 1.6)))
    assert goodput([record], [parse_slo("itl_mean<=210ms")], open_loop=False).good == 1
    assert goodput([record], [parse_slo("itl_p99<=210ms")], open_loop=False).good == 0


def test_an_open_loop_is_judged_from_the_due_time():
    late = RequestRecord(0, 0.0, Exchange(2.0, (2.5, 3.0)))
    slo = [parse_slo("ttft_p50<=1s")]
    assert goodput([late], slo, open_loop=False).good == 1
    assert goodput([late], slo, open_loop=True).good == 0


def test_a_metric_that_a_request_does_not_have_cannot_be_missed():
    one_token = RequestRecord(0, 0.0, Exchange(0.0, (1.0,)))
    assert goodput([one_token], [parse_slo("tpot_mean<=1ms")], open_loop=False).good == 1


def test_an_answer_in_one_piece_neither_meets_nor_misses_a_time_within_it():
    """As a server that cannot stream answers: only its end is known, after 2 s."""
    whole = RequestRecord(0, 0.0, Exchange(0.0, (2.0,), (16,), streamed=False))
    slow_start, at_end = parse_slo("ttft_mean<=1ms"), parse_slo("e2e_mean<=1s")
    assert goodput([whole], [slow_start], open_loop=False).share is None
    assert goodput([whole], [slow_start, at_end], open_loop=False).share == 0
    assert goodput([whole, request(1, 1.5, 2.0)], [slow_start], open_loop=False).requests == 1


def test_nothing_sent_has_no_share():
    result = goodput([], [parse_slo("ttft_p90<=1s")], open_loop=False)
    assert (result.share, result.per_s) == (None, None)


@pytest.mark.parametrize(
    ("statistics", "verdict", "slack"),
    [
        ({"p90": 900.0}, "pass", 100.0),
        ({"p90": 1000.0}, "pass", 0.0),
        ({"p90": 1100.0}, "fail", -100.0),
        ({"p90": None, "min": 5.0, "unsupported": {"p90": "needs 29 samples, has 6"}}, "unsupported", None),
        ({"p90": None, "min": 2000.0, "unsupported": {"p90": "needs 29 samples, has 6"}}, "fail", None),
        ({}, "unsupported", None),
    ],
)
def test_a_level_passes_fails_or_cannot_say(statistics, verdict, slack):
    line = level_of(ttft_ms=statistics)
    result = check_slo(line, parse_slo("ttft_p90<=1s"))
    late = replace(line, valid=False, invalid_reason="client: requests left late")
    assert check_slo(late, parse_slo("ttft_p90<=1s")).verdict == "unsupported"
    assert result.verdict == verdict
    assert result.slack_ms == (None if slack is None else pytest.approx(slack))
    if verdict == "unsupported":
        assert result.reason
