"""A setting that changes nothing is named at the start instead of being taken in silence."""

from __future__ import annotations

import pytest

from lmi_bench.core.scenario import EngineSection
from lmi_bench.targets.idle_settings import idle_at_endpoint, idle_in_engine, idle_in_simulation
from lmi_bench.targets.simulated import open_simulated_engine

WORDS = "engine settings without effect here: "


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"batch_size": 8, "max_batch_delay_ms": 5}, "batch_size, max_batch_delay_ms (for policy"),
        ({"policy": "dynamic", "max_rolling_batch_size": 8}, "max_rolling_batch_size (for policy"),
        ({"router": "random"}, "router (for several replicas)"),
        ({"draft_tokens": 2, "draft_adaptive": False}, "draft_tokens, draft_adaptive (for a draft"),
        ({"quantize": "int8", "smoothquant_alpha": 0.3}, "smoothquant_alpha (for quantize smooth"),
        ({"quantize": "int8", "calibration": "a.txt"}, "calibration (for awq and smoothquant)"),
        ({"compile_shapes": "1x64"}, "compile_shapes (for compile)"),
        ({"enforce_eager": True}, "enforce_eager (for graphs on a GPU)"),
        ({"num_blocks": 9, "memory_share": 0.3}, "memory_share (num_blocks is stated)"),
        ({"profile": "tgi-2023"}, "profile (for a simulated engine)"),
        ({"router": "random", "draft_tokens": 2}, "router (for several replicas); draft_tokens ("),
    ],
)
def test_what_changes_nothing_in_the_bundled_engine_is_named(settings, named):
    (line,) = idle_in_engine(EngineSection(**settings))
    assert line.startswith(WORDS + named)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"batch_size": 4},  # the default, stated
        {"policy": "dynamic", "batch_size": 8},
        {"max_rolling_batch_size": 8, "chunked_prefill": True},
        {"replicas": 2, "router": "random", "threads": 2, "backend": "torch"},
        {"draft": "ngram", "draft_tokens": 2},
        {"quantize": "smoothquant", "smoothquant_alpha": 0.3, "calibration": "a.txt"},
        {"compile": True, "compile_shapes": "1x64"},
        {"device": "cuda", "compile_shapes": "1x64"},
        {"backend": "triton", "enforce_eager": True},
    ],
)
def test_what_counts_is_not_named(settings):
    assert idle_in_engine(EngineSection(**settings)) == ()


def test_an_engine_that_computes_nothing_has_no_threads():
    (line,) = idle_in_simulation(EngineSection(threads=4, backend="torch", block_size=32))
    assert line == f"{WORDS}backend, threads (nothing is computed)"


def test_a_server_elsewhere_keeps_its_own_settings():
    (line,) = idle_at_endpoint(EngineSection(tensor_parallel=4, threads=2))
    assert line == f"{WORDS}threads (the server has its own)"
    assert idle_at_endpoint(EngineSection()) == ()


def test_a_simulated_cache_has_the_blocks_that_were_stated():
    """As many tokens as with the profile's blocks of 1, down to a whole block."""
    usual, stated = (
        open_simulated_engine(
            "llama-2-7b", "ml.g5.2xlarge", EngineSection(block_size=size), max_total_tokens=512
        ).config
        for size in (None, 32)
    )
    assert stated.block_size == 32
    assert usual.cache_tokens - 32 < stated.cache_tokens <= usual.cache_tokens
