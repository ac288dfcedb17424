"""Levels picked as the sweep goes, on servers whose knees are known."""

from __future__ import annotations

from lmi_bench.analysis.results.latency import summarise_level
from lmi_bench.analysis.search.next_level import LevelSizes, auto_levels
from lmi_bench.core.slo import parse_slo
from tests.analysis.search.servers import MadeUpServer


def loads_of(rule, server):
    lines = []
    while (spec := rule(lines)) is not None:
        lines.append(summarise_level(server.level(spec)))
        assert len(lines) < 40
    return [line.load.concurrency for line in lines]


def test_doubling_ends_where_throughput_stands_and_latency_doubles():
    """Throughput grows up to 20 users; from 32 to 64 it stands and latency doubles."""
    loads = loads_of(auto_levels(LevelSizes()), MadeUpServer(lambda c: max(0.5, c / 40)))
    assert loads[:7] == [1, 2, 4, 8, 16, 32, 64]
    assert 128 not in loads


def test_finer_levels_stand_round_the_bend():
    loads = loads_of(auto_levels(LevelSizes()), MadeUpServer(lambda c: max(0.5, c / 64)))
    assert {24, 48} <= set(loads[loads.index(max(loads)) + 1 :])


def test_a_server_that_is_never_full_is_followed_to_the_most_allowed():
    rule = auto_levels(LevelSizes(), max_concurrency=16)
    assert loads_of(rule, MadeUpServer(lambda c: 0.01))[:5] == [1, 2, 4, 8, 16]
    assert max(loads_of(rule, MadeUpServer(lambda c: 0.01))) == 16


def test_the_first_broken_limit_ends_the_doubling():
    rule = auto_levels(LevelSizes(requests_per_user=30), slos=[parse_slo("e2e_p90<=1s")])
    loads = loads_of(rule, MadeUpServer(lambda c: 0.3 + c / 10))
    assert max(loads) == 8  # 0.7 s at 4, 1.1 s at 8


def test_failing_requests_end_the_doubling_and_the_gap_below_is_looked_into():
    loads = loads_of(auto_levels(LevelSizes()), MadeUpServer(lambda c: 0.05, error_above=100))
    assert max(loads) == 128
    assert 96 in loads


def test_a_resumed_sweep_goes_on_as_it_would_have_gone():
    rule, server = auto_levels(LevelSizes()), MadeUpServer(lambda c: max(0.5, c / 40))
    lines = []
    while (spec := rule(lines)) is not None:
        lines.append(summarise_level(server.level(spec)))
    again = [rule(lines[:n]) for n in range(len(lines))]
    assert [spec.concurrency for spec in again] == [line.load.concurrency for line in lines]
    assert [spec.index for spec in again] == list(range(len(lines)))
