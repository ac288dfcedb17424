"""Fleets for prompts that a prefix cache finds: chat, retrieved documents, a stated share."""

from __future__ import annotations

import json

import pytest

from lmi_bench.core.errors import InputError
from lmi_bench.jobs.recommend import recommend
from lmi_bench.jobs.settings.recommend import RecommendSettings

COMMON = {
    "model": "llama-3.1-8b",
    "slo": ("ttft_p90<=2s", "itl_p90<=60ms"),
    "instance": ("ml.g6e.xlarge",),
    "rate": 3.0,
    "profile": "vllm-0.12",
}


def best(**more):
    return recommend(RecommendSettings(**(COMMON | more))).answer.recommended


def test_a_cached_share_needs_fewer_machines_and_its_tokens_cost_less():
    lengths = {"input_tokens": 3000, "output_tokens": 100}
    plain, cached = best(**lengths), best(**lengths, prefix_hit=0.8)
    assert plain.usd_per_1m_input_tokens is None
    assert cached.instances < plain.instances
    prices = cached.usd_per_1m_input_tokens
    assert prices.cached_share == pytest.approx(0.8)
    assert 0 < prices.cached < prices.computed / 2
    assert cached.attainment.prefix_hit_share.value == pytest.approx(0.8, abs=0.01)
    assert "prefix_hit_share" not in plain.to_json()["attainment"]


def test_a_conversation_is_planned_with_the_hits_of_the_engines_cache():
    """Turn k of 4 has 1,000 + 300 k + 100 (k - 1) tokens, all but the last 300 sent before: of
    7,600 tokens in four turns the first 1,000 may be found in each and 400 + 800 + 1,200 more."""
    chat = {"turns": "4", "input_tokens": 300, "output_tokens": 100, "shared_prefix": 1000}
    fleet = best(**chat, think_time=5.0, router="prefix-affine")
    hit = fleet.attainment.prefix_hit_share
    assert hit.low <= hit.value <= hit.high
    assert hit.value == pytest.approx((4 * 1000 + 400 + 800 + 1200) / 7600, abs=0.04)
    assert fleet.usd_per_1m_input_tokens.cached_share == pytest.approx(hit.value, abs=0.06)


def test_a_trace_is_planned_at_a_rate_for_longer_than_it_lasts(tmp_path):
    """Forty requests whose first block of two is the same: a cache finds 80 of 160 tokens but in the
    first. They are simulated over and over at 3 req/s, one after the other."""
    path = tmp_path / "trace.jsonl"
    equal = {"input_length": 160, "output_length": 4, "block_size": 80}
    rows = [equal | {"timestamp": 900 * n, "hash_ids": [0, 1 + n]} for n in range(40)]
    path.write_text("\n".join(map(json.dumps, rows)))
    fleet = best(trace=path, slo=("ttft_p90<=1s",))
    assert fleet.instances == 1
    assert fleet.attainment.joint_attainment > 0.99
    assert fleet.attainment.prefix_hit_share.value == pytest.approx(0.5 * 39 / 40, abs=0.01)


def test_what_cannot_be_planned_says_why():
    with pytest.raises(InputError, match="for a --rate, not for --users"):
        recommend(RecommendSettings(model="llama-3.1-8b", turns="4", users=9, think_time=1.0))
    with pytest.raises(InputError, match="leave one of them out"):
        RecommendSettings(prefix_hit=0.5, turns="4")


def test_a_short_trace_is_played_again_with_other_text_and_later_times(tmp_path):
    """50 requests a second apart, whose first block of two is common, over and over: half of each
    prompt is found, whatever is planned for longer than the trace lasts."""
    rows = [
        {"timestamp": 1000 * n, "input_length": 1024, "output_length": 20, "hash_ids": [0, n + 1]} for n in range(50)
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    attained = best(trace=path).attainment
    assert attained.prefix_hit_share.value == pytest.approx(0.5, abs=0.02)
    assert attained.joint_attainment > 0.95
