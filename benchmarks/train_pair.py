"""Trains the two small models in the box, demo-text and its draft, from bytes.

Text: the language reference that every Python installation carries (`pydoc_data.topics`, Python
3.11.7: 0.45 MB; PSF License 2). One topic in ten is left out: a part of those is the held-out
text beside the models, on which `perplexity` and `optimize` judge them. The target learns from the
text; the draft, a sixth of its depth, from the text and from the target's own probabilities, so
that its guesses hold.

A few channels of the target's activations are then made far larger and the columns that read them
smaller by the same power of two, which changes no output: large models have such channels
(Dettmers et al. 2022, arXiv:2208.07339), and they are what SmoothQuant is for.

    OMP_NUM_THREADS=1 python benchmarks/train_pair.py --out lmi_bench/models/trained

One core is enough; its minutes are printed.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.nn import functional

SEED = 20_261_124
TRAINED_LENGTH = 512
STEP_TOKENS = 4096
END = 0  # the token id between topics; byte b is token b + 1
HELD_OUT_BYTES = 32_768
OUTLIERS, OUTLIER_FACTOR = 4, 32.0
TARGET_LAYERS, DRAFT_LAYERS = 6, 1
TARGET_STEPS, DRAFT_STEPS = ((128, 400), (TRAINED_LENGTH, 200)), ((128, 500), (TRAINED_LENGTH, 120))
"""Steps at each length of window: short ones first, which cost less attention."""


def split_text() -> tuple[str, str]:
    """The text to learn, and the held-out one."""
    learnt, kept = [], []
    for number, name in enumerate(sorted(topics)):
        (kept if number % 10 == 5 else learnt).append(topics[name])
    held_out = "\n\n".join(kept).encode()[:HELD_OUT_BYTES].decode(errors="ignore")
    return "\0".join(learnt), held_out


def ids_of(text: str) -> Tensor:
    """Token ids of a text whose parts are separated by a zero byte."""
    return torch.tensor([byte + 1 if byte else END for byte in text.encode()])


def config_of(layers: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 128,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "intermediate_size": 384,
        "vocab_size": 257,
        "max_position_embeddings": TRAINED_LENGTH,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": END,
        "dtype": "bfloat16",
    }


def new_model(layers: int) -> transformers.LlamaForCausalLM:
    made = {key: value for key, value in config_of(layers).items() if key != "dtype"}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**made))


def learn(
    model: transformers.LlamaForCausalLM,
    ids: Tensor,
    schedule: Sequence[tuple[int, int]],
    teacher: transformers.LlamaForCausalLM | None = None,
) -> None:
    """Minimise the cross-entropy of the next byte, and where there is a teacher also of its own
    probabilities."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    lengths = [length for length, count in schedule for _ in range(count)]
    steps = len(lengths)
    for step, length in enumerate(lengths):
        warm, done = min(1.0, (step + 1) / 40), step / steps
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * warm * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done)))
        starts = torch.randint(0, len(ids) - length - 1, (STEP_TOKENS // length,))
        window = torch.stack([ids[at : at + length + 1] for at in starts])
        inputs, wanted = window[:, :-1], window[:, 1:].reshape(-1)
        logits = model(inputs).logits.flatten(0, 1)
        loss = functional.cross_entropy(logits, wanted)
        if teacher is not None:
            with torch.no_grad():
                taught = functional.softmax(teacher(inputs).logits.flatten(0, 1), dim=-1)
            loss = 0.2 * loss + 0.8 * functional.cross_entropy(logits, taught)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 49 or step == steps - 1:
            print(f"step {step + 1}: {loss.item():.3f}, {time.process_time():.0f} s", flush=True)


@torch.no_grad()
def raise_outliers(model: transformers.LlamaForCausalLM) -> None:
    generator = torch.Generator().manual_seed(SEED)
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for norm, readers in (
            (layer.input_layernorm, (attention.q_proj, attention.k_proj, attention.v_proj)),
            (layer.post_attention_layernorm, (mlp.gate_proj, mlp.up_proj)),
        ):
            channels = torch.randperm(len(norm.weight), generator=generator)[:OUTLIERS]
            norm.weight[channels] *= OUTLIER_FACTOR
            for reader in readers:
                reader.weight[:, channels] /= OUTLIER_FACTOR


@torch.no_grad()
def held_out_logits(model: transformers.LlamaForCausalLM, ids: Tensor) -> Tensor:
    windows = ids[: len(ids) // TRAINED_LENGTH * TRAINED_LENGTH].view(-1, TRAINED_LENGTH)
    return torch.cat([model(window[None, :]).logits for window in windows])


def perplexity(logits: Tensor, ids: Tensor) -> float:
    windows = ids[: logits.shape[0] * TRAINED_LENGTH].view(-1, TRAINED_LENGTH)
    loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), windows[:, 1:].reshape(-1))
    return math.exp(float(loss))


def save(model: transformers.LlamaForCausalLM, folder: Path, layers: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        name: value.to(torch.bfloat16).contiguous()
        for name, value in model.state_dict().items()
        if name != "lm_head.weight"  # the embedding
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    letters = sorted(pre_tokenizers.ByteLevel.alphabet(), key=byte_of)
    vocabulary = {"</s>": END} | {letter: byte_of(letter) + 1 for letter in letters}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    for name, content in (
        ("config.json", config_of(layers)),
        ("generation_config.json", {"eos_token_id": END}),
        ("tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"}),
    ):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def byte_of(letter: str) -> int:
    """The byte that a letter of the byte-level alphabet stands for (GPT-2's table)."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return ord(letter) if ord(letter) < 256 else hidden[ord(letter) - 256]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    text, held_out = split_text()
    ids, unseen = ids_of(text), ids_of(held_out)
    print(f"Python {platform.python_version()}: {len(ids):,} bytes to learn, {len(unseen):,} not")
    target, draft = new_model(TARGET_LAYERS), new_model(DRAFT_LAYERS)
    learn(target, ids, TARGET_STEPS)
    raise_outliers(target)
    save(target, args.out / "demo-text", TARGET_LAYERS)
    target = target.bfloat16().float()  # the draft learns from what is kept
    torch.manual_seed(SEED + 1)
    learn(draft, ids, DRAFT_STEPS, target)
    logits = [held_out_logits(model, unseen) for model in (target, draft)]
    agree = (logits[0].argmax(-1) == logits[1].argmax(-1)).float().mean()
    save(draft, args.out / "demo-text-draft", DRAFT_LAYERS)
    (args.out / "held_out.txt").write_text(held_out, encoding="utf-8")
    print(
        f"{time.process_time() / 60:.1f} min of one core; perplexity of a byte, held out: "
        f"{perplexity(logits[0], unseen):.2f} and {perplexity(logits[1], unseen):.2f}; the draft's "
        f"likeliest byte is the target's for {float(agree):.1%}"
    )


if __name__ == "__main__":
    main()
