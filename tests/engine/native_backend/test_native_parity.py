"""The native step's greedy tokens are transformers' own, in any mix, on every set of kernels."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest

from lmi_bench.engine.native_backend.executor import NativeExecutor
from lmi_bench.models.folder import parse_rope_scaling, with_rope_scaling
from tests.engine.torch_backend.parity import (
    assert_any_mix_gives_the_same_tokens,
    assert_equal_but_for_near_ties,
    generate,
    random_requests,
)
from tests.engine.torch_backend.test_greedy_parity import LLAMA3_ROPE, YARN

MODELS = {
    "MHA": ("Llama", {}),
    "GQA": ("Llama", {"num_key_value_heads": 2}),
    "MQA": ("Llama", {"num_key_value_heads": 1}),
    "tied embeddings": ("Llama", {"tie_word_embeddings": True, "initializer_range": 0.1}),
    "own head size": ("Llama", {"head_dim": 48, "num_key_value_heads": 2}),
    "wide heads": ("Llama", {"head_dim": 80, "num_key_value_heads": 1}),
    "biases": ("Llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 2}),
    "odd sizes": ("Llama", {"hidden_size": 112, "head_dim": 16, "intermediate_size": 90}),
    "llama3 RoPE": ("Llama", {"rope_parameters": LLAMA3_ROPE}),
    "yarn RoPE": ("Llama", {"rope_parameters": YARN}),
    "dynamic RoPE": (
        "Llama",
        {
            "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 500.0},
            "max_position_embeddings": 40,
        },
    ),
    "sliding window": ("Mistral", {"sliding_window": 5}),
    "window over a page": ("Mistral", {"sliding_window": 21}),
    "Qwen2": ("Qwen2", {}),
    "Qwen3": ("Qwen3", {}),
    "Phi-3": ("Phi3", {}),
    "Gemma": ("Gemma", {}),
    "Gemma 2": ("Gemma2", {}),
    "Gemma 3": ("Gemma3", {"tie_word_embeddings": True}),
    "Gemma 3, yarn RoPE": (
        "Gemma3",
        {
            "tie_word_embeddings": True,
            "rope_parameters": {
                "full_attention": YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
}


def loader(compiled, variant="", threads=1):
    def load(folder, settings):
        chosen = replace(settings, threads=threads)
        return NativeExecutor.load(folder, chosen, compiled=compiled, variant=variant)

    return load


@pytest.mark.parametrize(("family", "changes"), MODELS.values(), ids=MODELS)
def test_a_batch_of_requests_gets_the_tokens_that_transformers_gives_each(make_model, compiled, family, changes):
    model = make_model(family, **changes)
    requests = random_requests(1, 10)
    outputs, _ = asyncio.run(generate(model.folder, requests, block_size=16, load=loader(compiled)))
    assert_equal_but_for_near_ties(model, requests, outputs)


def test_half_of_a_heads_features_turn_slower_beyond_the_trained_length(make_model, compiled):
    """transformers has no such Phi-3, --rope-scaling makes one: torch is the measure."""
    model = make_model("Phi3", partial_rotary_factor=0.5)
    path = model.folder / "config.json"
    config = json.loads(path.read_text()) | {"max_position_embeddings": 40}
    scaled = with_rope_scaling(config, parse_rope_scaling("dynamic:4"))
    path.write_text(json.dumps(scaled | {"eos_token_id": None}))
    requests = random_requests(1, 10)
    found = [
        asyncio.run(generate(model.folder, requests, block_size=16, **load))[0]
        for load in ({"load": loader(compiled)}, {})
    ]
    assert found[0] == found[1]


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Gemma2"])
@pytest.mark.parametrize("variant", ["avx512", "avx2", "portable"])
def test_every_set_of_kernels_gives_the_same_tokens(make_model, compiled, family, variant):
    if variant not in compiled.variants():
        pytest.skip(f"this processor has no {variant}")
    model = make_model(family, **({"sliding_window": 21} if family == "Mistral" else {}))
    requests = random_requests(4, 12)
    outputs, _ = asyncio.run(generate(model.folder, requests, block_size=16, load=loader(compiled, variant)))
    assert_equal_but_for_near_ties(model, requests, outputs)


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("budget", [7, 32])
def test_chunked_prefill_beside_decoding_changes_no_token(make_model, compiled, kv_heads, budget):
    model = make_model("Llama", num_key_value_heads=kv_heads)
    requests = random_requests(2, 16, delay_s=0.01)
    outputs, _ = asyncio.run(
        generate(
            model.folder,
            requests,
            block_size=16,
            load=loader(compiled, threads=2),
            chunked_prefill=True,
            max_rolling_batch_prefill_tokens=budget,
        )
    )
    assert_equal_but_for_near_ties(model, requests, outputs)


def test_preempted_requests_get_the_same_tokens(make_model, compiled):
    model = make_model("Llama", num_key_value_heads=2)
    requests = random_requests(3, 16, longest_prompt=10, longest_output=50)
    settings = {"num_blocks": 8, "max_model_len": 64, "chunked_prefill": True}
    outputs, stats = asyncio.run(generate(model.folder, requests, block_size=16, load=loader(compiled), **settings))
    assert stats.preemptions > 0
    assert_equal_but_for_near_ties(model, requests, outputs)


@pytest.mark.parametrize("seed", range(4))
def test_any_mix_of_settings_and_arrivals_gives_the_same_tokens(make_model, compiled, seed):
    model = make_model("Llama", num_key_value_heads=2)
    requests = random_requests(200 + seed, 14, longest_prompt=40, delay_s=0.004)
    assert_any_mix_gives_the_same_tokens(
        seed,
        model,
        requests,
        block_sizes=[16, 32, 64],
        fewest_cache_tokens=80,
        spare_blocks=2,
        load=loader(compiled, threads=1 + seed % 3),
        max_model_len=96,
    )
