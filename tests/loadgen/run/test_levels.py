"""Levels from a scenario."""

from __future__ import annotations

from lmi_bench.core.scenario import parse_scenario
from lmi_bench.loadgen.run.levels import in_order, levels_of
from tests.levels import level_of


def test_a_level_has_three_requests_per_user_and_at_least_32_beside_the_first_of_each():
    levels = levels_of(parse_scenario({"load": {"concurrency": [1, 8, 16]}}))
    assert [level.num_requests for level in levels] == [32 + 1, 32 + 8, 48 + 16]


def test_requests_of_a_level_are_users_times_requests_per_user():
    scenario = parse_scenario({"load": {"concurrency": [1, 8], "requests_per_user": 5}})
    assert [(level.index, level.num_requests) for level in levels_of(scenario)] == [(0, 6), (1, 48)]


def test_requests_per_level_wins_and_a_duration_bounds_it():
    scenario = parse_scenario(
        {"load": {"concurrency": [8], "requests_per_level": 10, "duration_s": 3}}
    )
    (level,) = levels_of(scenario)
    assert (level.num_requests, level.duration_s) == (10 + 8, 3.0)


def test_a_rate_without_a_number_sends_a_hundred():
    scenario = parse_scenario({"load": {"rate_per_s": [0.5, 2], "arrivals": "constant"}})
    levels = levels_of(scenario)
    assert [(level.rate_per_s, level.num_requests) for level in levels] == [(0.5, 100), (2.0, 100)]
    assert levels[0].load.arrivals == "constant"


def test_finished_levels_are_left_out():
    levels = levels_of(parse_scenario({"load": {"concurrency": [1, 2, 4]}}))
    rule = in_order(levels)
    assert rule([level_of(), level_of(level=2)]) == levels[1]
    assert rule([level_of(level=n) for n in range(3)]) is None
