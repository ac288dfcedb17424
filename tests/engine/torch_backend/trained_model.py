"""A tiny Llama that has learnt a short text letter by letter, so that its perplexity means
something: rounding its weights makes it worse, and the worse the fewer bits are left.

A few channels of its activations are far larger than the rest, as in large models (Dettmers et al.
2022, arXiv:2208.07339): the norms' weights are multiplied there and the columns that read them
divided, which changes no output.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
import transformers
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from lmi_bench.engine.texts import CALIBRATION, EVALUATION, read_text
from lmi_bench.engine.torch_backend.kv_cache import KvCache, KvLayoutShape
from lmi_bench.engine.torch_backend.precision import Precision
from lmi_bench.engine.torch_backend.quantization.calibration import calibration_sequences
from lmi_bench.engine.torch_backend.quantization.loader import QuantizePlan, build_model
from lmi_bench.engine.torch_backend.runner import ModelRunner, TorchForward
from lmi_bench.models.folder import read_config
from lmi_bench.models.hf_config import spec_from_hf_config

_STEPS = 200
_BATCH = 8
_LENGTH = 64
_OUTLIERS = 4
_OUTLIER_FACTOR = 30.0


def write_trained_model(folder: Path) -> Path:
    """Train a model of 0.4 million parameters on the sample text (some seconds) and save it."""
    torch.manual_seed(5)
    text = "\n\n".join(read_text(None, part) for part in (CALIBRATION, EVALUATION))
    letters = sorted(set(text))
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    config = transformers.LlamaConfig(
        vocab_size=len(letters),
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        intermediate_size=256,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = transformers.LlamaForCausalLM(config)
    ids = torch.tensor([vocabulary[letter] for letter in text])
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.05)
    for step in range(_STEPS):
        for group in optimizer.param_groups:
            group["lr"] = 4e-3 * math.cos(0.5 * math.pi * step / _STEPS)
        starts = torch.randint(0, len(ids) - _LENGTH, (_BATCH,))
        batch = torch.stack([ids[start : start + _LENGTH] for start in starts])
        loss = model(batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    _raise_outliers(model)
    model.save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=letters[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@torch.no_grad()
def _raise_outliers(model: transformers.LlamaForCausalLM) -> None:
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for norm, readers in (
            (layer.input_layernorm, (attention.q_proj, attention.k_proj, attention.v_proj)),
            (layer.post_attention_layernorm, (mlp.gate_proj, mlp.up_proj)),
        ):
            channels = torch.randperm(len(norm.weight))[:_OUTLIERS]
            norm.weight[channels] *= _OUTLIER_FACTOR
            for reader in readers:
                reader.weight[:, channels] /= _OUTLIER_FACTOR


def perplexity(scores: torch.Tensor) -> float:
    """exp(-mean log-probability)."""
    return math.exp(-float(scores.double().mean()))


def text_scores(folder: Path, plan: QuantizePlan | None = None) -> torch.Tensor:
    """Log-probabilities of the sample text's letters, in float32, weights rounded by `plan`."""
    spec = spec_from_hf_config(folder.name, read_config(folder))
    precision, device = Precision(torch.float32, torch.float32), torch.device("cpu")
    model = build_model(folder, spec, precision, device, plan=plan)
    layout = KvLayoutShape(
        num_layers=spec.num_layers,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        block_size=64,
        dtype=torch.float32,
    )
    runner = ModelRunner(TorchForward(model, KvCache(layout, 2, device)), sampling_seed=0)
    scores: list[float] = []
    for sequence in calibration_sequences(folder, None, spec)[:16]:
        scores += runner.score(sequence, 1)
    return torch.tensor(scores)
