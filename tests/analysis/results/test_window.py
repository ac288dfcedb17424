"""Steady window: the plateau of a rate that is known by construction."""

from __future__ import annotations

import numpy as np
import pytest

from lmi_bench.analysis.results.columns import columns_of
from lmi_bench.analysis.results.window import steady_window
from lmi_bench.core.exchange import Exchange
from lmi_bench.core.records import RequestRecord


def request(index, times, sent=0.0):
    return RequestRecord(index, sent, Exchange(sent, tuple(float(t) for t in times)))


def steady(records):
    return steady_window(columns_of(records))


def test_a_cold_start_and_a_drain_are_cut_off():
    """10 tok/s for 5 s, 100 tok/s for 20 s, 20 tok/s for 5 s: whole run 71.7, plateau 100."""
    times = np.concatenate([np.arange(0, 5, 0.1), np.arange(5, 25, 0.01), np.arange(25, 30, 0.05)])
    window = steady([request(i, times[i::4]) for i in range(4)])
    assert len(times) / 30 == pytest.approx(71.7, rel=0.01)
    assert window.throughput_tokens_per_s == pytest.approx(100, rel=0.02)
    assert 4.5 <= window.start_s <= 8  # inside the plateau, give or take a bin
    assert 22 <= window.end_s <= 25.5


def test_silence_before_the_first_token_is_not_steady():
    """Sent at 0, the first token only at 10 s: the wait is ramp."""
    window = steady([request(0, np.arange(10, 30, 0.02))])
    assert window.start_s >= 9.5
    assert window.throughput_tokens_per_s == pytest.approx(50, rel=0.02)


def test_a_level_that_is_steady_throughout_keeps_nearly_all_of_it():
    rng = np.random.default_rng(3)
    times = np.cumsum(rng.exponential(0.01, 5000))
    window = steady([request(0, times)])
    assert window.share > 0.6
    assert window.low < 100 < window.high


def test_tokens_are_counted_not_events():
    """Events of three tokens, ten a second: 30 tok/s."""
    times = tuple(np.arange(0.1, 30, 0.1))
    bundled = RequestRecord(0, 0.0, Exchange(0.0, times, (3,) * len(times)))
    assert steady([bundled]).throughput_tokens_per_s == pytest.approx(30, rel=0.02)


def test_the_servers_count_wins_over_the_events_as_it_does_for_the_level():
    """Ten events a second that show one token each, of which the server counted 3 a piece."""
    times = tuple(np.arange(0.1, 30, 0.1))
    record = RequestRecord(0, 0.0, Exchange(0.0, times), output_tokens=3 * len(times))
    assert steady([record]).throughput_tokens_per_s == pytest.approx(30, rel=0.02)


@pytest.mark.parametrize(
    ("records", "reason"),
    [
        ([], "no tokens"),
        ([request(0, range(10))], "needs 80 moments with tokens, has 10"),
        ([RequestRecord(0, 0.0, Exchange(0.0), status="timeout")], "no tokens"),
    ],
)
def test_too_little_to_tell_says_so(records, reason):
    window = steady(records)
    assert window.throughput_tokens_per_s is None
    assert reason in window.reason


@pytest.mark.parametrize("seed", range(5))
def test_the_interval_covers_the_plateau_for_most_seeds(seed):
    """Poisson tokens at 200/s: batch means cover the truth within their stated width."""
    rng = np.random.default_rng(seed)
    times = np.cumsum(rng.exponential(1 / 200, 8000))
    window = steady([request(0, times)])
    assert window.throughput_tokens_per_s == pytest.approx(200, rel=0.06)
    assert (window.high - window.low) / 200 < 0.2
