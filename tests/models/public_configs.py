"""Facts of public models' config.json that fix their sizes, and the totals that were published.

Only keys that the sizes depend on. Totals in 1e9 parameters: the model card's or the Hub's count of
the safetensors; `active` where the card states it.
"""

from __future__ import annotations

from typing import Any

Config = dict[str, Any]


def _moe(
    family: str, layers: int, hidden: int, heads: int, kv: int, *, positions: int, **more: Any
) -> Config:
    return {
        "model_type": family,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "max_position_embeddings": positions,
        "tie_word_embeddings": False,
        **more,
    }


def _mla(layers: int, hidden: int, heads: int, query_rank: int | None, **more: Any) -> Config:
    latent = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
    shared = {"q_lora_rank": query_rank, "v_head_dim": 128, "n_shared_experts": 1, **latent}
    return _moe("deepseek_v3", layers, hidden, heads, heads, **(shared | more))


_QWEN_VISION = {
    "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "spatial_merge_size": 2,
}  # fmt: skip
_LLAMA_VISION = {"hidden_size": 1408, "intermediate_size": 5632, "num_hidden_layers": 34}


def _llama4(experts: int, step: int, positions: int) -> Config:
    text = _moe(
        "llama4_text", 48, 5120, 40, 8, positions=positions, vocab_size=202048,
        num_local_experts=experts,
        num_experts_per_tok=1, intermediate_size=8192, intermediate_size_mlp=16384, head_dim=128,
        interleave_moe_layer_step=step, attention_chunk_size=8192,
    )  # fmt: skip
    return {"model_type": "llama4", "text_config": text, "vision_config": _LLAMA_VISION}


def _qwen35(layers: int, hidden: int, heads: int, kv: int, values: int, **more: Any) -> Config:
    text = _moe(
        "qwen3_5_text", layers, hidden, heads, kv, positions=262144, vocab_size=248320,
        head_dim=256, attn_output_gate=True, full_attention_interval=4, linear_num_key_heads=16,
        linear_num_value_heads=values, linear_key_head_dim=128, linear_value_head_dim=128,
        linear_conv_kernel_dim=4, mamba_ssm_dtype="float32", **more,
    )  # fmt: skip
    return {"model_type": "qwen3_5", "text_config": text, "vision_config": _QWEN_VISION}


def _gemma4_edge(
    layers: int, hidden: int, kv: int, every: int, shared: int, *, wide: bool
) -> Config:
    """Gemma 4 for phones: the last `shared` layers read the cache of those before them."""
    text = _moe(
        "gemma4_text", layers, hidden, 8, kv, positions=131072, vocab_size=262144, head_dim=256,
        global_head_dim=512, intermediate_size=4 * hidden, sliding_window=512,
        tie_word_embeddings=True, hidden_size_per_layer_input=256,
        vocab_size_per_layer_input=262144, num_kv_shared_layers=shared, use_double_wide_mlp=wide,
        layer_types=[
            "sliding_attention" if (i + 1) % every else "full_attention" for i in range(layers)
        ],
    )  # fmt: skip
    return {"model_type": "gemma4", "text_config": text}


def _mamba(pattern: str, hidden: int, heads: int, kv: int, **more: Any) -> Config:
    return _moe(
        "nemotron_h", len(pattern), hidden, heads, kv, vocab_size=131072, n_groups=8, conv_kernel=4,
        head_dim=128, mamba_head_dim=64, mlp_hidden_act="relu2", hybrid_override_pattern=pattern,
        mamba_ssm_cache_dtype="float32", **more,
    )  # fmt: skip


_KIMI_FULL = [4, 8, 12, 16, 20, 24, 27]
_NANO = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
_SUPER = "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME"

CONFIGS: dict[str, Config] = {
    "deepseek-v3": _mla(
        61, 7168, 128, 1536, positions=163840,
        vocab_size=129280, intermediate_size=18432, first_k_dense_replace=3,
        n_routed_experts=256, num_experts_per_tok=8, moe_intermediate_size=2048, moe_layer_freq=1,
        num_nextn_predict_layers=1,
    ),
    "deepseek-v2": _mla(
        60, 5120, 128, 1536, positions=163840,
        vocab_size=102400, intermediate_size=12288, first_k_dense_replace=1,
        n_routed_experts=160, num_experts_per_tok=6, moe_intermediate_size=1536, n_shared_experts=2,
    ),
    "deepseek-v2-lite": _mla(
        27, 2048, 16, None, positions=163840,
        vocab_size=102400, intermediate_size=10944, first_k_dense_replace=1,
        n_routed_experts=64, num_experts_per_tok=6, moe_intermediate_size=1408, n_shared_experts=2,
    ),
    "kimi-k2": _mla(
        61, 7168, 64, 1536, positions=131072,
        vocab_size=163840, intermediate_size=18432, first_k_dense_replace=1,
        n_routed_experts=384, num_experts_per_tok=8, moe_intermediate_size=2048,
    ),
    "glm-4.5": _moe(
        "glm4_moe", 92, 5120, 96, 8, positions=131072,
        vocab_size=151552, head_dim=128, intermediate_size=12288,
        n_routed_experts=160, num_experts_per_tok=8, moe_intermediate_size=1536, n_shared_experts=1,
        first_k_dense_replace=3, num_nextn_predict_layers=1,
    ),
    "glm-4.5-air": _moe(
        "glm4_moe", 46, 4096, 96, 8, positions=131072,
        vocab_size=151552, head_dim=128, intermediate_size=10944,
        n_routed_experts=128, num_experts_per_tok=8, moe_intermediate_size=1408, n_shared_experts=1,
        first_k_dense_replace=1, num_nextn_predict_layers=1,
    ),
    "glm-5": _mla(
        78, 6144, 64, 2048, model_type="glm_moe_dsa", positions=202752,
        vocab_size=154880, intermediate_size=12288,
        first_k_dense_replace=3, n_routed_experts=256, num_experts_per_tok=8,
        moe_intermediate_size=2048, qk_nope_head_dim=192, v_head_dim=256, index_topk=2048,
        index_head_dim=128, index_n_heads=32,
    ),
    "qwen3-next-80b-a3b": _moe(
        "qwen3_next", 48, 2048, 16, 2, positions=262144,
        vocab_size=151936, head_dim=256, num_experts=512,
        num_experts_per_tok=10, moe_intermediate_size=512, shared_expert_intermediate_size=512,
        full_attention_interval=4, linear_num_key_heads=16, linear_num_value_heads=32,
        linear_key_head_dim=128, linear_value_head_dim=128, linear_conv_kernel_dim=4,
        decoder_sparse_step=1,
    ),
    "qwen3.5-397b-a17b": _qwen35(
        60, 4096, 32, 2, 64, num_experts=512, num_experts_per_tok=10, moe_intermediate_size=1024,
        shared_expert_intermediate_size=1024, mtp_num_hidden_layers=1,
    ),
    "qwen3.5-27b": _qwen35(64, 5120, 24, 4, 48, intermediate_size=17408),
    "qwen3-coder-480b-a35b": _moe(
        "qwen3_moe", 62, 6144, 96, 8, positions=262144,
        vocab_size=151936, head_dim=128, intermediate_size=8192,
        num_experts=160, num_experts_per_tok=8, moe_intermediate_size=2560,
    ),
    "gpt-oss-120b": _moe(
        "gpt_oss", 36, 2880, 64, 8, positions=131072,
        vocab_size=201088, head_dim=64, intermediate_size=2880,
        num_local_experts=128, num_experts_per_tok=4, sliding_window=128,
    ),
    "gpt-oss-20b": _moe(
        "gpt_oss", 24, 2880, 64, 8, positions=131072,
        vocab_size=201088, head_dim=64, intermediate_size=2880,
        num_local_experts=32, num_experts_per_tok=4, sliding_window=128,
    ),
    "llama-4-scout": _llama4(16, 1, 10485760),
    "llama-4-maverick": _llama4(128, 2, 1048576),
    "minimax-m2": _moe(
        "minimax_m2", 62, 3072, 48, 8, positions=196608,
        vocab_size=200064, head_dim=128, intermediate_size=1536,
        num_local_experts=256, num_experts_per_tok=8, num_mtp_modules=3, use_mtp=True,
    ),
    "minimax-text-01": _moe(
        "minimax_text_01", 80, 6144, 64, 8, positions=10240000,
        vocab_size=200064, head_dim=128, intermediate_size=9216,
        num_local_experts=32, num_experts_per_tok=2, attn_type_list=([0] * 7 + [1]) * 10,
    ),
    "kimi-linear-48b-a3b": _mla(
        27, 2304, 32, None, model_type="kimi_linear", positions=1048576,
        vocab_size=163840, intermediate_size=9216,
        num_experts=256, num_experts_per_token=8, moe_intermediate_size=1024, num_shared_experts=1,
        n_shared_experts=None, first_k_dense_replace=1, moe_layer_freq=1,
        linear_attn_config={
            "num_heads": 32, "head_dim": 128, "short_conv_kernel_size": 4,
            "full_attn_layers": _KIMI_FULL,
        },
    ),
    "jamba-1.5-mini": _moe(
        "jamba", 32, 4096, 32, 8, positions=262144,
        vocab_size=65536, intermediate_size=14336, num_experts=16,
        num_experts_per_tok=2, expert_layer_period=2, expert_layer_offset=1, attn_layer_period=8,
        attn_layer_offset=4, mamba_d_state=16, mamba_d_conv=4, mamba_expand=2, mamba_dt_rank=256,
    ),
    "jamba-1.5-large": _moe(
        "jamba", 72, 8192, 64, 8, positions=262144,
        vocab_size=65536, intermediate_size=24576, num_experts=16,
        num_experts_per_tok=2, expert_layer_period=2, expert_layer_offset=1, attn_layer_period=8,
        attn_layer_offset=4, mamba_d_state=16, mamba_d_conv=4, mamba_expand=2, mamba_dt_rank=512,
    ),
    "falcon-h1-34b": _moe(
        "falcon_h1", 72, 5120, 20, 4, positions=262144, vocab_size=261120, head_dim=128,
        intermediate_size=21504, mamba_d_ssm=4096, mamba_n_heads=32, mamba_d_head=128,
        mamba_d_state=256, mamba_n_groups=2, mamba_d_conv=4, mamba_expand=2,
    ),
    "nemotron-h-56b": _mamba(
        ("M-M-M-M*-" + "M-M-M-M-M*-" * 9 + "M-M-M-M-M-"), 8192, 64, 8, positions=8192,
        intermediate_size=32768,
        mamba_num_heads=256, ssm_state_size=256,
    ),
    "nemotron-3-nano": _mamba(
        _NANO, 2688, 32, 2, positions=262144,
        intermediate_size=1856, mamba_num_heads=64, ssm_state_size=128,
        n_routed_experts=128, num_experts_per_tok=6, moe_intermediate_size=1856,
        n_shared_experts=1, moe_shared_expert_intermediate_size=3712,
    ),
    "nemotron-3-super": _mamba(
        _SUPER, 4096, 32, 2, positions=262144,
        intermediate_size=2688, mamba_num_heads=128, ssm_state_size=128,
        n_routed_experts=512, num_experts_per_tok=22, moe_intermediate_size=2688,
        n_shared_experts=1, moe_shared_expert_intermediate_size=5376, moe_latent_size=1024,
    ),
    "mamba-2.8b": {
        "model_type": "mamba", "num_hidden_layers": 64, "hidden_size": 2560, "state_size": 16,
        "vocab_size": 50280, "conv_kernel": 4, "expand": 2, "time_step_rank": 160,
        "tie_word_embeddings": True,
    },
    "falcon-mamba-7b": {
        "model_type": "falcon_mamba", "num_hidden_layers": 64, "hidden_size": 4096,
        "state_size": 16, "vocab_size": 65024, "conv_kernel": 4, "expand": 2,
        "time_step_rank": 256, "tie_word_embeddings": False,
    },
    "mistral-small-3.1-24b": {
        "model_type": "mistral3",
        "text_config": _moe(
            "mistral", 40, 5120, 32, 8, positions=131072,
        vocab_size=131072, head_dim=128, intermediate_size=32768,
            sliding_window=None,
        ),
        "vision_config": {
            "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
        },
    },
    "phi-4": _moe(
        "phi3", 40, 5120, 40, 10, vocab_size=100352, intermediate_size=17920,
        positions=16384,
    ),
    "phi-3.5-moe": _moe(
        "phimoe", 32, 4096, 32, 8, positions=131072,
        vocab_size=32064, intermediate_size=6400, num_local_experts=16,
        num_experts_per_tok=2,
    ),
    "granite-3.3-8b": _moe(
        "granite", 40, 4096, 32, 8, positions=131072, vocab_size=49159, intermediate_size=12800,
        tie_word_embeddings=True,
    ),
    "granite-4.0-h-small": _moe(
        "granitemoehybrid", 40, 4096, 32, 8, positions=131072,
        vocab_size=100352, intermediate_size=768,
        num_local_experts=72, num_experts_per_tok=10, shared_intermediate_size=1536,
        tie_word_embeddings=True, mamba_d_state=128, mamba_d_conv=4, mamba_expand=2,
        mamba_n_heads=128, mamba_d_head=64, mamba_n_groups=1,
        layer_types=[
            "attention" if i in (5, 15, 25, 35) else "mamba" for i in range(40)
        ],
    ),
    "gemma-3-27b": {
        "model_type": "gemma3",
        "text_config": _moe(
            "gemma3_text", 62, 5376, 32, 16, positions=131072, vocab_size=262208, head_dim=128,
            intermediate_size=21504, sliding_window=1024, tie_word_embeddings=True,
        ),
        "vision_config": {
            "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27,
        },
    },
    "gemma-3-4b": {  # as published: what equals transformers' defaults is left out
        "model_type": "gemma3",
        "text_config": {
            "model_type": "gemma3_text", "num_hidden_layers": 34, "hidden_size": 2560,
            "intermediate_size": 10240, "sliding_window": 1024,
        },
        "vision_config": {
            "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27,
        },
    },
    "gemma-4-31b": {
        "model_type": "gemma4",
        "text_config": _moe(
            "gemma4_text", 60, 5376, 32, 16, positions=262144, vocab_size=262144, head_dim=256,
            global_head_dim=512, num_global_key_value_heads=4, attention_k_eq_v=True,
            intermediate_size=21504, sliding_window=1024, tie_word_embeddings=True,
            hidden_size_per_layer_input=0, vocab_size_per_layer_input=262144,
        ),
        "vision_config": {
            "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27,
        },
    },
    "gemma-4-e2b": _gemma4_edge(35, 1536, 1, 5, 20, wide=True),
    "gemma-4-e4b": _gemma4_edge(42, 2560, 2, 6, 18, wide=False),
    "command-a": _moe(
        "cohere2", 64, 12288, 96, 8, positions=131072,
        vocab_size=256000, head_dim=128, intermediate_size=36864,
        sliding_window=4096, tie_word_embeddings=True,
    ),
    "dbrx": {
        "model_type": "dbrx", "n_layers": 40, "d_model": 6144, "n_heads": 48, "vocab_size": 100352,
        "max_seq_len": 32768, "attn_config": {"kv_n_heads": 8},
        "ffn_config": {"ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4},
    },
    "ernie-4.5-300b-a47b": _moe(
        "ernie4_5_moe", 54, 8192, 64, 8, positions=131072,
        vocab_size=103424, intermediate_size=28672,
        moe_num_experts=64, moe_k=8, moe_intermediate_size=3584, moe_layer_start_index=3,
        moe_layer_end_index=53, moe_layer_interval=1,
    ),
    "nemotron-4-340b": _moe(
        "nemotron", 96, 18432, 96, 8, positions=4096, vocab_size=256000, intermediate_size=73728,
        hidden_act="relu2",
    ),
    "olmoe-1b-7b": _moe(
        "olmoe", 16, 2048, 16, 16, positions=4096,
        vocab_size=50304, intermediate_size=1024, num_experts=64,
        num_experts_per_tok=8,
    ),
    "mimo-v2-flash": _moe(
        "mimo_v2_flash", 48, 4096, 64, 4, positions=262144,
        vocab_size=152576, head_dim=192, v_head_dim=128,
        intermediate_size=16384, n_routed_experts=256, num_experts_per_tok=8,
        moe_intermediate_size=2048, moe_layer_freq=[0] + [1] * 47, sliding_window=128,
        swa_num_key_value_heads=8, hybrid_layer_pattern=([0] + [1] * 4 + ([0] + [1] * 5) * 7 + [0]),
    ),
    "deepseek-v4-flash": _moe(
        "deepseek_v4", 43, 4096, 64, 1, positions=1048576,
        vocab_size=129280, head_dim=512, q_lora_rank=1024,
        o_lora_rank=1024, o_groups=8, qk_rope_head_dim=64, n_routed_experts=256, n_shared_experts=1,
        num_experts_per_tok=6, moe_intermediate_size=2048, sliding_window=128, index_topk=512,
        index_head_dim=128, index_n_heads=64, compress_ratios=[0, 0] + [4, 128] * 20 + [4, 0],
    ),
}  # fmt: skip

# name: (total, active or None) in 1e9
PUBLISHED: dict[str, tuple[float, float | None]] = {
    "deepseek-v3": (671, 37),
    "deepseek-v2": (236, 21),
    "deepseek-v2-lite": (15.7, 2.4),
    "kimi-k2": (1026.5, 32.6),
    "glm-4.5": (355, 32),
    "glm-4.5-air": (106, None),
    "glm-5": (744, 40),
    "qwen3-next-80b-a3b": (80, None),
    "qwen3.5-397b-a17b": (397, 17),
    "qwen3.5-27b": (27.4, None),
    "qwen3-coder-480b-a35b": (480, 35),
    "gpt-oss-120b": (116.8, 5.1),
    "gpt-oss-20b": (20.9, 3.6),
    "llama-4-scout": (109, 17),
    "llama-4-maverick": (401.6, 17),
    "minimax-m2": (229, 10),
    "minimax-text-01": (456, 45.9),
    "kimi-linear-48b-a3b": (49, 3),
    "jamba-1.5-mini": (52, 12),
    "jamba-1.5-large": (398, 94),
    "falcon-h1-34b": (33.6, None),
    "nemotron-h-56b": (56, None),
    "nemotron-3-nano": (31.6, 3.6),
    "nemotron-3-super": (120.6, 12.7),
    "mamba-2.8b": (2.77, None),
    "falcon-mamba-7b": (7.27, None),
    "mistral-small-3.1-24b": (24, None),
    "phi-4": (14.7, None),
    "phi-3.5-moe": (41.9, 6.6),
    "granite-3.3-8b": (8.17, None),
    "granite-4.0-h-small": (32.2, 9),
    "gemma-3-27b": (27.4, None),
    "gemma-3-4b": (4.3, None),
    "command-a": (111, None),
    "dbrx": (132, 36),
    "ernie-4.5-300b-a47b": (300, 47),
    "nemotron-4-340b": (340, None),
    "olmoe-1b-7b": (6.92, 1.3),
    "mimo-v2-flash": (309, 15),
    "deepseek-v4-flash": (284, 13),
}
