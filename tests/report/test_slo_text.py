"""What the tables say of SLOs, on levels written out by hand."""

from __future__ import annotations

import pytest

from lmi_bench.core.exchange import Exchange
from lmi_bench.core.records import RequestRecord
from lmi_bench.core.slo import parse_slo
from lmi_bench.report.slo_text import met_and_missed
from tests.levels import level_of

SLOS = (parse_slo("ttft_mean<=1s"),)


@pytest.mark.parametrize(
    ("ttft_s", "valid", "highest"),
    [
        ((0.5, 0.8, 1.5), (True, True, True), 2),
        ((0.5, 1.5, 0.8), (True, True, True), 1),  # nothing beyond a miss
        ((0.5, 1.5, 0.8), (True, False, True), 4),  # an invalid level says nothing
        ((1.5, 0.5, 0.5), (True, True, True), None),
    ],
)
def test_the_highest_load_up_to_which_every_level_meets_the_slos(ttft_s, valid, highest):
    levels = [level_of(concurrency=n, valid=v) for n, v in zip((4, 2, 1), valid[::-1], strict=True)]
    records = [
        [
            RequestRecord(i, 0.0, Exchange(0.0, (t, t + 1), (1, 1), ended_s=t + 1), input_tokens=1, output_tokens=2)
            for i in range(5)
        ]
        for t in ttft_s[::-1]
    ]
    found, _ = met_and_missed(levels, records, SLOS)
    assert (found and found.load.concurrency) == highest


def test_a_level_with_too_few_requests_to_tell_is_no_breach():
    """p90 needs 29 requests: one user sent three, two sent six, four sent 30."""
    slos = (parse_slo("ttft_p90<=1s"),)
    levels = [level_of(concurrency=n) for n in (1, 2, 4)]
    records = [
        [
            RequestRecord(i, 0.0, Exchange(0.0, (0.5, 1.5), (1, 1), ended_s=1.5), input_tokens=1, output_tokens=2)
            for i in range(n)
        ]
        for n in (3, 6, 30)
    ]
    assert met_and_missed(levels, records, slos) == (levels[2], None)


def test_a_level_that_mostly_failed_meets_nothing():
    """The knee stops there as well: those who were answered had the server to themselves."""
    levels = [level_of(concurrency=n, valid=True, requests=5, errors=n) for n in (1, 4)]
    records = [[RequestRecord(i, 0.0, Exchange(0.0, (0.5,), (1,))) for i in range(5)]] * 2
    assert met_and_missed(levels, records, SLOS) == (levels[0], None)
