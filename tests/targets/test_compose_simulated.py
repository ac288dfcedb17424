"""What the simulated engine makes of its settings."""

from __future__ import annotations

import pytest

from lmi_bench.core.errors import CapacityError, InputError
from lmi_bench.core.scenario import EngineSection
from lmi_bench.targets.simulated import open_simulated_engine

MIB = 2**20


def cache_tokens(share):
    settings = EngineSection(memory_share=share)
    engine = open_simulated_engine("llama-2-7b", "ml.g5.2xlarge", settings, max_total_tokens=512)
    return engine.config.num_blocks * engine.config.block_size


def test_a_tenth_of_the_device_is_its_share_of_cache():
    """A10G reports 22,888 MiB; Llama 2 7B keeps 2 * 2 bytes * 32 layers * 4,096 a token."""
    tenth = 0.1 * 22_888 * MIB / (2 * 2 * 32 * 4096)
    assert cache_tokens(0.95) - cache_tokens(0.85) == pytest.approx(tenth, abs=32)


def test_a_share_that_holds_no_weights_is_refused():
    with pytest.raises(CapacityError, match="GiB"):
        cache_tokens(0.1)


@pytest.mark.parametrize(("option", "settings"), [("--compile", {"compile": True}), ("--device", {"device": "cpu"})])
def test_how_steps_would_be_computed_is_refused_where_none_is(option, settings):
    with pytest.raises(InputError, match=f"{option} is for .*a simulated engine computes nothing"):
        open_simulated_engine("llama-2-7b", "ml.g5.2xlarge", EngineSection(**settings), max_total_tokens=512)


@pytest.mark.parametrize(
    "settings", [{"policy": "dynamic"}, {"policy": "none"}, {"chunked_prefill": True}, {"recompute_on_join": True}]
)
def test_a_profiles_rule_for_joining_is_left_out_where_none_can_join(settings):
    """TGI's rule of 20 waiting tokens is of rolling batches with whole prompts alone."""

    def opened(**stated):
        engine = EngineSection(profile="tgi-2023", **stated)
        return open_simulated_engine("llama-2-7b", "ml.g5.2xlarge", engine, max_total_tokens=512)

    assert opened().config.max_waiting_tokens == 20
    assert opened(**settings).config.max_waiting_tokens == 0
