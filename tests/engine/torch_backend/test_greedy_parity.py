"""The engine's greedy tokens are transformers' own, whatever else runs beside a request."""

from __future__ import annotations

import asyncio

import pytest

from tests.engine.torch_backend.parity import (
    assert_any_mix_gives_the_same_tokens,
    assert_equal_but_for_near_ties,
    generate,
    random_requests,
)

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 64}
YARN_SETTINGS = {"beta_fast": 20, "beta_slow": 2, "mscale": 1.0, "mscale_all_dim": 0.6, "truncate": False}
MODELS = {
    "MHA": {},
    "GQA": {"num_key_value_heads": 2},
    "MQA": {"num_key_value_heads": 1},
    "tied embeddings": {"tie_word_embeddings": True, "initializer_range": 0.1},
    "own head size": {"head_dim": 24, "num_key_value_heads": 2},
    "biases": {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 2},
    "llama3 RoPE": {"rope_parameters": LLAMA3_ROPE},
    "yarn RoPE": {"rope_parameters": YARN},
    "yarn RoPE, every setting": {"rope_parameters": YARN | YARN_SETTINGS},
    "dynamic RoPE": {
        "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 500.0},
        "max_position_embeddings": 40,
    },
    "linear RoPE": {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 10000.0}},
}


@pytest.mark.parametrize("changes", MODELS.values(), ids=MODELS)
def test_a_batch_of_requests_gets_the_tokens_that_transformers_gives_each(make_llama, changes):
    model = make_llama(**changes)
    requests = random_requests(1, 12)
    outputs, _ = asyncio.run(generate(model.folder, requests))
    assert_equal_but_for_near_ties(model, requests, outputs)


@pytest.mark.parametrize("changes", [{}, {"num_key_value_heads": 2}], ids=["MHA", "GQA"])
@pytest.mark.parametrize("budget", [7, 32])
def test_chunked_prefill_beside_decoding_changes_no_token(make_llama, changes, budget):
    """A budget of 7 also leaves chunks that end inside a block of 8."""
    model = make_llama(**changes)
    requests = random_requests(2, 16, delay_s=0.01)
    outputs, _ = asyncio.run(
        generate(model.folder, requests, chunked_prefill=True, max_rolling_batch_prefill_tokens=budget)
    )
    assert_equal_but_for_near_ties(model, requests, outputs)


@pytest.mark.parametrize("chunked", [False, True])
def test_preempted_requests_get_the_same_tokens(make_llama, chunked):
    """30 blocks of 4 tokens hold few of 16 requests of up to 60 tokens at once."""
    model = make_llama(num_key_value_heads=2)
    requests = random_requests(3, 16, longest_prompt=24, longest_output=36)
    outputs, stats = asyncio.run(generate(model.folder, requests, num_blocks=30, block_size=4, chunked_prefill=chunked))
    assert stats.preemptions > 0
    assert_equal_but_for_near_ties(model, requests, outputs)


def test_a_cache_computed_anew_at_every_join_gives_the_same_tokens(make_llama):
    """Four places for twelve requests: most join where others are in the middle."""
    model = make_llama(num_key_value_heads=2)
    requests = random_requests(5, 12)
    outputs, stats = asyncio.run(generate(model.folder, requests, recompute_on_join=True, max_rolling_batch_size=4))
    assert stats.rebuilt_batches > 0
    assert_equal_but_for_near_ties(model, requests, outputs)


@pytest.mark.parametrize("seed", range(6))
def test_any_mix_of_settings_and_arrivals_gives_the_same_tokens(llama, seed):
    requests = random_requests(100 + seed, 16, longest_prompt=40, delay_s=0.004)
    assert_any_mix_gives_the_same_tokens(seed, llama, requests, block_sizes=[1, 4, 16, 64], fewest_cache_tokens=64)
