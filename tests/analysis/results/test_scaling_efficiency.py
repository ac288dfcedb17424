"""Expected values: hand arithmetic."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmi_bench.analysis.results.compare import scaling_efficiency
from lmi_bench.core.manifest import Manifest, TargetFacts
from lmi_bench.core.run_store import Run
from tests.levels import level_of


def run_of(throughputs, **target):
    lines = [level_of(concurrency=users, throughput_tokens_per_s=tokens) for users, tokens in throughputs.items()]
    manifest = Manifest(target=TargetFacts(**target))
    return Run(Path("run"), manifest, lines, [() for _ in lines], None)


def test_four_copies_that_give_three_times_as_much_scale_with_75_percent():
    one = run_of({1: 40.0, 8: 100.0, 16: 95.0}, kind="engine")
    four = run_of({8: 150.0, 32: 300.0, 64: 290.0}, kind="engine", replicas=4)
    for pair in ((one, four), (four, one)):
        found = scaling_efficiency(*pair)
        assert found.efficiency_frac == pytest.approx(0.75)
        assert (found.few, found.many, found.edge) == (1, 4, False)


def test_it_says_when_more_load_might_have_given_more():
    one = run_of({1: 40.0, 8: 100.0}, kind="engine")
    two = run_of({8: 150.0, 16: 150.0}, kind="engine", replicas=2)
    assert scaling_efficiency(one, two).edge


def test_instances_of_an_endpoint_are_copies():
    two = run_of({8: 100.0, 16: 90.0}, kind="sagemaker", instances=2)
    three = run_of({8: 120.0, 16: 110.0}, kind="sagemaker", instances=3)
    assert scaling_efficiency(two, three).efficiency_frac == pytest.approx(40 / 50)


def test_equal_or_unknown_numbers_of_copies_say_nothing():
    one = run_of({1: 40.0}, kind="engine")
    assert scaling_efficiency(one, one) is None
    assert scaling_efficiency(one, run_of({1: 40.0}, kind="http")) is None
    assert scaling_efficiency(one, run_of({}, kind="engine", replicas=2)) is None
