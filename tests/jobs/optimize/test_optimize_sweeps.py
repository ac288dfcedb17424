"""What a variant's sweep does when something disturbs the load generator."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from lmi_bench.core.listener import SILENT
from lmi_bench.jobs.optimize import run as optimize
from lmi_bench.jobs.optimize.recipe import parse_recipe
from lmi_bench.report.optimization import STAGES, VariantMemory, VariantQuality, VariantResult, optimization_tables
from tests.levels import level_of


@pytest.mark.parametrize(("valid", "sweeps"), [([True], 1), ([False, True], 2), ([False] * 5, 3)])
def test_an_invalid_level_is_measured_again_at_most_twice(monkeypatch, tmp_path, valid, sweeps):
    folders = []

    def sweep_scenario(scenario, *, listener, out):
        level = level_of(concurrency=2, valid=valid[len(folders)], invalid_reason="late sends")
        folders.append(out.name)
        run = SimpleNamespace(levels=[level], path=out)
        return SimpleNamespace(pooled=run, interrupted=False)

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
        run = SimpleNamespace(levels=[level], path=out)
        return SimpleNamespace(pooled=run, interrupted=False)

    monkeypatch.setattr(optimize, "sweep_scenario", sweep_scenario)
    recipe = parse_recipe({"variants": [{"name": "int8", "engine": {"quantize": "int8"}}]})
    parts = SimpleNamespace(quantized=None)
    base, other = (
        optimize.MeasuredVariant(name, recipe.engine, parts, [], [], None, {"sweep_s": 0.0}) for name in speed
    )
    optimize._sweep_in_rounds(recipe, [base, other], tmp_path, SILENT)
    assert order == ["baseline", "int8", "int8", "baseline", "baseline", "int8"]
    middle, low, high = optimize._ratios(base, other)["concurrency 2"]
    assert 1.18 < low < 1.2 < middle < high < 1.23
    assert optimize._ratios(base, base) == {}
    base.rounds, other.rounds = base.rounds[:1], other.rounds[:1]
    assert optimize._ratios(base, other)["concurrency 2"] == [pytest.approx(1.2), None, None]


def test_the_ratio_that_is_shown_is_that_of_the_highest_load():
    """Wherever the recipe names it, and although the first round had no valid level below it."""
    base, other = (optimize.MeasuredVariant(name, None, None, [], [], None, {}) for name in ("baseline", "a"))
    for each, speed in ((base, 1.0), (other, 2.0)):
        for number in range(2):
            levels = [
                level_of(concurrency=users, throughput_tokens_per_s=tokens, valid=users == 8 or number == 1)
                for users, tokens in ((8, 100.0), (1, 50.0 * speed))
            ]
            each.rounds.append(SimpleNamespace(levels=levels))
    assert list(optimize._ratios(base, other)) == ["concurrency 1", "concurrency 8"]


def test_a_folder_of_a_round_is_no_other_variants_folder(monkeypatch, tmp_path):
    """With a single round, too: `a-model` is where the weights of `a` are saved."""
    names = []
    monkeypatch.setattr(optimize, "_sweep", lambda _, __, name, ___: names.append(name))
    recipe = parse_recipe({"evaluate": {"rounds": 1}, "variants": [{"name": "a-model", "engine": {}}]})
    parts = SimpleNamespace(quantized=None)
    each = optimize.MeasuredVariant("a-model", recipe.engine, parts, [], [], None, {"sweep_s": 0.0})
    optimize._sweep_in_rounds(recipe, [each], tmp_path, SILENT)
    assert names == ["a-model-round-1"]


def variant(name, ratio=None, *, weight_bytes=1000, products_ms=1.0):
    return VariantResult(
        name=name,
        engine={},
        quality=VariantQuality(2.0, 1, 1.0, 0.0, None, {}),
        memory=VariantMemory(weight_bytes, 1.0, 1),
        products_ms={"2": products_ms},
        kernels=None,
        emulated=False,
        levels=(),
        throughput_ratios={} if ratio is None else {"concurrency 2": [ratio, 0.9 * ratio, ratio]},
        usd_per_1m_output=None,
        job=dict.fromkeys(STAGES, 1.0),
        saved=None,
    )


def test_a_ratio_is_not_shown_where_what_should_be_equal_differs_by_as_much():
    """1.58 of the baseline to itself is further from 1 than 1.32 and 1 / 1.5, not than 1 / 1.7;
    products of equal weights at 0.255 of the baseline's are further than a gain of 3.91."""
    results = [
        variant("baseline"),
        variant("same", 1.32),
        variant("slower", 1 / 1.5),
        variant("much-slower", 1 / 1.7),
        variant("ngram", 3.91, products_ms=0.255),
        variant("int4", 3.91, weight_bytes=300, products_ms=0.255),
        variant("baseline-again", 1.58),
    ]
    found = {each.name: bool(optimize.undecided_levels(each, results)) for each in results}
    assert found == {
        "baseline": False,
        "same": True,
        "slower": True,
        "much-slower": False,
        "ngram": True,
        "int4": False,
        "baseline-again": False,
    }
    marked = [replace(each, undecided=optimize.undecided_levels(each, results)) for each in results]
    table = optimization_tables(marked)[0]
    column = [column.title for column in table.columns].index("tok/s against the baseline")
    shown = {row.cells[0].text: row.cells[column].text for row in table.rows}
    assert {name for name, text in shown.items() if "not shown" in text} == {"same", "slower", "ngram"}
