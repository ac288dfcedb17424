"""Tiny random models of every family, saved as Hugging Face folders, and transformers' own answers
for them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers

VOCAB_SIZE = 211

GATED = {"intermediate_size": 96, "num_key_value_heads": 2, "tie_word_embeddings": False}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
FALCON = {"alibi": False, "tie_word_embeddings": False}
LAYER_TYPES = ["sliding_attention", "full_attention"]
GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 20, "sliding_window": 12}
GEMMA |= {"layer_types": LAYER_TYPES}
SIGMOID = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
SIGMOID |= {"n_shared_experts": 2, "first_k_dense_replace": 1, "routed_scaling_factor": 1.7}
MLA = {"kv_lora_rank": 40, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16}
MLA |= {"v_head_dim": 20}
# transformers up to 5.17 leaves the cap of the scores out with its default attention
CAPS = {"attn_implementation": "eager", "attn_logit_softcapping": 3.0}
FAMILIES: dict[str, dict[str, object]] = {
    "Llama": GATED | {"num_key_value_heads": 4},
    "Mistral": GATED,
    "Mixtral": GATED | EXPERTS,
    "Qwen2": GATED,
    "Qwen3": GATED | {"head_dim": 16},
    "Qwen3Moe": GATED | {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "Falcon": FALCON,
    "Phi3": GATED | {"pad_token_id": 2},
    "Qwen2Moe": GATED
    | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    | {"shared_expert_intermediate_size": 48, "decoder_sparse_step": 2},
    "Glm4Moe": GATED | SIGMOID | {"head_dim": 24, "use_qk_norm": True, "n_group": 1},
    "GptOss": GATED | EXPERTS | {"intermediate_size": 64, "head_dim": 16, "sliding_window": 12, "swiglu_limit": 1.0},
    "DeepseekV3": GATED | SIGMOID | {"num_key_value_heads": 4, "n_group": 2, "topk_group": 1} | MLA,
    "Gemma": GATED | {"head_dim": 32},
    "Gemma2": GATED | GEMMA | CAPS | {"final_logit_softcapping": 20.0},
    "Gemma3": GATED | GEMMA,
    "Ministral": GATED | {"head_dim": 16, "sliding_window": 12, "layer_types": LAYER_TYPES},
}
"""What each family's config has beside the common sizes."""


@dataclass(frozen=True)
class Reference:
    """transformers' greedy continuation and, token by token, how clear the choice was."""

    token_ids: list[int]
    gaps: list[float]


class TinyModel:
    """A saved model and the same model in transformers, float32."""

    def __init__(self, folder: Path, family: str, *, model_type: str | None = None, **changes: object) -> None:
        """model_type  another name that config.json gives the family"""
        torch.manual_seed(7)
        text = "Text" if family == "Gemma3" else ""
        config = getattr(transformers, f"{family}{text}Config")(
            **{
                "vocab_size": VOCAB_SIZE,
                "hidden_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "max_position_embeddings": 512,
                "initializer_range": 0.2,
                "bos_token_id": 1,
                "eos_token_id": 2,
            }
            | FAMILIES[family]
            | changes
        )
        self.model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
        zero = ("bias",) if "Gemma" not in family else ("bias", "norm.weight")
        state = dict(self.model.named_parameters()) | dict(self.model.named_buffers())
        for name, parameter in state.items():
            if (parameter.ndim == 1 and "inv_freq" not in name) or name.endswith("_bias"):
                # norms, biases, sinks: else ones and zeros, which hide mistakes
                mean = 0.0 if name.endswith(zero) else 1.0
                torch.nn.init.normal_(parameter, mean=mean, std=0.2)
            elif name.endswith((".gate.weight", "router.weight")):
                torch.nn.init.normal_(parameter, std=0.5)  # a router that has a clear opinion
        for part in self.model.modules():
            if hasattr(part, "limit"):  # gpt-oss's, which transformers up to 5.17 does not read
                part.limit = config.swiglu_limit
        self.folder = folder
        self.model.save_pretrained(folder)
        if model_type is not None:
            stated = json.loads((folder / "config.json").read_text())
            (folder / "config.json").write_text(json.dumps(stated | {"model_type": model_type}))

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Of every position, shape (tokens, vocab)."""
        return self.model(torch.tensor([list(token_ids)])).logits[0]

    @torch.inference_mode()
    def greedy(self, prompt: Sequence[int], num_tokens: int) -> Reference:
        self.logits([0])  # dynamic RoPE remembers the longest sequence until a short one comes
        out = self.model.generate(
            torch.tensor([list(prompt)]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        top = torch.stack(out.logits)[:, 0].topk(2).values
        return Reference(out.sequences[0, len(prompt) :].tolist(), (top[:, 0] - top[:, 1]).tolist())
