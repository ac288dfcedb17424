"""Levels picked as the sweep goes, on servers whose knees are known."""

from __future__ import annotations

from lmi_bench.analysis.results.latency import summarise_level
from lmi_bench.analysis.search.next_level import auto_levels
from lmi_bench.core.slo import parse_slo
from lmi_bench.core.workload import LevelSizes
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
    assert loads[:8] == [1, 2, 4, 8, 16, 32, 64, 128]
    assert loads[8:10] == [32, 128]  # the pair that shows it is measured again
    assert 256 not in loads


class SlowAtFirst(MadeUpServer):
    """A server whose first answers at some loads take long, as on a machine that others use."""

    def __init__(self, latency, slow):
        super().__init__(latency)
        self.slow = dict(slow)

    def level(self, spec, slos=()):
        factor = self.slow.pop(spec.concurrency, 1.0)
        usual, self.latency = self.latency, lambda load: factor * usual(load)
        run = super().level(spec, slos)
        self.latency = usual
        return run


def test_one_slow_level_does_not_end_the_doubling():
    """The second level is three times as slow as it should be: 1 to 2 users gain nothing."""
    loads = loads_of(auto_levels(LevelSizes()), SlowAtFirst(lambda c: max(0.5, c / 40), {2: 3}))
    assert loads[:10] == [1, 2, 4, 8, 16, 32, 64, 128, 32, 128]


def test_two_slow_levels_do_not_end_it_once_they_are_measured_again():
    """1, 2 and 4 users look alike; the second time 4 users have four times the throughput of 1."""
    server = SlowAtFirst(lambda c: max(0.5, c / 40), {2: 2, 4: 4})
    loads = loads_of(auto_levels(LevelSizes()), server)
    assert loads[:6] == [1, 2, 4, 1, 4, 8]
    assert max(loads) == 128


def test_a_broken_limit_is_measured_again_before_it_ends_the_doubling():
    slos = [parse_slo("e2e_p90<=1s")]
    server = SlowAtFirst(lambda c: 0.3 + c / 10, {2: 3})
    loads = loads_of(auto_levels(LevelSizes(), slos=slos), server)
    assert loads[:6] == [1, 2, 2, 4, 8, 8]


def test_finer_levels_stand_round_the_bend():
    loads = loads_of(auto_levels(LevelSizes()), MadeUpServer(lambda c: max(0.5, c / 64)))
    assert {24, 48} <= set(loads[loads.index(max(loads)) + 1 :])


def test_a_server_that_is_never_full_is_followed_to_the_most_allowed():
    rule = auto_levels(LevelSizes(), max_concurrency=16)
    assert loads_of(rule, MadeUpServer(lambda c: 0.01))[:5] == [1, 2, 4, 8, 16]
    assert max(loads_of(rule, MadeUpServer(lambda c: 0.01))) == 16


def test_the_best_level_is_measured_again_where_the_doubling_was_not_decided():
    rule = auto_levels(LevelSizes(), max_concurrency=16)
    assert loads_of(rule, MadeUpServer(lambda c: 0.01)) == [1, 2, 4, 8, 16, 16]


def test_the_first_broken_limit_ends_the_doubling():
    rule = auto_levels(LevelSizes(), slos=[parse_slo("e2e_p90<=1s")])
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
    assert [spec.index for spec in again] == [line.index for line in lines]
    assert len({spec.index for spec in again}) == len(lines) - 2  # two were measured again
