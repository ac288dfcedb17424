"""Recipes of optimization jobs: what is understood, and the one message with every mistake."""

from __future__ import annotations

import pytest

from lmi_bench.core.errors import InputError
from lmi_bench.jobs.optimize.recipe import parse_recipe, stated_recipe
from lmi_bench.jobs.settings.bundled import OptimizeSettings

VARIANT = {"name": "small", "engine": {"quantize": "int8"}}


def test_a_variant_changes_the_baselines_engine():
    recipe = parse_recipe({"engine": {"threads": 1, "dtype": "float32"}, "variants": [VARIANT]})
    settings = recipe.settings(recipe.variants[0])
    assert (settings.threads, settings.dtype, settings.quantize) == (1, "float32", "int8")
    assert recipe.settings(None).quantize == "none"


def test_every_mistake_is_named_at_once():
    content = {"modle": "x", "variants": [{"name": "a b", "engine": {}}], "evaluate": {"text": 3}}
    with pytest.raises(InputError, match="3 mistakes") as caught:
        parse_recipe(content)
    assert all(word in str(caught.value) for word in ("modle", "variants.0.name", "evaluate.text"))


def test_a_setting_that_no_engine_has_is_refused_before_anything_runs():
    with pytest.raises(InputError, match=r"(?s)variant small.*quantise"):
        parse_recipe({"variants": [{"name": "small", "engine": {"quantise": "int8"}}]})


def test_a_recipe_without_a_variant_is_refused():
    with pytest.raises(InputError, match="at least one combination"):
        parse_recipe({"model": "demo-15m"})


@pytest.mark.parametrize("names", [("a", "a"), ("baseline", "b")])
def test_variants_have_names_of_their_own(names):
    variants = [{**VARIANT, "name": name} for name in names]
    with pytest.raises(InputError, match="names of their own"):
        parse_recipe({"variants": variants})


def test_files_are_found_from_the_recipes_folder(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("evaluate: {text: a.txt}\nvariants: [{name: x, engine: {}}]\n")
    assert stated_recipe(OptimizeSettings(recipe=path)).evaluate.text == str(tmp_path / "a.txt")
