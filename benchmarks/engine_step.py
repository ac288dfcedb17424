"""Decode and prefill speed of the torch executor, beside what this machine can do at most.

A decode step reads every weight and every cached key and value once, so at few sequences it is
bound by memory bandwidth; at many it is bound by arithmetic. The table gives both figures a
step, next to a read probe and a matrix-product probe taken just before and just after, since a
shared machine drifts. The last line runs a whole batch of requests, as a server would.

    python benchmarks/engine_step.py --model demo-110m --dtype bfloat16 --batch 1 8 64
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from lmi_bench.engine.async_engine import AsyncEngine
from lmi_bench.engine.scheduling.batch import LAST_SAMPLED, BatchEntry, StepBatch, StepKind
from lmi_bench.engine.scheduling.config import SchedulerConfig
from lmi_bench.engine.scheduling.sampling import SamplingParams
from lmi_bench.engine.scheduling.scheduler import Scheduler
from lmi_bench.engine.scheduling.step_shape import StepShape
from lmi_bench.engine.torch_backend.demo import DEMO_MODELS, ensure_demo_model
from lmi_bench.engine.torch_backend.executor import TorchExecutor
from lmi_bench.engine.torch_backend.layers import make_linear
from lmi_bench.engine.torch_backend.load_settings import LoadSettings
from lmi_bench.models.shape import ModelShape

PROMPT_CHUNK_TOKENS = 1024


def shortest_s(call: Callable[[], object], repeats: int = 5) -> float:
    call()
    times_s = []
    for _ in range(repeats):
        start_s = time.perf_counter()
        call()
        times_s.append(time.perf_counter() - start_s)
    return min(times_s)


def read_probe_bytes_per_s() -> float:
    numbers = torch.ones(64 << 20)
    return numbers.nbytes / shortest_s(numbers.sum)


def product_probe_flop_per_s(dtype: torch.dtype) -> float:
    rows, size = 512, 2048
    linear = make_linear(torch.ones(size, size, dtype=dtype))
    x = torch.ones(rows, size, dtype=dtype)
    return 2 * rows * size * size / shortest_s(lambda: linear(x))


def print_probes() -> None:
    print(
        f"probe: read {read_probe_bytes_per_s() / 1e9:.1f} GB/s, products "
        f"float32 {product_probe_flop_per_s(torch.float32) / 1e9:.0f} GFLOP/s, "
        f"bfloat16 {product_probe_flop_per_s(torch.bfloat16) / 1e9:.0f} GFLOP/s",
        flush=True,
    )


def entries(rows: int, context: int, blocks: int, *, first: bool) -> tuple[BatchEntry, ...]:
    """A prompt or one decode row for each sequence, which owns `blocks` blocks."""
    return tuple(
        BatchEntry(
            seq_id=i,
            kind=StepKind.PREFILL if first else StepKind.DECODE,
            token_ids=[3 + (i * 7919 + p * 104729) % 31997 for p in range(context)] if first else (LAST_SAMPLED,),
            first_position=0 if first else context,
            new_block_ids=tuple(range(i * blocks, (i + 1) * blocks)) if first else (),
            samples=True,
            sampling=SamplingParams(),
        )
        for i in range(rows)
    )


async def decode_step_s(executor: TorchExecutor, rows: int, context: int, steps: int) -> float:
    """Median time of a decode step of `rows` sequences behind `context` tokens each."""
    blocks = -(-(context + steps) // executor.block_size)
    for entry in entries(rows, context, blocks, first=True):
        await executor.execute(StepBatch(0, (entry,), StepShape()))
    times_s = []
    for step in range(steps):
        batch = StepBatch(step, entries(rows, context + step, blocks, first=False), StepShape())
        start_s = time.perf_counter()
        await executor.execute(batch)
        times_s.append(time.perf_counter() - start_s)
    return statistics.median(times_s)


def step_work(shape: ModelShape, rows: int, context: float) -> tuple[float, float]:
    """Values read and FLOP of a decode step: every weight but the untied embedding, and the
    cache; 2 FLOP a weight and row, 4 a cached key and query feature."""
    weights = shape.params_total
    if not shape.tied_embeddings:
        weights -= shape.vocab_size * shape.hidden_size
    cached = 2 * rows * context * shape.num_layers * shape.num_kv_heads * shape.head_dim
    scores = 4 * rows * context * shape.num_layers * shape.num_heads * shape.head_dim
    return weights + cached, 2 * rows * weights + scores


async def whole_run(executor: TorchExecutor, requests: int, tokens: int) -> None:
    """All requests at once through scheduler and engine; `tokens` in and as many out."""
    config = SchedulerConfig(
        num_blocks=executor.num_blocks,
        block_size=executor.block_size,
        max_model_len=2 * tokens,
        max_rolling_batch_size=requests,
        max_rolling_batch_prefill_tokens=PROMPT_CHUNK_TOKENS,
    )
    steps: list[tuple[int, float]] = []
    async with AsyncEngine(
        Scheduler(config),
        executor,
        on_step=lambda batch, start_s, end_s: steps.append((batch.shape.prefill_tokens, end_s - start_s)),
    ) as engine:
        sampling = SamplingParams(max_new_tokens=tokens, ignore_eos=True)
        start_s = time.perf_counter()
        running = [
            engine.submit([3 + (i * 7919 + p * 104729) % 31997 for p in range(tokens)], sampling)
            for i in range(requests)
        ]
        for generation in running:
            await generation.wait()
        wall_s = time.perf_counter() - start_s
    prefill_s = sum(time_s for prompt, time_s in steps if prompt)
    decode_s = sum(time_s for prompt, time_s in steps if not prompt)
    print(
        f"{requests} requests of {tokens} + {tokens} tokens: "
        f"{requests * tokens / wall_s:.0f} output tok/s "
        f"(prefill {prefill_s:.2f} s = {requests * tokens / prefill_s:.0f} tok/s, "
        f"decode {decode_s:.2f} s, between steps {wall_s - prefill_s - decode_s:.2f} s)"
    )


async def run(arguments: argparse.Namespace) -> None:
    folder = Path(arguments.model)
    if arguments.model in DEMO_MODELS:
        folder = ensure_demo_model(arguments.model)
    executor = TorchExecutor.load(
        folder, LoadSettings(dtype=arguments.dtype, threads=arguments.threads, most_cache_tokens=1 << 17)
    )
    shape = executor.model_shape
    print(
        f"{shape.name}: {shape.params_total / 1e6:.1f}M parameters, "
        f"{executor.weights_description}, {arguments.threads} threads, torch {torch.__version__}"
    )
    width = 4 if "float32" in executor.weights_description else 2
    print_probes()
    print(f"{'batch':>5} {'ms/step':>8} {'tok/s':>7} {'GB/s':>6} {'GFLOP/s':>8}")
    for rows in arguments.batch:
        step_s = await decode_step_s(executor, rows, arguments.context, arguments.steps)
        values, flop = step_work(shape, rows, arguments.context + arguments.steps / 2)
        print(
            f"{rows:>5} {step_s * 1e3:>8.2f} {rows / step_s:>7.0f} "
            f"{values * width / step_s / 1e9:>6.1f} {flop / step_s / 1e9:>8.0f}",
            flush=True,
        )
    print_probes()
    if arguments.requests:
        await whole_run(executor, arguments.requests, arguments.tokens)
    else:
        await executor.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo-110m", help="a demo model or a folder")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--context", type=int, default=128, help="tokens before the first step")
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--requests", type=int, default=64, help="of the whole run; 0: skip it")
    parser.add_argument("--tokens", type=int, default=128, help="in and out, of the whole run")
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
