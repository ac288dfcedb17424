"""What an optimization job needs is told before it is run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lmi_bench.catalog.instances import all_instances, find_instance
from lmi_bench.catalog.models import find_model
from lmi_bench.jobs.optimize.recipe import cheapest_machine, memory_need, parse_recipe

RECIPE = parse_recipe(
    {
        "model": "llama-2-70b",
        "evaluate": {"input_tokens": 1000, "output_tokens": 24, "concurrency": [1, 8]},
        "variants": [
            {"name": "awq", "engine": {"quantize": "awq-int4"}},
            {"name": "awq3", "engine": {"quantize": "awq-int3"}},
            {"name": "int8", "engine": {"quantize": "int8"}},
            {"name": "drafted", "engine": {"draft": "llama-2-7b"}},
        ],
    }
)
SHAPE = find_model("llama-2-70b")
CACHE_BYTES = 8 * 1024 * 2 * 80 * 8 * 128 * 2
"""Eight sequences of 1,024 tokens: keys and values of 80 layers, 8 heads of 128, two bytes."""


def need(name):
    variant = next((each for each in RECIPE.variants if each.name == name), None)
    return memory_need(RECIPE, SHAPE, name, RECIPE.settings(variant))


def test_the_baseline_needs_its_float_weights_and_its_cache():
    """69.0e9 parameters of two bytes."""
    assert need("baseline").measure_bytes == pytest.approx(138.0e9 + CACHE_BYTES, rel=0.001)


def test_calibration_holds_the_float_model_and_plain_rounding_does_not():
    awq, int8 = need("awq"), need("int8")
    assert awq.prepare_bytes == pytest.approx(138.0e9, rel=0.001)
    assert awq.peak_bytes == awq.prepare_bytes > awq.measure_bytes
    assert int8.prepare_bytes == pytest.approx(69.0e9, rel=0.02)


def test_three_bits_take_a_bit_a_weight_less_than_four():
    """80 layers of 2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 28672 weights."""
    weights = 80 * (2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 28672)
    saved_bytes = need("awq").measure_bytes - need("awq3").measure_bytes
    assert saved_bytes == pytest.approx(weights / 8, rel=1e-4)


def test_a_draft_model_adds_its_weights_and_its_cache():
    """6.74e9 parameters; 32 layers of 32 heads of 128."""
    draft_bytes = 2 * 6.738e9 + 8 * 1024 * 2 * 32 * 32 * 128 * 2
    added = need("drafted").measure_bytes - need("baseline").measure_bytes
    assert added == pytest.approx(draft_bytes, rel=0.001)


def test_the_cheapest_machine_that_holds_it_is_taken_and_one_without_a_price_never():
    small, large = find_instance("ml.g5.2xlarge"), find_instance("ml.g5.48xlarge")
    unpriced = replace(small, instance_type="unpriced", price_usd_per_hour=None)
    assert cheapest_machine(10 * 2**30, [large, unpriced, small]) is small
    assert cheapest_machine(23 * 2**30, [large, unpriced, small]) is large  # 24 GiB, 90 % of it
    assert cheapest_machine(10 * 2**30, [large, small], devices=2) is large
    assert cheapest_machine(10**15, all_instances()) is None


def test_number_formats_and_replicas_of_the_engine_count():
    """Twice the bytes a weight and a value, half of them a value, and all weights twice."""

    def of(**engine):
        return memory_need(RECIPE, SHAPE, "x", RECIPE.engine.model_copy(update=engine)).measure_bytes

    weights = 138.0e9
    assert of(dtype="float32") == pytest.approx(2 * (weights + CACHE_BYTES), rel=0.001)
    assert of(kv_dtype="float8") == pytest.approx(weights + CACHE_BYTES / 2, rel=0.001)
    assert of(replicas=2) == pytest.approx(2 * weights + CACHE_BYTES, rel=0.001)
