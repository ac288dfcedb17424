"""Every family of models answers as transformers does, from the folder that transformers saves."""

from __future__ import annotations

import asyncio
import json
import shutil

import pytest

from lmi_bench.core.errors import InputError
from lmi_bench.engine.scheduling.drafting import NgramDrafter
from lmi_bench.engine.torch_backend.executor import TorchExecutor
from lmi_bench.engine.torch_backend.load_settings import LoadSettings
from lmi_bench.models.hf_config import spec_from_hf_config
from tests.engine.torch_backend.parity import assert_equal_but_for_near_ties, generate, random_requests

TIED = {"tie_word_embeddings": True, "initializer_range": 0.1}
FALCON_40B = {"new_decoder_architecture": True, "num_kv_heads": 2}
SLIDING = {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 500.0,
    "original_max_position_embeddings": 256,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.4, 1.9, 2.5, 4.0],
    "long_factor": [2.0] * 6,
}
DEEPSEEK_YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "mscale": 1.0,
    "mscale_all_dim": 0.8,
}
MODELS = {
    "Mistral 7B v0.1: every layer slides": ("Mistral", {"sliding_window": 12}),
    "Mistral, a window and a head for every query": ("Mistral", {"sliding_window": 12, "num_key_value_heads": 4}),
    "Mistral v0.3: no window": ("Mistral", {"sliding_window": None}),
    "Mixtral: 2 of 4 experts": ("Mixtral", {}),
    "Mixtral with a window": ("Mixtral", {"sliding_window": 12}),
    "Qwen2": ("Qwen2", {}),
    "Qwen2, tied": ("Qwen2", TIED),
    "Qwen2, windows from the second layer": ("Qwen2", SLIDING),
    "Qwen3, head size of its own": ("Qwen3", {"head_dim": 24}),
    "Qwen3, tied": ("Qwen3", TIED | {"attention_bias": True}),
    "Qwen3 MoE": ("Qwen3Moe", {"norm_topk_prob": True}),
    "Qwen3 MoE, weights as scored": ("Qwen3Moe", {"norm_topk_prob": False}),
    "Qwen3 MoE, every layer slides": ("Qwen3Moe", {"use_sliding_window": True, "sliding_window": 12}),
    "Falcon 7B: one KV head, one norm": ("Falcon", {"multi_query": True}),
    "Falcon 7B's odd number of heads": (
        "Falcon",
        {"multi_query": True, "num_attention_heads": 7, "hidden_size": 56} | TIED,
    ),
    "Falcon 40B: grouped, two norms": ("Falcon", FALCON_40B | TIED),
    "Falcon 180B: as 40B, not tied": ("Falcon", FALCON_40B),
    "Falcon 11B: grouped, one norm": ("Falcon", FALCON_40B | {"num_ln_in_parallel_attn": 1}),
    "Falcon with biases": ("Falcon", FALCON_40B | {"bias": True}),
    "Falcon, a KV head for every query": ("Falcon", {"multi_query": False}),
    "Falcon, sequential": ("Falcon", {"parallel_attn": False, "bias": True}),
    "Ministral: windows in some layers": ("Ministral", {}),
    "Phi-3: fused rows, a window": ("Phi3", {"sliding_window": 12}),
    "Phi-4 mini: rotates a part, longrope": (
        "Phi3",
        {"max_position_embeddings": 1024, "rope_parameters": LONGROPE} | TIED,
    ),
    "Qwen2-MoE: dense layers, a shared expert": ("Qwen2Moe", {}),
    "Qwen2-MoE, windows": ("Qwen2Moe", SLIDING | {"decoder_sparse_step": 1, "qkv_bias": False}),
    "Qwen3 MoE, a dense layer": ("Qwen3Moe", {"mlp_only_layers": [0]}),
    "GLM-4.5: sigmoid routing": ("Glm4Moe", {}),
    "GLM-4.5: groups": ("Glm4Moe", {"n_group": 2, "topk_group": 1}),
    "gpt-oss: sinks, windows, clamped experts": ("GptOss", {}),
    "DeepSeek-V3: latent attention, groups": ("DeepseekV3", {}),
    "DeepSeek-V3, queries in one product": (
        "DeepseekV3",
        {"q_lora_rank": None, "rope_interleave": False, "rope_parameters": DEEPSEEK_YARN},
    ),
    "Kimi K2: DeepSeek-V3 without groups": (
        "DeepseekV3",
        {"model_type": "kimi_k2", "n_group": 1, "topk_group": 1, "n_shared_experts": 1}
        | {"rope_parameters": DEEPSEEK_YARN | {"beta_fast": 1.0, "beta_slow": 1.0, "mscale_all_dim": 1.0}},
    ),
    "Gemma": ("Gemma", {}),
    "Gemma 2: four norms, caps, windows": ("Gemma2", TIED),
    "Gemma 3: rotary settings by layer": ("Gemma3", TIED),
}
NEW = {name: case for name, case in MODELS.items() if case[0] not in ("Mistral", "Mixtral", "Qwen2", "Qwen3", "Falcon")}


@pytest.mark.parametrize(("family", "changes"), MODELS.values(), ids=MODELS)
def test_a_batch_of_requests_gets_the_tokens_that_transformers_gives_each(make_model, family, changes):
    model = make_model(family, **changes)
    requests = random_requests(1, 10)
    outputs, _ = asyncio.run(generate(model.folder, requests, block_size=4))
    assert_equal_but_for_near_ties(model, requests, outputs)


@pytest.mark.parametrize(("family", "changes"), NEW.values(), ids=NEW)
def test_chunks_preemption_prefixes_and_drafts_change_no_token(make_model, family, changes):
    model = make_model(family, **changes)
    requests = random_requests(2, 10, longest_prompt=24, longest_output=36)
    requests = [([5, 7, 9, 11, *prompt], tokens, wait_s) for prompt, tokens, wait_s in requests]
    outputs, stats = asyncio.run(
        generate(
            model.folder,
            requests,
            block_size=4,
            num_blocks=20,
            chunked_prefill=True,
            max_rolling_batch_prefill_tokens=7,
            prefix_caching=True,
            drafter=NgramDrafter(3, shortest=1),
        )
    )
    assert stats.preemptions > 0
    assert stats.prefix_hit_tokens > 0
    assert stats.drafted_tokens > 0
    assert_equal_but_for_near_ties(model, requests, outputs)


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("budget", [7, 40])
def test_windows_hold_in_chunks_beside_decoding_and_after_preemption(make_model, kv_heads, budget):
    model = make_model("Mistral", sliding_window=12, num_key_value_heads=kv_heads)
    requests = random_requests(2, 12, longest_prompt=24, longest_output=36)
    outputs, stats = asyncio.run(
        generate(
            model.folder,
            requests,
            block_size=4,
            num_blocks=20,
            chunked_prefill=True,
            max_rolling_batch_prefill_tokens=budget,
        )
    )
    assert stats.preemptions > 0
    assert_equal_but_for_near_ties(model, requests, outputs)


def test_blocks_behind_every_window_serve_others_and_no_token_changes(make_model):
    """8 sequences of up to 130 tokens want 260 blocks of 4; with a window of 12 they hold at most
    8 * 4 but for their prompts, so that 48 blocks do without a preemption."""
    model = make_model("Mistral", sliding_window=12, max_position_embeddings=256)
    requests = random_requests(5, 8, longest_prompt=16, longest_output=110)
    settings = {"block_size": 4, "num_blocks": 48, "max_model_len": 190}
    outputs, stats = asyncio.run(generate(model.folder, requests, attention_window=12, **settings))
    assert stats.preemptions == 0
    assert_equal_but_for_near_ties(model, requests, outputs)
    _, kept = asyncio.run(generate(model.folder, requests, **settings))
    assert kept.preemptions > 0


@pytest.mark.parametrize("window", [12, 300])
def test_a_prompt_that_is_cut_for_its_window_sees_across_the_cuts(make_model, window):
    """700 tokens are cut at every 256th row, or at every window where that is longer."""
    model = make_model("Mistral", sliding_window=window, max_position_embeddings=1024)
    (request,) = random_requests(3, 1)
    requests = [([*range(3, 203)] * 3 + [*range(50, 150)], 5, 0.0), request]
    outputs, _ = asyncio.run(generate(model.folder, requests, max_model_len=1024, block_size=16))
    assert_equal_but_for_near_ties(model, requests, outputs)


def test_other_requests_in_the_batch_change_nothing_for_a_mixture_of_experts(make_model):
    model = make_model("Mixtral")
    requests = random_requests(4, 8)
    together, _ = asyncio.run(generate(model.folder, requests))
    alone = [asyncio.run(generate(model.folder, [request]))[0][0] for request in requests]
    assert together == alone


RW_7B = {"model_type": "RefinedWebModel", "n_head": 4, "n_layer": 2, "multi_query": True, "parallel_attn": True}
RW_40B = {"model_type": "RefinedWeb", "n_head": 4, "n_layer": 2, "n_head_kv": 2}
RW_40B |= {"parallel_attn": True}


@pytest.mark.parametrize(
    ("changes", "old_config"), [({"multi_query": True}, RW_7B), (FALCON_40B, RW_40B)], ids=["7B", "40B"]
)
def test_falcons_first_config_keys_give_the_same_model(make_model, tmp_path, changes, old_config):
    model = make_model("Falcon", **changes)
    folder = shutil.copytree(model.folder, tmp_path / "model")
    common = {
        "architectures": ["RWForCausalLM"],
        "auto_map": {"AutoModelForCausalLM": "modelling_RW.RWForCausalLM"},
        "alibi": False,
        "apply_residual_connection_post_layernorm": False,
        "bias": False,
        "hidden_size": 64,
        "layer_norm_epsilon": 1e-05,
        "vocab_size": 211,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(common | old_config))
    requests = random_requests(5, 4)
    outputs, _ = asyncio.run(generate(folder, requests))
    assert_equal_but_for_near_ties(model, requests, outputs)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"alibi": True}, "alibi is not supported"),
        ({"activation": "relu"}, "activation 'relu' is not supported; falcon needs gelu"),
        ({"apply_residual_connection_post_layernorm": True}, "post_layernorm is not supported"),
    ],
)
def test_falcons_that_would_be_computed_wrongly_are_refused(make_model, tmp_path, changes, message):
    folder = shutil.copytree(make_model("Falcon").folder, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(InputError, match=message):
        TorchExecutor.load(folder, LoadSettings(num_blocks=2, threads=1))


@pytest.mark.parametrize(("family", "changes"), MODELS.values(), ids=MODELS)
def test_parameters_are_counted_as_transformers_counts_them(make_model, family, changes):
    model = make_model(family, **changes)
    spec = spec_from_hf_config("tiny", json.loads((model.folder / "config.json").read_text()))
    assert spec.params_total == model.model.num_parameters()
