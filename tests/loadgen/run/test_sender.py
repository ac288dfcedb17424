"""A cap on the requests in flight of an open loop."""

from __future__ import annotations

import asyncio
import statistics

import pytest

from lmi_bench.analysis.results.checks import check_level
from lmi_bench.analysis.results.latency import summarise_level
from lmi_bench.core.clock import run_virtual
from lmi_bench.core.load import Load
from lmi_bench.core.workload import LevelSpec, PlannedRequest, of_sessions
from lmi_bench.loadgen.prompts.prompts import Lengths, SyntheticPrompts, no_text
from lmi_bench.loadgen.run.sender import Sender
from lmi_bench.loadgen.run.sweep import run_sweep
from tests.loadgen.run.test_sessions import Answering, dialogues


def level(**fields):
    """A line and its run: 8 requests at 10/s against half a second an answer."""
    runs = []
    spec = LevelSpec(0, Load(rate_per_s=10.0, arrivals="constant"), num_requests=8, warmup_requests=0, **fields)
    target = Answering()
    result = run_virtual(
        run_sweep(
            [spec],
            target,
            None,
            prompts=SyntheticPrompts([Lengths(8, 1)], no_text, seed=0),
            summarise=summarise_level,
            on_level=lambda run, _line: runs.append(run),
        )
    )
    return result[0], runs[0], target


def test_latency_from_the_due_time_holds_the_wait_that_the_cap_caused():
    """Request i is due at i / 10 s and sent at i / 2 s: it waits 0.4 i s, 1.4 s on average."""
    line, run, target = level(max_in_flight=1)
    assert target.most == 1
    from_sent = statistics.fmean(r.token_times_s[0] - r.sent_s for r in run.records)
    assert from_sent == pytest.approx(0.5)
    assert line.of("ttft_from_sent").mean == pytest.approx(500.0)
    assert line.of("ttft").mean == pytest.approx(1900.0)
    assert line.of("dispatch_delay").mean == pytest.approx(1400.0)
    assert (line.held.requests, line.held.mean_ms) == (7, pytest.approx(1600.0))


def test_a_cap_that_holds_requests_back_is_said_and_nobody_is_blamed():
    """Sent within 3.5 s instead of 0.7 s: 2 of 10 req/s."""
    line, _, _ = level(max_in_flight=1)
    assert line.valid
    (warning,) = [text for text in check_level(line) if "cap" in text]
    assert "7 requests back" in warning
    assert "2 of 10 req/s" in warning


def test_a_cap_that_is_never_reached_changes_nothing():
    line, _, _ = level(max_in_flight=8)
    assert line.held is None
    assert line.of("ttft").mean == pytest.approx(500.0)


def test_on_a_real_clock_only_what_waits_counts_as_held():
    """Taking a free place takes microseconds, which are no wait."""
    sender = Sender(Answering().send, timeout_s=None, max_in_flight=2)
    request = PlannedRequest(0, 0.0, input_tokens=1, output_tokens=1)

    async def main():
        asked = [sender.measure(request, 0.0) for _ in range(3)]
        return [measured.held_s for measured in await asyncio.gather(*asked)]

    first, second, third = asyncio.run(main())
    assert first == second == 0.0
    assert third > 0.1


class Narrow(Answering):
    """Has one connection, as `--connections 1` makes it."""

    max_connections = 1


class Stuck:
    """Never answers."""

    def __init__(self):
        self.asked = 0

    async def send(self, request):
        self.asked += 1
        await asyncio.Event().wait()


def sweep_of(target, *specs, timeout_s):
    lines = run_virtual(
        run_sweep(
            specs,
            target,
            None,
            prompts=SyntheticPrompts([Lengths(8, 1)], no_text, seed=0),
            summarise=summarise_level,
            timeout_s=timeout_s,
        )
    )
    return lines[0]


@pytest.mark.parametrize("load", [Load(concurrency=4), Load(rate_per_s=8.0, arrivals="constant")])
def test_a_time_out_does_not_count_the_wait_for_a_connection(load):
    """Half a second each, one at a time: the fourth waits 1.5 s and is answered within 0.6 s."""
    target = Narrow()
    line = sweep_of(target, LevelSpec(0, load, num_requests=4), timeout_s=0.6)
    assert (line.requests, line.errors) == (4, 0)
    assert target.most == 1
    assert line.held.requests >= 3


@pytest.mark.parametrize(("load", "cap"), [(Load(concurrency=8), {}), (Load(rate_per_s=8.0), {"max_in_flight": 1})])
def test_what_waits_when_a_level_is_stopped_is_never_sent(load, cap):
    """One time-out ends the level; seven more, one after the other, would take 7 times as long."""
    target = Stuck()
    target.max_connections = 1
    line = sweep_of(target, LevelSpec(0, load, num_requests=8, **cap), timeout_s=5.0)
    assert target.asked == line.requests == 1
    assert line.stopped_by == "timeout"


def test_conversations_that_wait_for_a_place_end_with_the_level():
    target = Stuck()
    source = dialogues()
    alone = LevelSpec(0, Load(concurrency=3), num_requests=1, warmup_requests=0, max_in_flight=1)
    spec = of_sessions(alone, source.num_turns, num_sessions=3, max_sessions=None)
    line = run_virtual(run_sweep([spec], target, None, prompts=source, summarise=summarise_level, timeout_s=5.0))[0]
    assert target.asked == line.requests == 1
