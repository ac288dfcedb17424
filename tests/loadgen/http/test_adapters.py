"""Adapters are drawn in exact shares, by the seed, and stay with their conversation."""

from collections import Counter
from fractions import Fraction

import pytest

from lmi_bench.core.workload import PlannedRequest
from lmi_bench.loadgen.http.adapters import AdapterDraw


def drawn(shares, seed, numbers, **more):
    draw = AdapterDraw(shares, seed)
    return [draw(PlannedRequest(number, 0.0, 1, 1, **more)) for number in numbers]


@pytest.mark.parametrize(
    ("shares", "num_requests"),
    [
        ({"a": 0.5, "b": 0.5}, 36),
        ({"a": 0.3, "b": 0.7}, 50),
        ({"a": 1, "b": 2, "c": 5}, 96),
        ({"a": 0.01, "b": 0.99}, 200),
        ({"a": 1.0}, 7),
    ],
)
@pytest.mark.parametrize("seed", range(5))
def test_a_level_has_each_adapter_exactly_as_often_as_its_share_asks(shares, num_requests, seed):
    total = sum(Fraction(share).limit_denominator(100) for share in shares.values())
    expected = {name: num_requests * Fraction(share).limit_denominator(100) / total for name, share in shares.items()}
    assert Counter(drawn(shares, seed, range(num_requests))) == expected


@pytest.mark.parametrize("seed", range(20))
def test_a_level_of_any_length_is_less_than_one_request_off(seed):
    sequence = drawn({"a": 0.37, "b": 0.63}, seed, range(300))
    for count in range(1, 301):
        assert abs(sequence[:count].count("a") - 0.37 * count) < 1


def test_the_order_is_of_the_seed_and_of_no_worker():
    shares = {"a": 1, "b": 1, "c": 1}
    whole = drawn(shares, 4, range(60))
    assert drawn(shares, 4, range(0, 60, 2)) == whole[::2]  # the first of two workers
    assert drawn(shares, 5, range(60)) != whole
    assert whole != sorted(whole)


def test_a_conversation_keeps_its_adapter_and_conversations_have_exact_shares():
    draw = AdapterDraw({"a": 0.25, "b": 0.75}, 0)
    turns = {
        session: {draw(PlannedRequest(9 * session + turn, 0.0, 1, 1, session=session, turn=turn)) for turn in range(9)}
        for session in range(40)
    }
    assert Counter(name for (name,) in turns.values()) == {"a": 10, "b": 30}


def test_the_warm_up_asks_for_each_adapter_in_turn():
    assert drawn({"a": 0.01, "b": 0.99}, 0, (-1, -2, -3)) == ["a", "b", "a"]
