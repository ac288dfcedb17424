"""Length distributions: their moments are those that were asked for."""

from __future__ import annotations

import random
import statistics

import pytest

from lmi_bench.core.errors import InputError
from lmi_bench.core.lengths import parse_lengths


def draws(text, n=40_000):
    distribution, draw = parse_lengths(text), random.Random(0)
    return [distribution.draw(draw) for _ in range(n)]


@pytest.mark.parametrize(
    ("text", "mean", "deviation"),
    [
        ("fixed(256)", 256, 0),
        ("uniform(500,1000)", 750, ((501**2 - 1) / 12) ** 0.5),  # of 501 whole numbers
        ("normal(622,100)", 622, 100),
        ("lognormal(622,300,100000)", 622, 300),
    ],
)
def test_mean_and_deviation_are_those_asked_for(text, mean, deviation):
    found = draws(text)
    assert statistics.fmean(found) == pytest.approx(mean, rel=0.01)
    assert statistics.pstdev(found) == pytest.approx(deviation, rel=0.03)


def test_a_lognormal_leans_to_the_right():
    """Its median is mean / sqrt(1 + (std / mean)^2)."""
    found = draws("lognormal(600,600,100000)")
    assert statistics.median(found) == pytest.approx(600 / 2**0.5, rel=0.02)


@pytest.mark.parametrize(
    ("text", "least", "most"),
    [("uniform(3,5)", 3, 5), ("normal(10,20)", 1, 90), ("normal(10,20,30)", 1, 30), ("lognormal(100,100)", 1, 500)],
)
def test_no_draw_leaves_its_bounds(text, least, most):
    found = draws(text)
    assert min(found) >= least
    assert max(found) <= most == parse_lengths(text).most


@pytest.mark.parametrize(
    "text", ["", "normal(1)", "uniform(5,3)", "uniform(1,2,3)", "zipf(1,2)", "normal(a,b)", "fixed(0)", "normal(1,2"]
)
def test_what_is_no_distribution_is_refused(text):
    with pytest.raises(InputError):
        parse_lengths(text)
