"""A load: one of users and rate, and one name."""

from __future__ import annotations

import pytest

from lmi_bench.core.errors import InputError
from lmi_bench.core.load import Load


@pytest.mark.parametrize(
    ("load", "name"),
    [
        (Load(concurrency=8), "concurrency 8"),
        (Load(rate_per_s=2.5), "2.5 req/s"),
        (Load(rate_per_s=2.0, sessions=True), "2 sessions/s"),
        (Load(concurrency=3, sessions=True), "concurrency 3"),
        (Load(concurrency=40, think_time_s=5.0), "40 users, 5 s think time"),
    ],
)
def test_a_load_has_one_name(load, name):
    assert load.name == name


def test_a_description_says_how_requests_arrive():
    described = [
        Load(rate_per_s=2.5),
        Load(rate_per_s=2.5, arrivals="gamma", burstiness=0.25),
        Load(rate_per_s=2.5, arrivals="trace"),
        Load(concurrency=8),
    ]
    assert [load.description for load in described] == [
        "2.5 req/s, Poisson",
        "2.5 req/s, in bursts (gamma, 0.25)",
        "2.5 req/s, trace",
        "concurrency 8",
    ]


def test_a_load_has_a_value_on_its_own_axis_only():
    assert (Load(concurrency=8).on("concurrency"), Load(concurrency=8).on("rate_per_s")) == (8, None)
    assert Load(rate_per_s=0.5).axis == "rate_per_s"


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"concurrency": 1, "rate_per_s": 1.0},
        {"concurrency": 0},
        {"rate_per_s": 0.0},
        {"rate_per_s": 1e-20},
        {"rate_per_s": 1e10},
        {"concurrency": 10**10},
        {"rate_per_s": 1.0, "burstiness": 0.0},
        {"rate_per_s": 1.0, "ramp_s": -1.0},
        {"rate_per_s": 1.0, "think_time_s": 1.0},
        {"concurrency": 1, "think_time_s": -1.0},
    ],
)
def test_a_load_that_makes_no_sense_cannot_exist(fields):
    with pytest.raises(InputError):
        Load(**fields)
