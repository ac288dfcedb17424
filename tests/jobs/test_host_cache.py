"""Evicted blocks in the host's memory, as predict and recommend plan them, and simulated sweeps."""

from __future__ import annotations

import pytest

import lmi_bench
from lmi_bench.core.errors import InputError
from lmi_bench.core.scenario import parse_scenario
from lmi_bench.targets.open import open_bench
from tests.analysis.level.test_prefix_hits import conversations, mooncake

ON_L40S = {"model": "llama-3.1-8b", "profile": "vllm-0.12"}
CHAT = {"turns": "8", "input_tokens": 800, "output_tokens": 100, "shared_prefix": 500}
TOKEN_BYTES = 2 * 32 * 8 * 128 * 2
"""Keys and values of a token of Llama 3.1 8B: 32 layers with 8 heads of 128 values of 16 bits."""


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    mooncake(conversations(150, 512, seed=1), path)
    return path


def predicted(trace, **more):
    """Hit share and p90 of the TTFT in ms; the device's cache holds few of the conversations."""
    machine = {"instance": "ml.g6e.2xlarge", "kv_tokens": 14_000, "speed": "0.2"}
    (one,) = lmi_bench.predict(**ON_L40S, **machine, trace=trace, **more).simulated
    return one.prefix_hit.value, one.figures["ttft_p90_ms"].value


def test_a_fast_link_shortens_the_first_token_and_a_slow_one_is_not_used(trace):
    hit, ttft_ms = predicted(trace)
    fast_hit, fast_ms = predicted(trace, host_cache_gib=32.0)
    mid_hit, mid_ms = predicted(trace, host_cache_gib=32.0, host_cache_gb_per_s=2.0)
    assert fast_hit == pytest.approx(mid_hit, abs=0.01)
    assert fast_hit > hit + 0.2  # of 77 % without bound
    assert fast_ms < 0.7 * ttft_ms
    assert fast_ms < mid_ms < ttft_ms
    # a token is computed in less than the 1.3 ms of its copy at 0.1 GB/s
    slow = predicted(trace, host_cache_gib=32.0, host_cache_gb_per_s=0.1)
    assert slow == (hit, ttft_ms)


def test_a_smaller_tier_finds_less(trace):
    hit, _ = predicted(trace)
    small, _ = predicted(trace, host_cache_gib=20_000 * TOKEN_BYTES / 2**30)
    large, _ = predicted(trace, host_cache_gib=32.0)
    assert hit + 0.02 < small < large - 0.02


def test_a_fleet_with_a_host_tier_needs_fewer_machines():
    """The price follows the rate of the copies."""
    asked = {"slo": ("ttft_p90<=2s", "itl_p90<=60ms"), "instance": ("ml.g6e.4xlarge",), "rate": 3.0}
    asked |= {**ON_L40S, **CHAT, "think_time": 60.0, "router": "prefix-affine"}

    def best(**more):
        return lmi_bench.recommend(**asked, **more).answer.recommended

    plain, fast = best(), best(host_cache_gib=100.0)
    mid = best(host_cache_gib=100.0, host_cache_gb_per_s=2.0)
    assert fast.price_usd_per_hour < 0.7 * plain.price_usd_per_hour
    assert fast.price_usd_per_hour <= mid.price_usd_per_hour <= plain.price_usd_per_hour
    hits = [each.attainment.prefix_hit_share.value for each in (plain, mid, fast)]
    assert min(hits[1:]) > hits[0] + 0.2
    saved = [each.usd_per_1m_input_tokens.cached_share for each in (plain, mid, fast)]
    assert saved[0] < saved[1] < saved[2] - 0.2  # a copy at 2 GB/s takes most of what it saves


def test_a_layout_whose_host_has_too_little_memory_is_out():
    asked = {**ON_L40S, **CHAT, "think_time": 60.0, "rate": 0.1}
    with pytest.raises(InputError, match=r"1 x 40 GiB exceed the host's 32 GiB"):
        lmi_bench.predict(**ON_L40S, **CHAT, rate="0.1", instance="ml.g6e.xlarge", host_cache_gib=40.0)
    answer = lmi_bench.recommend(**asked, instance=("ml.g6e.xlarge",), host_cache_gib=40.0).answer
    assert answer.recommended is None
    assert any("lower --host-cache-gib" in each.reason for each in answer.rejected)


def simulated_config(**engine):
    content = {
        "target": "sim:ml.g6e.2xlarge",
        "model": "llama-3.1-8b",
        "engine": {"prefix_caching": True} | engine,
        "workload": {"turns": 4, "input_tokens": 200, "output_tokens": 50},
    }
    return open_bench(parse_scenario(content)).facts["scheduler"]


def test_a_simulated_engine_has_as_many_blocks_as_the_memory_holds():
    config = simulated_config(host_cache_gib=16.0, tensor_parallel=1)
    assert config["host_blocks"] == 16 * 2**30 // (TOKEN_BYTES * config["block_size"])
    assert simulated_config()["host_blocks"] == 0
    assert simulated_config(host_cache_gib=16.0, host_cache_gb_per_s=0.1)["host_blocks"] == 0


@pytest.mark.parametrize(
    "asked",
    [
        {"input_tokens": 300, "output_tokens": 100, "host_cache_gib": 8.0},
        {"turns": "4", "input_tokens": 300, "output_tokens": 100, "host_cache_gb_per_s": 8.0},
        {**CHAT, "host_cache_gib": 8.0, "prefix_cache": False},
    ],
)
def test_what_would_have_no_effect_is_refused(asked):
    with pytest.raises(InputError, match="is for prompts that begin alike"):
        lmi_bench.predict(**ON_L40S, instance="ml.g6e.2xlarge", rate="0.1", **asked)
    if "prefix_cache" not in asked:
        with pytest.raises(InputError, match="is for prompts that begin alike"):
            lmi_bench.recommend(**ON_L40S, rate=0.1, **asked)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"target": "sim:ml.g6e.2xlarge"}, "is for a prefix cache; add --prefix-caching"),
        ({"target": "engine"}, "the bundled one keeps no evicted blocks on the host"),
    ],
)
def test_an_engine_that_cannot_use_it_says_so(content, message):
    scenario = parse_scenario({"model": "llama-3.1-8b", "engine": {"host_cache_gib": 8}} | content)
    with pytest.raises(InputError, match=message):
        open_bench(scenario)
