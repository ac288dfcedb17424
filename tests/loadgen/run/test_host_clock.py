"""Offsets of other hosts' clocks: the truth is always inside what is stated, and steps show."""

from __future__ import annotations

import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lmi_bench.loadgen.run.worker_pool import HostClock


def _ping(clock, at_s, offset_s, there_s, back_s, busy_s=0.0):
    """One ping that leaves at `at_s`, with delays of its own for each way, and `busy_s` between the
    arrival there, which the kernel notes, and the answer."""
    arrived_s = at_s + there_s + offset_s
    return clock.add(at_s, arrived_s, arrived_s + busy_s, at_s + there_s + busy_s + back_s)


@given(
    offset_s=st.floats(-1e4, 1e4),
    drift=st.floats(-9e-4, 9e-4),  # two clocks, each slewed by 450 ppm
    seed=st.integers(0, 99),
)
@example(offset_s=0.0, drift=-0.0009, seed=32)  # which drifts while a ping is under way
def test_the_stated_error_holds_whatever_the_delays_and_the_drift_are(offset_s, drift, seed):
    draw = random.Random(seed)
    clock = HostClock()

    def offset_at(at_s):
        return offset_s + drift * at_s

    def ping(at_s):
        there_s, back_s, busy_s = (draw.expovariate(50) for _ in range(3))
        return _ping(clock, at_s, offset_at(at_s + there_s), there_s, back_s, busy_s)

    for n in range(8):
        assert ping(0.01 * n) == 0.0
    used_s = clock.begin_level()
    began_s, rounding_s = 0.5, 1e-9
    assert abs(used_s - offset_at(0.07)) <= clock.error_s + rounding_s
    worst_s = 0.0
    for n in range(40):
        at_s = began_s + 0.25 * n
        assert ping(at_s) == 0.0
        worst_s = max(worst_s, abs(used_s - offset_at(at_s)))
    assert worst_s <= clock.error_s + rounding_s


def test_equal_delays_both_ways_give_the_offset_and_half_a_round_trip_of_doubt():
    clock = HostClock()
    _ping(clock, 100.0, 5.0, 0.02, 0.02)
    assert clock.begin_level() == pytest.approx(5.0)
    assert clock.error_s == pytest.approx(0.02, rel=0.01)
    assert clock.round_trip_s == pytest.approx(0.04)


def test_time_that_a_busy_worker_takes_to_answer_is_no_doubt():
    clock = HostClock()
    _ping(clock, 100.0, 5.0, 0.02, 0.02, busy_s=0.5)
    assert clock.begin_level() == pytest.approx(5.0)
    assert clock.error_s == pytest.approx(0.02, rel=0.03)


def test_the_shortest_way_of_each_direction_counts():
    """One ping was quick there, another quick back: together they know more than each."""
    clock = HostClock()
    _ping(clock, 0.0, 5.0, 0.001, 0.05)
    _ping(clock, 0.1, 5.0, 0.05, 0.001)
    assert clock.begin_level() == pytest.approx(5.0, abs=1e-4)
    assert clock.error_s < 0.0015


@pytest.mark.parametrize("step_s", [0.5, -0.5, 0.06])
def test_a_step_beyond_the_known_interval_shows_at_the_next_ping(step_s):
    clock = HostClock()
    _ping(clock, 0.0, 5.0, 0.02, 0.02)
    clock.begin_level()
    assert _ping(clock, 0.25, 5.0, 0.02, 0.02) == 0.0
    found_s = _ping(clock, 0.5, 5.0 + step_s, 0.02, 0.02)
    assert 0 < found_s <= abs(step_s)
    assert abs(step_s) - found_s < 0.041  # at most the round trip is not sure
    assert clock.error_s >= abs(step_s)
    clock.begin_level()
    assert clock.error_s == pytest.approx(0.02, rel=0.01)  # the next level starts from the new offset


def test_our_own_clock_is_known_exactly():
    clock = HostClock(shared=True)
    assert clock.add(0.0, 3.0, 3.0, 0.1) == 0.0
    assert (clock.begin_level(), clock.error_s) == (0.0, 0.0)
