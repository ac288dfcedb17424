"""A cap on the requests in flight of an open loop."""

from __future__ import annotations

import statistics

import pytest

from lmi_bench.analysis.checks import check_level
from lmi_bench.analysis.latency import summarise_level
from lmi_bench.clock import run_virtual
from lmi_bench.loadgen.prompts import Lengths, NoText, SyntheticPrompts
from lmi_bench.loadgen.sweep import run_sweep
from lmi_bench.workload import LevelSpec
from tests.loadgen.test_sessions import Answering


def level(**fields):
    """A line and its run: 8 requests at 10/s against half a second an answer."""
    runs = []
    spec = LevelSpec(
        0, rate_per_s=10.0, arrivals="constant", num_requests=8, warmup_requests=0, **fields
    )
    target = Answering()
    result = run_virtual(
        run_sweep(
            [spec],
            target,
            None,
            prompts=SyntheticPrompts([Lengths(8, 1)], NoText(), seed=0),
            summarise=summarise_level,
            on_level=lambda run, _line: runs.append(run),
        )
    )
    return result.levels[0], runs[0], target


def test_latency_from_the_due_time_holds_the_wait_that_the_cap_caused():
    """Request i is due at i / 10 s and sent at i / 2 s: it waits 0.4 i s, 1.4 s on average."""
    line, run, target = level(max_in_flight=1)
    assert target.most == 1
    from_sent = statistics.fmean(r.token_times_s[0] - r.sent_s for r in run.records)
    assert from_sent == pytest.approx(0.5)
    assert line["ttft_from_sent_ms"]["mean"] == pytest.approx(500.0)
    assert line["ttft_ms"]["mean"] == pytest.approx(1900.0)
    assert line["dispatch_delay_ms"]["mean"] == pytest.approx(1400.0)
    assert line["held"] == {"requests": 7, "mean_ms": pytest.approx(1600.0)}


def test_a_cap_that_holds_requests_back_is_said_and_nobody_is_blamed():
    """Sent within 3.5 s instead of 0.7 s: 2 of 10 req/s."""
    line, _, _ = level(max_in_flight=1)
    assert line["valid"]
    (warning,) = [text for text in check_level(line) if "cap" in text]
    assert "7 requests back" in warning
    assert "2 of 10 req/s" in warning


def test_a_cap_that_is_never_reached_changes_nothing():
    line, _, _ = level(max_in_flight=8)
    assert "held" not in line
    assert line["ttft_ms"]["mean"] == pytest.approx(500.0)
