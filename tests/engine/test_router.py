from __future__ import annotations

from itertools import cycle

import pytest

from lmi_bench.core.errors import InputError
from lmi_bench.engine.router import LeastOutstanding, RandomChoice, RoundRobin, make_router


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


@pytest.mark.parametrize("name", ["least-outstanding", "least_outstanding"])
def test_a_router_is_found_by_either_spelling_of_its_name(name):
    assert make_router(name).pick([2, 0]) == 1


def test_a_random_router_repeats_its_choices_with_its_seed():
    def picks(seed):
        router = make_router("random", seed)
        return [router.pick([0] * 8) for _ in range(20)]

    assert picks(1) == picks(1) != picks(2)


def test_a_router_that_does_not_exist_is_refused():
    with pytest.raises(InputError, match="--router nonsense: use one of round-robin, least-outstanding, prefix-affine"):
        make_router("nonsense")
