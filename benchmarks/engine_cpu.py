"""The bundled engine's step back ends on a CPU, beside the engines that people would use instead.

Every engine runs the same checkpoint and the same prompts, greedy, in a process of its own: all
requests handed over at once (output tokens a second), then one request alone (milliseconds a
token, its prompt subtracted). The bundled engine runs as it serves, scheduler and event loop
included, and once as a bare loop over its step, which shows what serving costs.

Beside each figure stands what it is of the machine: a batch is bound by arithmetic, so its GFLOP/s
against the faster of oneDNN's float32 and bfloat16 products; a single stream is bound by reading
weights, so its GB/s against a read probe. A shared machine drifts by a fifth within minutes, so
the bundled engine pauses between steps for a probe, whose time is not counted; another's figures
stand against probes before and after it. Engines can be measured one call after another: results
are kept in a file.

    python benchmarks/engine_cpu.py run --shape 110m --engines native torch --results cpu.json
    python benchmarks/engine_cpu.py run --shape 110m --engines llama.cpp vllm transformers \\
        --llama-cpp-python L/bin/python --vllm-python V/bin/python ... --results cpu.json
    python benchmarks/engine_cpu.py table --results cpu.json --out benchmarks/results/engine_cpu.md
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PEERS = ROOT / "benchmarks" / "support" / "engine_peers.py"
PREFILL_TOKENS = 1024
TOKENS = 128
SINGLE_TOKENS = 65
PROBE_EVERY_S = 3.0
NOTES = """\
The GEMM peak is the faster of oneDNN's float32 and bfloat16 products of 512 x 2048 x 2048, the
read probe a sum over 256 MiB in large pages, each the best of four calls in a process of its own.
For the bundled engine they were taken between its steps, at most {every_s:g} s of work apart, the
engine paused and the pause not counted: lowest - highest. The share is what was done of what the
probes on both sides of each stretch of work say could have been done in it. For the others they
stand before / after. Where the processor lists no bfloat16 instructions, products run at the rate
of float32 whatever weights are stored in: engines that leave bfloat16 to oneDNN (vLLM,
transformers) lose most by that. The bars were set on a machine that lists avx512_bf16."""


@dataclass(frozen=True)
class Shape:
    """weights: parameters that a token reads, the head but not an untied embedding."""

    requests: int
    weights: int
    layer_weights: int
    context_values: int  # keys and values of one token
    score_flop: int  # of one row and one cached token


def shape_of(folder: Path, requests: int) -> Shape:
    config = json.loads((folder / "config.json").read_text())
    hidden, layers, ffn = (config[key] for key in ("hidden_size", "num_hidden_layers", "intermediate_size"))
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = hidden // heads
    layer = 2 * hidden * (heads + kv_heads) * head_dim + 3 * hidden * ffn
    return Shape(
        requests,
        layers * layer + config["vocab_size"] * hidden,
        layers * layer,
        2 * layers * kv_heads * head_dim,
        4 * layers * heads * head_dim,
    )


def folder_of(name: str) -> Path:
    """The checkpoint of a shape; made once, of random but fixed weights."""
    from lmi_bench.engine.torch_backend.demo import ensure_demo_model

    if name == "110m":
        return ensure_demo_model("demo-110m")
    folder = ensure_demo_model("demo-110m").parent / "benchmark-1.1b-v1"
    if not (folder / "config.json").is_file():
        write_tiny_llama(folder)
    return folder


def write_tiny_llama(folder: Path) -> None:
    """TinyLlama's shape (Zhang et al. 2024, arXiv:2401.02385), bfloat16, nothing tied."""
    import torch
    from safetensors.torch import save_file

    hidden, layers, heads, kv_heads, ffn, vocab = 2048, 22, 32, 4, 5632, 32000
    generator = torch.Generator().manual_seed(20_261_121)

    def normal(rows: int, columns: int, std: float) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator) * std).to(torch.bfloat16)

    kv = kv_heads * hidden // heads
    sizes = {"self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (kv, hidden)}
    sizes |= {"self_attn.v_proj": (kv, hidden), "self_attn.o_proj": (hidden, hidden)}
    sizes |= {"mlp.gate_proj": (ffn, hidden), "mlp.up_proj": (ffn, hidden)}
    sizes |= {"mlp.down_proj": (hidden, ffn)}
    ones = torch.ones(hidden, dtype=torch.bfloat16)
    weights = {"model.embed_tokens.weight": normal(vocab, hidden, 0.02)}
    weights["lm_head.weight"] = normal(vocab, hidden, hidden**-0.5)
    weights["model.norm.weight"] = ones.clone()
    for index in range(layers):
        prefix = f"model.layers.{index}"
        for part, (rows, columns) in sizes.items():
            weights[f"{prefix}.{part}.weight"] = normal(rows, columns, columns**-0.5)
        weights[f"{prefix}.input_layernorm.weight"] = ones.clone()
        weights[f"{prefix}.post_attention_layernorm.weight"] = ones.clone()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": ffn,
        "vocab_size": vocab,
        "max_position_embeddings": 2048,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def prompts_of(requests: int) -> list[list[int]]:
    chance = random.Random(7)
    return [[chance.randrange(300, 31_000) for _ in range(TOKENS)] for _ in range(requests)]


# The bundled engine


def open_executor(engine: str, folder: Path, dtype: str, threads: int) -> Any:
    from lmi_bench.engine.native_backend.executor import NativeExecutor
    from lmi_bench.engine.torch_backend.executor import TorchExecutor
    from lmi_bench.engine.torch_backend.load_settings import LoadSettings

    load = {"torch": TorchExecutor, "native": NativeExecutor}[engine].load
    settings = LoadSettings(dtype=dtype, threads=threads, most_cache_tokens=1 << 15)
    return load(folder, settings)


class Prober:
    """Runs probes while the engine is paused, in a process of its own: its threads stay out."""

    def __init__(self, threads: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "prober", "--threads", str(threads)],
            # its threads sleep as soon as they are done: the engine goes on at once
            env=os.environ
            | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(threads)}
            | {"OMP_WAIT_POLICY": "passive", "KMP_BLOCKTIME": "0"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.per_s("flop")

    def per_s(self, kind: str) -> float:
        """FLOP/s of the faster product, or bytes/s of the read."""
        print(kind, file=self._process.stdin, flush=True)
        return float(self._process.stdout.readline())

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()


class Watched:
    """A back end whose time in the step is summed, and which is paused for probes.

    inside_s   in the step
    probing_s  paused, to be taken from every time that is measured round it
    offered    what the machine could have done meanwhile, in FLOP or bytes: each stretch of work at
               the mean of the probes on both of its sides
    """

    def __init__(self, forward: Any, prober: Prober, kind: str) -> None:
        self.inside_s = self.probing_s = self.offered = 0.0
        self.probes: list[float] = []
        self._forward, self._prober, self._kind = forward, prober, kind
        self._resumed_s = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._forward, name)

    def likeliest(self, sequences: Any) -> list[int]:
        if not self.probes or time.perf_counter() - self._resumed_s > PROBE_EVERY_S:
            self.probe()
        start_s = time.perf_counter()
        token_ids: list[int] = self._forward.likeliest(sequences)
        self.inside_s += time.perf_counter() - start_s
        return token_ids

    def probe(self) -> None:
        start_s = time.perf_counter()
        self.probes.append(self._prober.per_s(self._kind))
        if len(self.probes) > 1:
            self.offered += (start_s - self._resumed_s) * statistics.mean(self.probes[-2:])
        self._resumed_s = time.perf_counter()
        self.probing_s += self._resumed_s - start_s


async def served(executor: Any, prompts: list[list[int]], tokens: int, prober: Prober, kind: str) -> dict[str, Any]:
    """All requests at once through scheduler and engine, beside probes of a kind."""
    from lmi_bench.engine.async_engine import AsyncEngine
    from lmi_bench.engine.scheduling.config import SchedulerConfig
    from lmi_bench.engine.scheduling.sampling import SamplingParams
    from lmi_bench.engine.scheduling.scheduler import Scheduler

    config = SchedulerConfig(
        num_blocks=executor.num_blocks,
        block_size=executor.block_size,
        max_model_len=2 * TOKENS,
        max_rolling_batch_size=len(prompts),
        max_rolling_batch_prefill_tokens=PREFILL_TOKENS,
    )
    watched = Watched(executor._ranks.runner._forward, prober, kind)
    executor._ranks.runner._forward = watched
    decode: list[float] = []
    outside: list[float] = []
    ended_s = inside_s = probing_s = 0.0

    def on_step(batch: Any, _start_s: float, end_s: float) -> None:
        nonlocal ended_s, inside_s, probing_s
        if not batch.shape.prefill_sequences and ended_s:
            decode.append(end_s - ended_s - (watched.probing_s - probing_s))
            outside.append(decode[-1] - (watched.inside_s - inside_s))
        ended_s, inside_s, probing_s = end_s, watched.inside_s, watched.probing_s

    executor_close, executor.close = executor.close, _nothing
    try:
        async with AsyncEngine(Scheduler(config), executor, on_step=on_step) as engine:
            sampling = SamplingParams(max_new_tokens=tokens, ignore_eos=True)
            start_s = time.perf_counter()
            running = [engine.submit(prompt, sampling) for prompt in prompts]
            for generation in running:
                await generation.wait()
            wall_s = time.perf_counter() - start_s - watched.probing_s
        watched.probe()
    finally:
        executor.close = executor_close
        executor._ranks.runner._forward = watched._forward
    found = {"wall_s": wall_s, "offered": watched.offered, "probes": watched.probes}
    if decode:
        found["step_s"] = statistics.median(decode)
        found["overhead_frac"] = statistics.median(outside) / found["step_s"]
    return found


async def _nothing() -> None:
    """The executor outlives the engine."""


def bare(executor: Any, prompts: list[list[int]], tokens: int) -> float:
    """Seconds of the same work in a plain loop over the step."""
    from lmi_bench.engine.torch_backend.attention import SequenceRows

    forward, size = executor._ranks.runner._forward, executor.block_size
    blocks = -(-(TOKENS + tokens) // size)
    tables = [list(range(i * blocks, (i + 1) * blocks)) for i in range(len(prompts))]
    at_once = max(1, PREFILL_TOKENS // TOKENS)
    start_s = time.perf_counter()
    last: list[int] = []
    for first in range(0, len(prompts), at_once):
        last += forward.likeliest(
            [
                SequenceRows(prompt, 0, table, 1)
                for prompt, table in zip(prompts[first : first + at_once], tables[first : first + at_once], strict=True)
            ]
        )
    for step in range(tokens - 1):
        last = forward.likeliest(
            [SequenceRows([token], TOKENS + step, table, 1) for token, table in zip(last, tables, strict=True)]
        )
    return time.perf_counter() - start_s


async def bundled(engine: str, folder: Path, dtype: str, threads: int, order: Any) -> dict[str, Any]:
    executor = open_executor(engine, folder, dtype, threads)
    prompts = prompts_of(order.requests)
    found: dict[str, Any] = {"note": executor.weights_description}
    loop = asyncio.get_running_loop()

    async def alone(call: Any, *arguments: Any) -> Any:
        return await loop.run_in_executor(executor._worker, call, *arguments)

    prober = Prober(threads)
    await alone(bare, executor, prompts, 3)
    runs = [await served(executor, prompts, TOKENS, prober, "flop") for _ in range(order.repeats)]
    found["batch_offered_flop"] = [run["offered"] for run in runs]
    found["between_flop_per_s"] = [probe for run in runs for probe in run["probes"]]
    found["batch_s"] = [run["wall_s"] for run in runs]
    found["overhead_frac"] = [run["overhead_frac"] for run in runs]
    found["step_s"] = [run["step_s"] for run in runs]
    found["bare_s"] = [await alone(bare, executor, prompts, TOKENS) for _ in range(order.bare)]
    first, single = [], []
    for _ in range(order.repeats):
        for tokens, kept in ((1, first), (SINGLE_TOKENS, single)):
            kept.append(await served(executor, prompts[:1], tokens, prober, "bytes"))
    for key, name in (("wall_s", "token_s"), ("offered", "token_offered_bytes")):
        found[name] = [(whole[key] - one[key]) / (SINGLE_TOKENS - 1) for whole, one in zip(single, first, strict=True)]
    found["between_bytes_per_s"] = [probe for run in single for probe in run["probes"]]
    found["ttft_s"] = [run["wall_s"] for run in first]
    prober.close()
    await executor.close()
    return found


# The rounds


class Probes:
    """A float32 and a bfloat16 product and a read, on so many threads of this process."""

    def __init__(self, threads: int) -> None:
        import torch

        from lmi_bench.engine.torch_backend.layers import make_linear
        from lmi_bench.engine.torch_backend.memory import zeroed_bytes

        torch.set_num_threads(threads)
        self._numbers = zeroed_bytes(256 << 20).view(torch.float32).fill_(1)
        self._linears = []
        for dtype in (torch.float32, torch.bfloat16):
            linear = make_linear(torch.ones(2048, 2048, dtype=dtype))
            self._linears.append((linear, torch.ones(512, 2048).to(dtype)))

    def bytes_per_s(self) -> float:
        read: float = self._numbers.nbytes / shortest_s(self._numbers.sum)
        return read

    def flop_per_s(self) -> float:
        """Of the faster product; the slower is not tried again."""
        found = [
            2 * 512 * 2048**2 / shortest_s(lambda: linear(x))  # noqa: B023
            for linear, x in self._linears
        ]
        self._linears = [self._linears[found.index(max(found))]]
        return max(found)


def shortest_s(call: Any) -> float:
    """Of four calls after a first."""
    call()
    times_s = []
    for _ in range(4):
        start_s = time.perf_counter()
        call()
        times_s.append(time.perf_counter() - start_s)
    return min(times_s)


def probe_on_demand(threads: int) -> None:
    """Answers a line "flop" or "bytes" with the figure a second."""
    probes = Probes(threads)
    for line in sys.stdin:
        print(probes.flop_per_s() if line.strip() == "flop" else probes.bytes_per_s(), flush=True)


def probe_apart(threads: int) -> dict[str, float]:
    prober = Prober(threads)
    found = {f"{kind}_per_s": prober.per_s(kind) for kind in ("bytes", "flop")}
    prober.close()
    return found


def run(order: argparse.Namespace) -> None:
    folder = folder_of(order.shape)
    results = json.loads(order.results.read_text()) if order.results.is_file() else []
    for engine in order.engines:
        before = probe_apart(order.threads)
        program = {
            "vllm": order.vllm_python,
            "transformers": order.transformers_python,
            "llama.cpp": order.llama_cpp_python,
        }.get(engine)
        command = [program or sys.executable]
        if engine in ("torch", "native"):
            command += [__file__, "bundled"]
        else:
            prompts = order.results.with_suffix(".prompts.json")
            prompts.write_text(json.dumps(prompts_of(order.requests)))
            command += [str(PEERS), "--prompts", str(prompts), "--tokens", str(TOKENS)]
        command += ["--engine", engine, "--folder", str(folder), "--dtype", order.dtype]
        repeats = order.repeats if engine in ("torch", "native") else order.peer_repeats
        command += ["--threads", str(order.threads), "--repeats", str(repeats)]
        command += ["--requests", str(order.requests)]
        environment = os.environ | {"OMP_NUM_THREADS": str(order.threads), "PYTHONPATH": str(ROOT)}
        if engine not in ("torch", "native"):
            environment.pop("PYTHONPATH")
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, check=False, timeout=order.limit_s
            )
        except subprocess.TimeoutExpired:
            print(f"{engine}: no result within {order.limit_s:.0f} s")
            continue
        lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        if not lines:
            print(f"{engine}: no result\n{done.stdout[-1500:]}\n{done.stderr[-3000:]}")
            continue
        found = json.loads(lines[-1].removeprefix("RESULT "))
        found |= {"engine": engine, "shape": order.shape, "dtype": order.dtype}
        found |= {"requests": order.requests, "threads": order.threads}
        found["probes"] = [before, probe_apart(order.threads)]
        results.append(found)
        order.results.write_text(json.dumps(results, indent=1) + "\n")
        print(json.dumps(found), flush=True)


def table(order: argparse.Namespace) -> None:
    results = json.loads(order.results.read_text())
    lines = [
        "# The bundled engine on a CPU, beside others",
        "",
        f"{platform.machine()}, {results[0]['threads']} threads, "
        f"Python {platform.python_version()}; {cpu_model()}. {TOKENS} tokens in and out, greedy, "
        "random prompts, medians.",
        "",
        "| shape | engine | dtype | repeats | batch tok/s | of GEMM peak | bare loop tok/s "
        "| 1 stream ms/token | of read probe | serving, % of a decode step | probe read GB/s "
        "| GEMM peak GF |",
        "|---|---|---|---:|---:|---:|---:|---:|---:|---:|---|---|",
    ]
    for found in results:
        lines.append(row_of(found))
    lines += ["", *bars_of(results), "", NOTES.format(every_s=PROBE_EVERY_S)]
    text = "\n".join(lines) + "\n"
    if order.out:
        order.out.write_text(text)
    print(text)


def row_of(found: dict[str, Any]) -> str:
    seen = figures_of(found)
    cells = [found["shape"], found["engine"], found["dtype"], str(len(found["batch_s"]))]
    cells += [f"{seen['batch_tokens_per_s']:.0f}", f"{seen['peak_frac']:.0%}"]
    bare = found.get("bare_s")
    generated = found["requests"] * TOKENS
    cells.append(f"{generated / statistics.median(bare):.0f}" if bare else "")
    cells += [f"{seen['token_s'] * 1e3:.1f}", f"{seen['read_frac']:.0%}"]
    cells.append(f"{seen['overhead_frac']:.1%}" if "overhead_frac" in seen else "")
    for kind, digits in (("bytes", 1), ("flop", 0)):
        around = [probe[f"{kind}_per_s"] / 1e9 for probe in found["probes"]]
        between = [per_s / 1e9 for per_s in found.get(f"between_{kind}_per_s", ())]
        ends, sign = ((min(between), max(between)), "-") if between else (around, "/")
        cells.append(f" {sign} ".join(f"{end:.{digits}f}" for end in ends))
    return "| " + " | ".join(cells) + " |"


def figures_of(found: dict[str, Any]) -> dict[str, float]:
    """Medians of one engine's runs, and what they are of the machine's probes."""
    shape = shape_of(folder_of(found["shape"]), found["requests"])
    middle = {key: statistics.median(found[key]) for key in ("batch_s", "token_s")}
    generated = rows = shape.requests * TOKENS
    flop = 2 * rows * shape.layer_weights + 2 * generated * shape.weights
    flop += shape.score_flop * shape.requests * (TOKENS**2 / 2 + TOKENS * TOKENS * 1.5)
    width = 2 if is_narrow(found) else 4
    read = width * (shape.weights + shape.context_values * (TOKENS + SINGLE_TOKENS / 2))
    seen = {
        "batch_tokens_per_s": generated / middle["batch_s"],
        "peak_frac": share_of(found, flop, "batch", "flop"),
        "token_s": middle["token_s"],
        "read_frac": share_of(found, read, "token", "bytes"),
    }
    if found.get("overhead_frac"):
        seen["overhead_frac"] = statistics.median(found["overhead_frac"])
    return seen


def share_of(found: dict[str, Any], done: float, what: str, kind: str) -> float:
    """FLOP or bytes done, of what the machine's probes say could have been in that time."""
    offered = found.get(f"{what}_offered_{kind}")
    if offered is None:
        around = statistics.mean(probe[f"{kind}_per_s"] for probe in found["probes"])
        offered = [seconds * around for seconds in found[f"{what}_s"]]
    return statistics.median(done / possible for possible in offered)


def bars_of(results: list[dict[str, Any]]) -> list[str]:
    """What the project asks of its engine, and what these runs say: the last of each engine."""
    runs = {(r["shape"], r["engine"]): figures_of(r) for r in results if r["dtype"] == "bfloat16"}
    lines = ["| shape | asked for | bar | seen | |", "|---|---|---:|---:|---|"]

    def line(shape: str, what: str, bar: float, seen: float, *, most: bool, percent: bool) -> None:
        unit = "{:.1%}" if percent else "{:.2f} x"
        holds = seen <= bar if most else seen >= bar
        cells = [shape, what, ("<= " if most else ">= ") + unit.format(bar), unit.format(seen)]
        lines.append("| " + " | ".join([*cells, "holds" if holds else "**missed**"]) + " |")

    def against(shape: str, engine: str, peer: str, key: str, bar: float, *, most: bool = False) -> None:
        ours, theirs = runs.get((shape, engine)), runs.get((shape, peer))
        if ours and theirs:
            what = "batch tok/s" if key == "batch_tokens_per_s" else "1 stream ms/token"
            seen = ours[key] / theirs[key]
            line(shape, f"{engine} / {peer}, {what}", bar, seen, most=most, percent=False)

    for shape, torch_bar, native_bar, stream_bar, peak_bar in (
        ("110m", 0.65, 1.3, 0.75, 0.70),
        ("1.1b", 0.8, 1.1, 1.0, 0.85),
    ):
        against(shape, "torch", "vllm", "batch_tokens_per_s", torch_bar)
        against(shape, "native", "vllm", "batch_tokens_per_s", native_bar)
        against(shape, "native", "llama.cpp", "token_s", stream_bar, most=True)
        own = runs.get((shape, "native"))
        if own is None:
            continue
        for what, bar, key in (
            ("native, batch: of the GEMM peak", peak_bar, "peak_frac"),
            ("native, 1 stream: of the read probe", 0.8, "read_frac"),
        ):
            line(shape, what, bar, own[key], most=False, percent=True)
        if shape == "110m":
            seen = own["overhead_frac"]
            line(shape, "native, batch: serving's share", 0.03, seen, most=True, percent=True)
    return lines


def is_narrow(found: dict[str, Any]) -> bool:
    """Whether weights are read as two bytes."""
    return found["dtype"] == "bfloat16" and "computed in float32" not in found.get("note", "")


def cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if not info.is_file():
        return platform.processor()
    text = info.read_text()
    flags = next(line for line in text.splitlines() if line.startswith("flags")).split()
    names = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16")
    has = ", ".join(f"{name} {'yes' if name in flags else 'no'}" for name in names)
    name = next(line for line in text.splitlines() if line.startswith("model name"))
    return f"{name.partition(':')[2].strip()} ({has})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    kinds = parser.add_subparsers(dest="kind", required=True)
    rounds = kinds.add_parser("run")
    rounds.add_argument("--shape", choices=("110m", "1.1b"), default="110m")
    rounds.add_argument("--engines", nargs="+", default=["torch", "native"])
    rounds.add_argument("--dtype", default="bfloat16")
    rounds.add_argument("--threads", type=int, default=os.cpu_count())
    rounds.add_argument("--requests", type=int, default=None, help="64 at 110m, 16 at 1.1b")
    rounds.add_argument("--repeats", type=int, default=3)
    rounds.add_argument("--peer-repeats", type=int, default=1, help="of the other engines")
    rounds.add_argument("--limit-s", type=float, default=900.0, help="of one engine")
    rounds.add_argument("--vllm-python", default=None)
    rounds.add_argument("--transformers-python", default=sys.executable)
    rounds.add_argument("--llama-cpp-python", default=sys.executable, help="with gguf beside it")
    rounds.add_argument("--results", type=Path, default=Path("engine_cpu.json"))
    shown = kinds.add_parser("table")
    shown.add_argument("--results", type=Path, default=Path("engine_cpu.json"))
    shown.add_argument("--out", type=Path, default=None)
    own = kinds.add_parser("bundled")
    for name in ("engine", "folder", "dtype"):
        own.add_argument(f"--{name}")
    for name in ("threads", "repeats", "requests"):
        own.add_argument(f"--{name}", type=int)
    kinds.add_parser("prober").add_argument("--threads", type=int)
    order = parser.parse_args()
    if order.kind == "prober":
        probe_on_demand(order.threads)
    elif order.kind == "run":
        order.requests = order.requests or {"110m": 64, "1.1b": 16}[order.shape]
        run(order)
    elif order.kind == "table":
        table(order)
    else:
        order.bare = 1
        found = asyncio.run(bundled(order.engine, Path(order.folder), order.dtype, order.threads, order))
        print("RESULT " + json.dumps(found))


if __name__ == "__main__":
    main()
