"""The bundled engine on one GPU: decode against the copy bandwidth, prefill against the GEMM peak,
graphs, cache layouts and batching policies switched on equal terms, transformers beside.

Random weights of Llama-2-7B's and Mistral-7B's shapes are made on the device: speed and memory
are those of the real checkpoints, texts are not. Decode of one sequence is bound by reading
weights and cache once, so its time is held against bytes / copy bandwidth, as measured here a
minute before; a prompt is bound by arithmetic, so its FLOP/s against those of a large product.

    python benchmarks/engine_gpu.py --out benchmarks/results

writes engine_gpu.md and engine_gpu_levels.csv, which `lmi-bench calibrate` turns into an engine
profile. Meant for an 80 GB card and to take less than ten minutes with both models; refuses
where there is no GPU. Needs the extra `engine` and Triton; transformers for the peer's rows.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import gc
import json
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.support.gpu_models import GpuModel

ROOT = Path(__file__).parent.parent
MODELS = ("llama-2-7b", "mistral-7b-v0.1")
DECODE = ((1, 512), (1, 2000), (64, 512), (256, 256))
PROMPTS = ((1, 1024), (8, 1024))
PEER_REQUESTS, PEER_TOKENS = 64, 128
MIXED_REQUESTS = 96
LEVELS = (1, 8, 64)
LEVEL_INPUT, LEVEL_OUTPUT = 256, 128
PEER_TIMEOUT_S = 120.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--peer", choices=MODELS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    try:
        import torch
    except ImportError:
        sys.exit("engine_gpu needs torch: pip install 'lmi-bench[engine]'")
    if not torch.cuda.is_available():
        sys.exit("engine_gpu needs a GPU that torch can use; there is none here")
    if args.peer:
        print(json.dumps({"tokens_per_s": peer_tokens_per_s(args.peer)}))
        return
    sys.path.insert(0, str(ROOT))
    start = time.monotonic()
    from benchmarks.support import gpu_models

    args.out.mkdir(parents=True, exist_ok=True)
    copy, gemm = gpu_models.copy_bytes_per_s(), gpu_models.gemm_flop_per_s()
    name = torch.cuda.get_device_name()
    lines = [
        "# The engine on a GPU",
        "",
        f"{name}; torch {torch.__version__}, Python {platform.python_version()}. Copy "
        f"{copy / 1e12:.2f} TB/s (reads and writes), bfloat16 product {gemm / 1e12:.0f} TFLOP/s. "
        "Random weights, bfloat16.",
    ]
    levels: list[dict[str, Any]] = []
    for model_name in args.models:
        lines += measure_model(model_name, copy, gemm, levels, name)
        gc.collect()
        torch.cuda.empty_cache()
        lines += peer_lines(model_name)
    lines += ["", f"Measured in {time.monotonic() - start:.0f} s."]
    (args.out / "engine_gpu.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    with (args.out / "engine_gpu_levels.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(levels[0]))
        writer.writeheader()
        writer.writerows(levels)
    print("\n".join(lines))


def measure_model(
    name: str, copy: float, gemm: float, levels: list[dict[str, Any]], device: str
) -> list[str]:
    """Markdown of one model; appends to `levels` what a profile is fitted to."""
    from benchmarks.support import gpu_models
    from lmi_bench.core.errors import EngineError

    model = gpu_models.make_model(name)
    lines = ["", f"## {name}", "", *decode_lines(model, copy)]
    lines += prefill_lines(model, gemm)
    try:
        forward, _ = model.forward("triton, graphs")
    except EngineError as exc:
        forward, _ = model.forward("triton, eager")
        lines += ["", f"What follows is without graphs: {exc}"]
    lines += policy_lines(model, forward)
    speed = asyncio.run(
        all_at_once(model, forward, [(PEER_TOKENS, PEER_TOKENS)] * PEER_REQUESTS, {})
    )
    lines += [
        "",
        f"{PEER_REQUESTS} requests of {PEER_TOKENS}/{PEER_TOKENS} tokens, all at once: "
        f"**{speed:,.0f}** output tok/s.",
    ]
    for users in LEVELS:
        levels.append(
            {
                "model": name,
                "accelerator": "H200" if "H200" in device else "H100-SXM",
                "tp": 1,
                "dtype": "bfloat16",
                "input_tokens": LEVEL_INPUT,
                "output_tokens": LEVEL_OUTPUT,
                "concurrency_or_rate": f"c={users}",
                **asyncio.run(closed_loop(model, forward, users)),
                "engine": "lmi-bench triton",
                "device": device,
            }
        )
    return lines


def decode_lines(model: GpuModel, copy: float) -> list[str]:
    from benchmarks.support import gpu_models
    from lmi_bench.core.errors import EngineError

    rows = [
        "| decode | batch | context | ms a step | tok/s | of copy bandwidth | graph memory GiB |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for variant in gpu_models.VARIANTS:
        try:
            forward, prepared = model.forward(variant)
        except (EngineError, RuntimeError) as exc:
            reason = str(exc).splitlines()[0]
            rows.append(f"| {variant} | | | not prepared: {reason} | | | |")
            continue
        graphs = "" if prepared is None or prepared.graph_bytes is None else prepared.graph_bytes
        for batch, context in DECODE:
            if batch * -(-context // gpu_models.BLOCK_SIZE) > model.num_blocks:
                rows.append(f"| {variant} | {batch} | {context} | the cache is too small | | | |")
                continue
            steps = gpu_models.decoding_rows(model, batch, context)
            try:
                seconds = gpu_models.decode_step_s(forward, steps)
            except RuntimeError as exc:  # one that fails leaves the others' figures
                reason = str(exc).splitlines()[0]
                rows.append(f"| {variant} | {batch} | {context} | did not run: {reason} | | | |")
                continue
            read = model.read_bytes + batch * context * model.kv_bytes_per_token
            shown = f"{graphs / 2**30:.2f}" if isinstance(graphs, int) else ""
            rows.append(
                f"| {variant} | {batch} | {context} | {seconds * 1e3:.2f} | "
                f"{batch / seconds:,.0f} | {read / seconds / copy:.1%} | {shown} |"
            )
        del forward, prepared
        gc.collect()
    return rows


def prefill_lines(model: GpuModel, gemm: float) -> list[str]:
    from benchmarks.support import gpu_models

    forward, _ = model.forward("torch, eager")
    spec = model.decoder.spec
    matrices = spec.params_active - 2 * spec.vocab_size * spec.hidden_size
    rows = [
        "",
        "| prefill | tokens each | ms | TFLOP/s | of the product's |",
        "|---|---:|---:|---:|---:|",
    ]
    for prompts, tokens in PROMPTS:
        sequences = gpu_models.prompt_rows(model, prompts, tokens)
        seconds = gpu_models.seconds_a_call(lambda s=sequences: forward.logits(s), calls=5)
        attention = 2 * spec.num_layers * spec.num_heads * spec.head_dim * tokens**2
        flop = prompts * (2 * matrices * tokens + attention)
        rows.append(
            f"| {prompts} prompts | {tokens:,} | {seconds * 1e3:.1f} | "
            f"{flop / seconds / 1e12:.0f} | {flop / seconds / gemm:.1%} |"
        )
    return rows


def policy_lines(model: GpuModel, forward: Any) -> list[str]:
    """Half the requests 20 in and 400 out, half the other way round, all at once."""
    requests = [(20, 400), (400, 20)] * (MIXED_REQUESTS // 2)
    small = 8 * 2048 // 64
    table: tuple[tuple[str, dict[str, Any]], ...] = (
        ("rolling", {}),
        ("dynamic, batch_size 32", {"policy": "dynamic", "batch_size": 32}),
        ("none", {"policy": "none"}),
        ("rolling, small cache, paged", {"num_blocks": small}),
        ("rolling, small cache, contiguous", {"num_blocks": small, "kv_layout": "contiguous"}),
    )
    rows = ["", "| mixed lengths | output tok/s |", "|---|---:|"]
    for label, changes in table:
        some = requests if label != "none" else requests[:8]
        speed = asyncio.run(all_at_once(model, forward, some, changes))
        rows.append(f"| {label}{' (8 requests)' if some is not requests else ''} | {speed:,.0f} |")
    return rows


async def all_at_once(
    model: GpuModel, forward: Any, requests: list[tuple[int, int]], changes: dict[str, Any]
) -> float:
    """Output tokens a second of requests (input, output tokens) handed over together."""
    chance = random.Random(3)
    async with engine(model, forward, changes) as running:
        start = time.perf_counter()
        generations = [submit(running, model, chance, *request) for request in requests]
        for generation in generations:
            await generation.wait()
        return sum(output for _, output in requests) / (time.perf_counter() - start)


async def closed_loop(model: GpuModel, forward: Any, users: int) -> dict[str, float]:
    """Means over ten requests a user whose lengths vary by a tenth, in ms."""
    chance = random.Random(4)
    times: list[tuple[float, float, float]] = []

    def about(tokens: int) -> int:
        return round(tokens * chance.uniform(0.9, 1.1))

    async with engine(model, forward, {}) as running:

        async def user() -> None:
            for _ in range(10):
                output = about(LEVEL_OUTPUT)
                one = submit(running, model, chance, about(LEVEL_INPUT), output)
                await one.wait()
                ttft = one.first_token_s - one.submitted_s
                decode = one.finished_s - one.first_token_s
                times.append((ttft, decode / (output - 1), ttft + decode))

        await asyncio.gather(*(user() for _ in range(users)))
    keys = ("ttft_ms", "itl_ms", "e2e_ms")
    return {
        key: round(1e3 * statistics.fmean(each[i] for each in times), 3)
        for i, key in enumerate(keys)
    }


def engine(model: GpuModel, forward: Any, changes: dict[str, Any]) -> Any:
    from benchmarks.support import gpu_models
    from lmi_bench.engine.async_engine import AsyncEngine
    from lmi_bench.engine.scheduling.config import SchedulerConfig
    from lmi_bench.engine.scheduling.scheduler import Scheduler

    settings = {
        "num_blocks": model.num_blocks,
        "block_size": gpu_models.BLOCK_SIZE,
        "max_model_len": gpu_models.MAX_TOKENS,
        "max_rolling_batch_size": 256,
        **changes,
    }
    return AsyncEngine(Scheduler(SchedulerConfig(**settings)), model.executor(forward))


def submit(running: Any, model: GpuModel, chance: random.Random, tokens: int, output: int) -> Any:
    from lmi_bench.engine.scheduling.sampling import SamplingParams

    vocab = model.decoder.spec.vocab_size
    prompt = [chance.randrange(vocab) for _ in range(tokens)]
    return running.submit(prompt, SamplingParams(max_new_tokens=output, ignore_eos=True))


def peer_lines(name: str) -> list[str]:
    """transformers' continuous batching on the same shape and requests, in its own process."""
    command = [sys.executable, str(Path(__file__)), "--peer", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PEER_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return ["", f"transformers' continuous batching: no answer in {PEER_TIMEOUT_S:.0f} s."]
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return ["", f"transformers' continuous batching did not run: {reason}"]
    speed = json.loads(done.stdout.strip().splitlines()[-1])["tokens_per_s"]
    return ["", f"transformers' continuous batching, the same requests: {speed:,.0f} output tok/s."]


def peer_tokens_per_s(name: str) -> float:
    """Once to warm up, once timed."""
    import torch
    import transformers

    sys.path.insert(0, str(ROOT))
    from benchmarks.support.gpu_models import CONFIGS

    given = {k: v for k, v in CONFIGS[name].items() if k != "architectures"}
    family = "Llama" if given.pop("model_type") == "llama" else "Mistral"
    config = getattr(transformers, f"{family}Config")(**given)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    chance = random.Random(5)
    inputs = [
        [chance.randrange(config.vocab_size) for _ in range(PEER_TOKENS)]
        for _ in range(PEER_REQUESTS)
    ]
    generation = transformers.GenerationConfig(
        max_new_tokens=PEER_TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    generate: Callable[..., Any] = model.generate_batch
    seconds = 0.0
    for _ in range(2):
        torch.cuda.synchronize()
        start = time.perf_counter()
        outputs = generate(inputs=inputs, generation_config=generation)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
    tokens = sum(len(output.generated_tokens) for output in outputs.values())
    return tokens / seconds


if __name__ == "__main__":
    main()
