"""What a variant's sweep does when something disturbs the load generator."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from lmi_bench.core.listener import SILENT
from lmi_bench.jobs.optimize import run as optimize
from lmi_bench.jobs.optimize.recipe import parse_recipe
from tests.levels import level_of


@pytest.mark.parametrize(("valid", "sweeps"), [([True], 1), ([False, True], 2), ([False] * 5, 3)])
def test_an_invalid_level_is_measured_again_at_most_twice(monkeypatch, tmp_path, valid, sweeps):
    folders = []

    def sweep_scenario(scenario, *, listener, out):
        level = level_of(concurrency=2, valid=valid[len(folders)], invalid_reason="late sends")
        folders.append(out.name)
        return SimpleNamespace(run=SimpleNamespace(levels=[level], path=out))

    monkeypatch.setattr(optimize, "sweep_scenario", sweep_scenario)
    run = optimize._sweep(None, tmp_path, "int8", SILENT)
    assert folders == ["int8", "int8-2", "int8-3"][:sweeps]
    assert run.path.name == folders[-1]


def test_variants_are_swept_in_turn_and_judged_round_by_round(monkeypatch, tmp_path):
    """The machine loses half its speed from round to round; the variant stays a fifth faster."""
    order, speed = [], {"baseline": 100.0, "int8": 120.0}

    def sweep_scenario(scenario, *, listener, out):
        name, _, number = out.name.partition("-round-")
        order.append(name)
        tokens_per_s = speed[name] / 2 ** int(number) * (1.01 if out.name == "int8-round-2" else 1)
        level = level_of(concurrency=2, throughput_tokens_per_s=tokens_per_s)
        return SimpleNamespace(run=SimpleNamespace(levels=[level], path=out))

    monkeypatch.setattr(optimize, "sweep_scenario", sweep_scenario)
    recipe = parse_recipe({"variants": [{"name": "int8", "engine": {"quantize": "int8"}}]})
    parts = SimpleNamespace(quantized=None)
    base, other = (
        optimize.MeasuredVariant(name, recipe.engine, parts, None, 0.0, 0.0) for name in speed
    )
    optimize._sweep_in_rounds(recipe, [base, other], tmp_path, SILENT)
    assert order == ["baseline", "int8", "int8", "baseline", "baseline", "int8"]
    middle, low, high = optimize._ratios(base, other)["concurrency 2"]
    assert 1.18 < low < 1.2 < middle < high < 1.23
    assert optimize._ratios(base, base) == {}
    base.rounds, other.rounds = base.rounds[:1], other.rounds[:1]
    assert optimize._ratios(base, other)["concurrency 2"] == [pytest.approx(1.2), None, None]
