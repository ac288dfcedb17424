"""The other engines of engine_cpu.py, each run by the Python that has it; needs nothing of ours.

Prints one line, RESULT and a JSON object: seconds of each batch, and seconds a token of one stream.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from typing import Any

SINGLE_TOKENS = 65
Generate = Callable[[list[list[int]], int], None]


def transformers_static(order: argparse.Namespace) -> Generate:
    """One padded batch, all of it to its end."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(order.threads)
    model = AutoModelForCausalLM.from_pretrained(order.folder, dtype=getattr(torch, order.dtype))
    model.eval()

    def generate(prompts: list[list[int]], tokens: int) -> None:
        rows = torch.tensor(prompts)
        with torch.inference_mode():
            model.generate(
                rows,
                attention_mask=torch.ones_like(rows),
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )

    return generate


def vllm_cpu(order: argparse.Namespace) -> Generate:
    """vLLM's CPU build, offline."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{order.threads - 1}")
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    llm = LLM(
        model=order.folder,
        dtype=order.dtype,
        skip_tokenizer_init=True,
        max_model_len=512,
        max_num_seqs=order.requests,
        max_num_batched_tokens=1024,
        enable_prefix_caching=False,
    )

    def generate(prompts: list[list[int]], tokens: int) -> None:
        sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        llm.generate([TokensPrompt(prompt_token_ids=prompt) for prompt in prompts], sampling, use_tqdm=False)

    return generate


def llama_cpp(order: argparse.Namespace) -> Generate:
    """llama.cpp through its Python binding; weights as they are, its usual cache (float16)."""
    import llama_cpp as cpp
    import numpy as np

    requests, context = order.requests, 2 * 128
    model_settings = cpp.llama_model_default_params()
    cpp.llama_backend_init()
    model = cpp.llama_model_load_from_file(gguf_of(order.folder).encode(), model_settings)
    settings = cpp.llama_context_default_params()
    settings.n_ctx, settings.n_seq_max = requests * context, requests
    settings.n_batch = settings.n_ubatch = 1024
    settings.n_threads = settings.n_threads_batch = order.threads
    held = cpp.llama_init_from_model(model, settings)
    vocab = cpp.llama_vocab_n_tokens(cpp.llama_model_get_vocab(model))
    batch = cpp.llama_batch_init(1024, 0, 1)

    def step(rows: list[tuple[int, int, int, bool]]) -> list[int]:
        """Of (token, position, sequence, whether its next token is asked for)."""
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, asked) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, asked
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        if cpp.llama_decode(held, batch):
            raise RuntimeError("llama_decode failed")
        asked_rows = [i for i, row in enumerate(rows) if row[3]]
        logits = (cpp.llama_get_logits_ith(held, i) for i in asked_rows)
        return [int(np.ctypeslib.as_array(row, (vocab,)).argmax()) for row in logits]

    def generate(prompts: list[list[int]], tokens: int) -> None:
        cpp.llama_memory_clear(cpp.llama_get_memory(held), True)
        last: list[int] = []
        at_once = max(1, 1024 // len(prompts[0]))
        for first in range(0, len(prompts), at_once):
            some = enumerate(prompts[first : first + at_once], first)
            last += step(
                [
                    (token, position, sequence, position == len(prompt) - 1)
                    for sequence, prompt in some
                    for position, token in enumerate(prompt)
                ]
            )
        for number in range(tokens - 1):
            position = len(prompts[0]) + number
            last = step([(token, position, i, True) for i, token in enumerate(last)])

    return generate


def gguf_of(folder: str, *, words: bool = False) -> str:
    """The checkpoint in llama.cpp's format, made once beside it: the same bfloat16 numbers.

    words  with its vocabulary, so that llama.cpp reads and writes text; else it has none
    """
    import gguf
    import numpy as np

    path = os.path.join(folder, "words.gguf" if words else "bfloat16.gguf")
    if os.path.exists(path):
        return path
    with open(os.path.join(folder, "config.json")) as file:
        config = json.load(file)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(path + ".part", "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config["hidden_size"] // heads)
    theta = config.get("rope_theta") or config.get("rope_parameters", {}).get("rope_theta", 1e4)
    writer.add_rope_freq_base(theta)
    writer.add_vocab_size(config["vocab_size"])
    if words:
        add_words(writer, os.path.join(folder, "tokenizer.json"))
    else:
        writer.add_tokenizer_model("none")
    names = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    whole = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    for name, halves in safetensors_of(os.path.join(folder, "model.safetensors")).items():
        target = whole.get(name)
        if target is None:
            _, _, layer, part = name.removesuffix(".weight").split(".", 3)
            target = f"blk.{layer}.{names[part]}.weight"
        if halves.ndim == 1:
            writer.add_tensor(target, (halves.astype(np.uint32) << 16).view(np.float32))
            continue
        if ".q_proj" in name or ".k_proj" in name:  # pairs that turn together stand side by side
            count = heads if ".q_proj" in name else kv_heads
            rows = halves.reshape(count, 2, -1, halves.shape[1])
            halves = rows.swapaxes(1, 2).reshape(halves.shape)
        raw = np.ascontiguousarray(halves).view(np.uint8)
        writer.add_tensor(target, raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    os.replace(path + ".part", path)
    return path


def add_words(writer: Any, tokenizer_file: str) -> None:
    """A demo model's words as SentencePiece's pieces, which merge to the same tokens.

    Each word begins with a space, and what is left of it without its last letter is a word, too:
    merged letter by letter, a text ends in the tokens that the tokenizer's own pattern finds. The
    last 256 give way to the bytes, without which any other text ends llama.cpp.
    """
    import gguf

    with open(tokenizer_file) as file:
        places = json.load(file)["model"]["vocab"]
    tokens = sorted(places, key=places.__getitem__)
    tokens[-256:] = [f"<0x{byte:02X}>" for byte in range(256)]
    kinds = {"<unk>": gguf.TokenType.UNKNOWN}
    kinds |= dict.fromkeys(tokens[-256:], gguf.TokenType.BYTE)
    kinds |= dict.fromkeys(("<s>", "</s>"), gguf.TokenType.CONTROL)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([token.replace(" ", "\u2581") for token in tokens])
    writer.add_token_scores([-float(place) for place in range(len(tokens))])
    writer.add_token_types([kinds.get(token, gguf.TokenType.NORMAL) for token in tokens])
    writer.add_unk_token_id(places["<unk>"])
    writer.add_bos_token_id(places["<s>"])
    writer.add_eos_token_id(places["</s>"])
    writer.add_add_bos_token(False)
    writer.add_add_eos_token(False)
    writer.add_add_space_prefix(False)


def safetensors_of(path: str) -> dict[str, Any]:
    """Tensors of a bfloat16 file as the 16 bits of each number."""
    import numpy as np

    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        data = np.frombuffer(file.read(), dtype=np.uint8)
    found = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] != "BF16":
            raise ValueError(f"{name} is {entry['dtype']}, not BF16")
        first, end = entry["data_offsets"]
        found[name] = data[first:end].view(np.uint16).reshape(entry["shape"])
    return found


ENGINES = {"transformers": transformers_static, "vllm": vllm_cpu, "llama.cpp": llama_cpp}


def seconds(generate: Generate, prompts: list[list[int]], tokens: int) -> float:
    start_s = time.perf_counter()
    generate(prompts, tokens)
    return time.perf_counter() - start_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("engine", "folder", "dtype", "prompts"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("threads", "repeats", "requests", "tokens"):
        parser.add_argument(f"--{name}", type=int, required=True)
    order = parser.parse_args()
    with open(order.prompts) as file:
        prompts = json.load(file)
    start_s = time.perf_counter()
    generate = ENGINES[order.engine](order)
    found = {"load_s": [time.perf_counter() - start_s]}
    generate(prompts[: max(1, len(prompts) // 8)], 3)
    found["batch_s"] = [seconds(generate, prompts, order.tokens) for _ in range(order.repeats)]
    found["token_s"] = []
    for _ in range(order.repeats):
        first_s = seconds(generate, prompts[:1], 1)
        whole_s = seconds(generate, prompts[:1], SINGLE_TOKENS)
        found["token_s"].append((whole_s - first_s) / (SINGLE_TOKENS - 1))
    print("RESULT " + json.dumps(found))


if __name__ == "__main__":
    main()
