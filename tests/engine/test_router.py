from __future__ import annotations

from itertools import cycle

from lmi_bench.engine.router import LeastOutstanding, RandomChoice, RoundRobin


def test_round_robin_takes_one_after_the_other_however_busy():
    router = RoundRobin()
    assert [router.pick([9, 0, 5]) for _ in range(5)] == [0, 1, 2, 0, 1]


def test_least_outstanding_takes_the_least_busy_and_the_first_on_a_tie():
    router = LeastOutstanding()
    assert [router.pick(counts) for counts in ([3, 1, 2], [2, 2], [4, 0, 0])] == [1, 0, 1]


def test_a_draw_falls_on_the_replica_of_its_share():
    """Thirds of [0, 1)."""
    router = RandomChoice(cycle([0.0, 0.33, 0.34, 0.66, 0.67, 0.999]))
    assert [router.pick([0, 0, 0]) for _ in range(6)] == [0, 0, 1, 1, 2, 2]
