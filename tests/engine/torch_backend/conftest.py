"""Tiny random Llamas, saved as Hugging Face folders, and transformers' own answers for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB_SIZE = 211


@dataclass(frozen=True)
class Reference:
    """transformers' greedy continuation and, token by token, how clear the choice was."""

    token_ids: list[int]
    gaps: list[float]


class TinyLlama:
    """A saved model and the same model in transformers, float32."""

    def __init__(self, folder: Path, **changes: object) -> None:
        torch.manual_seed(7)
        config = LlamaConfig(
            **{
                "vocab_size": VOCAB_SIZE,
                "hidden_size": 64,
                "intermediate_size": 96,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 4,
                "max_position_embeddings": 512,
                "tie_word_embeddings": False,
                "initializer_range": 0.2,
                "bos_token_id": 1,
                "eos_token_id": 2,
            }
            | changes
        )
        self.model = LlamaForCausalLM(config).eval()
        for name, parameter in self.model.named_parameters():
            if name.endswith(("norm.weight", ".bias")):  # else ones and zeros, which hide mistakes
                torch.nn.init.normal_(parameter, mean=1.0, std=0.2)
        self.folder = folder
        self.model.save_pretrained(folder)

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Of every position, shape (tokens, vocab)."""
        return self.model(torch.tensor([list(token_ids)])).logits[0]

    @torch.inference_mode()
    def greedy(self, prompt: Sequence[int], num_tokens: int) -> Reference:
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


@pytest.fixture(scope="session")
def make_llama(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., TinyLlama]:
    """Build a tiny Llama with changes to its config; equal ones are built once."""
    built: dict[str, TinyLlama] = {}

    def make(**changes: object) -> TinyLlama:
        key = repr(sorted(changes.items()))
        if key not in built:
            built[key] = TinyLlama(tmp_path_factory.mktemp("llama"), **changes)
        return built[key]

    return make


@pytest.fixture(scope="session")
def llama(make_llama: Callable[..., TinyLlama]) -> TinyLlama:
    """The plain one: every query head has its own keys."""
    return make_llama()
