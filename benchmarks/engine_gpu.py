"""The bundled engine on one GPU: logits first, then decode against the copy bandwidth, prefill
against the GEMM peak, mixed steps, quantized products and models, float8 caches, sampling, batching
policies, levels; transformers beside.

Random weights of published shapes are made on the device: speed and memory are those of the real
checkpoints, texts are not. Decode of one sequence is bound by reading weights and cache once, so
its time is held against bytes / copy bandwidth, as measured here a minute before, and against the
data sheet's; a prompt is bound by arithmetic, so its FLOP/s against those of a large product.

    python benchmarks/engine_gpu.py --out benchmarks/results

writes engine_gpu.md and engine_gpu_levels.csv after every table, and the tables to --state: a run
that is cut keeps what it has, and the next one of the same code on the same GPU goes on behind it.
`fit_profiles.py --only bundled --refit` turns the levels into the shipped profile `bundled-h200`.
Begins no table after --limit-s. Exits with 1 if a captured step's logits are not those of the eager
one, and with 3 after an error that leaves the process no GPU: run it again, the table that failed
stays out. Needs the extra `engine`, Triton and a GPU of 80 GB; transformers for the peers' rows.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import gc
import hashlib
import json
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.support.gpu_models import GpuModel

ROOT = Path(__file__).parent.parent
MODELS = ("qwen3-8b", "llama-2-7b", "mistral-7b-v0.1", "qwen3-30b-a3b")
DATA_SHEET_TB_PER_S = {"H200": 4.8, "H100": 3.35}
DECODE = ((1, 512), (1, 2000), (64, 512), (256, 256))
PROMPTS = ((1, 1024), (8, 1024))
PEER_REQUESTS, PEER_TOKENS = 64, 128
MIXED_REQUESTS = 96
LEVELS = (1, 8, 64)
LEVEL_INPUT, LEVEL_OUTPUT = 256, 128
PEER_TIMEOUT_S = 120.0


class Page:
    """Written anew after every table; tables of a run with the same `key` are not made again."""

    def __init__(self, out: Path, limit_s: float, state: Path, key: str) -> None:
        self.out = out
        self.start_s = time.monotonic()
        self.limit_s = limit_s
        self.lines: list[str] = []
        self.levels: list[dict[str, Any]] = []
        self.model = ""
        self._state = state
        self._known: dict[str, Any] = {"key": key, "tables": {}, "levels": []}
        if state.is_file() and (known := json.loads(state.read_text("utf-8")))["key"] == key:
            self._known = known
            self.levels = known["levels"]
        for folder in (out, state.parent):
            folder.mkdir(parents=True, exist_ok=True)

    def has(self, what: str) -> bool:
        """True for a table of an earlier run."""
        return f"{self.model} {what}" in self._known["tables"]

    def add(self, what: str, make: Callable[[], list[str]]) -> None:
        """The lines of `make`, or why there are none."""
        tables, key = self._known["tables"], f"{self.model} {what}"
        took, lost = time.monotonic() - self.start_s, False
        if key in tables:
            lines = tables[key]
        elif took > self.limit_s:
            lines = ["", f"{what}: not begun, {took:.0f} s after the start."]
        else:
            try:
                lines = make()
            except Exception as exc:  # the other tables are worth having
                reason = (str(exc).splitlines() or [""])[0]
                lines = ["", f"{what}: failed with {type(exc).__name__}: {reason}"]
                lost = "CUDA error" in str(exc)
            tables[key] = lines
            self._known["levels"] = self.levels
            unfinished = self._state.with_suffix(".unfinished")
            unfinished.write_text(json.dumps(self._known), encoding="utf-8")
            unfinished.replace(self._state)
        print("\n".join(lines), flush=True)
        self.lines += lines
        self._write()
        if lost:
            sys.exit(3)

    def _write(self) -> None:
        took = time.monotonic() - self.start_s
        text = "\n".join([*self.lines, "", f"Measured in {took:.0f} s."])
        (self.out / "engine_gpu.md").write_text(text + "\n", encoding="utf-8")
        if self.levels:
            path = self.out / "engine_gpu_levels.csv"
            with path.open("w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, list(self.levels[0]))
                writer.writeheader()
                writer.writerows(self.levels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[MODELS[0], MODELS[-1]])
    parser.add_argument("--limit-s", type=float, default=420.0)
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--state", type=Path, default=ROOT / "build" / "gpu_hour" / "engine_gpu.json")
    parser.add_argument("--peer", choices=MODELS, help=argparse.SUPPRESS)
    parser.add_argument("--peer-kind", choices=PEERS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    try:
        import torch
    except ImportError:
        sys.exit("engine_gpu needs torch: pip install 'lmi-bench[engine]'")
    if not torch.cuda.is_available():
        sys.exit("engine_gpu needs a GPU that torch can use; there is none here")
    sys.path.insert(0, str(ROOT))
    if args.peer:
        print(json.dumps(PEERS[args.peer_kind](args.peer)))
        return
    from benchmarks.support import gpu_models

    copy, gemm = gpu_models.copy_bytes_per_s(), gpu_models.gemm_flop_per_s()
    name = torch.cuda.get_device_name()
    page = Page(args.out, args.limit_s, args.state, f"{name} {torch.__version__} {code_digest()}")
    page.lines += [
        "# The engine on a GPU",
        "",
        f"{name}; torch {torch.__version__}, Python {platform.python_version()}. Copy "
        f"{copy / 1e12:.2f} TB/s (reads and writes), bfloat16 product {gemm / 1e12:.0f} TFLOP/s. "
        "Random weights, bfloat16.",
    ]
    wrong = False
    for model_name in args.models:
        page.model = model_name
        page.lines += ["", f"## {model_name}"]
        wrong |= not measure_model(page, model_name, copy, gemm, name)
        gc.collect()
        torch.cuda.empty_cache()
        if not args.no_peers:
            for kind in PEERS:
                page.add(kind, partial(peer_lines, model_name, kind))
    if wrong:
        sys.exit(1)
    page.model = ""
    page.lines += ["", "## Quantized weights, float8 caches"]
    page.add("quantized products", partial(product_lines, copy))
    for label, scheme, kv_dtype in QUANTIZED:
        page.add(label, partial(quantized_lines, args.models[0], label, scheme, kv_dtype, copy))


def code_digest() -> str:
    """Of the engine's code and this file's."""
    digest = hashlib.sha256()
    for path in [*sorted((ROOT / "lmi_bench" / "engine").rglob("*.py")), Path(__file__)]:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def measure_model(page: Page, name: str, copy: float, gemm: float, device: str) -> bool:
    """False if the captured steps' logits are not those of eager ones: nothing else is measured."""
    from benchmarks.support import gpu_models
    from lmi_bench.engine.torch_backend.static.forward import StaticForward

    tables = ["decode", "prefill", "mixed steps", "kernels", "sampling", "policies", "all at once"]
    tables += [f"level {users}" for users in LEVELS]
    if page.has("logits") and all(page.has(what) for what in tables):
        for what in ("logits", *tables):
            page.add(what, list)
        return True
    model = gpu_models.make_model(name)
    made: list[Any] = []

    def logits_lines() -> list[str]:
        start_s = time.monotonic()
        made.append(model.forward("triton, graphs")[0])
        took_s = time.monotonic() - start_s
        assert isinstance(made[0], StaticForward)
        return same_logits(model, made[0], took_s)

    page.add("logits", logits_lines)
    if WRONG in page.lines[-1]:
        return False
    if not made:
        failed = "logits: " in page.lines[-1]
        made.append(model.forward("torch, graphs" if failed else "triton, graphs")[0])
    (forward,) = made
    sheet = next((v for key, v in DATA_SHEET_TB_PER_S.items() if key in device), None)
    page.add("decode", lambda: decode_lines(model, forward, copy, sheet))
    page.add("prefill", lambda: prefill_lines(model, forward, gemm))
    page.add("mixed steps", lambda: mixed_lines(model, forward))
    page.add("kernels", lambda: kernel_lines(model, forward))
    page.add("sampling", lambda: sampling_lines(model))
    page.add("policies", lambda: policy_lines(model, forward))
    page.add("all at once", lambda: at_once_lines(model, forward))
    for users in LEVELS:
        page.add(f"level {users}", lambda u=users: level_lines(page, name, model, forward, u, device))
    return True


QUANTIZED = (
    ("bfloat16", "none", "bfloat16"),
    ("bfloat16, float8 cache", "none", "float8_e4m3fn"),
    ("awq-int4", "awq-int4", "bfloat16"),
    ("awq-int4, float8 cache", "awq-int4", "float8_e4m3fn"),
    ("int8", "int8", "bfloat16"),
    ("smoothquant", "smoothquant", "bfloat16"),
    ("fp8", "fp8", "bfloat16"),
)
PRODUCT = (14336, 4096)
PRODUCT_ROWS = (1, 8, 16, 64, 256, 1024)
COPIES = 8  # of a weight, so that none stays in the GPU's cache


def product_lines(copy: float) -> list[str]:
    """Products of a few rows: by the kernels, and with a weight that is unpacked first."""
    import torch

    from benchmarks.support import gpu_models
    from lmi_bench.engine.quantization import Scheme

    outputs, inputs = PRODUCT
    weights = [torch.randn(PRODUCT, device=gpu_models.DEVICE).mul_(0.02).bfloat16() for _ in range(COPIES)]
    rows = [
        "",
        f"| product {outputs:,} x {inputs:,} | " + " | ".join(f"{n} rows" for n in PRODUCT_ROWS),
        "|---|" + "---:|" * len(PRODUCT_ROWS),
    ]
    rows[1] += " |"
    schemes = (Scheme.NONE, Scheme.AWQ_INT4, Scheme.INT8, Scheme.SMOOTHQUANT, Scheme.FP8)
    for scheme in schemes:
        layers: list[Any] = [gpu_models.linear_of(weight, None, scheme) for weight in weights]
        size = getattr(layers[0], "nbytes", weights[0].nbytes)
        ways = ("as the engine does",)
        if scheme in (Scheme.AWQ_INT4, Scheme.INT8):
            ways += ("by the kernel", "unpacked")
        for way in ways:
            for layer in layers if way != ways[0] else ():
                layer.kernel_rows = PRODUCT_ROWS[-1] if way == "by the kernel" else 0
            cells = []
            for count in PRODUCT_ROWS:
                x = torch.randn(count, inputs, device=gpu_models.DEVICE).bfloat16()
                seconds = gpu_models.captured_s([partial(layer, x) for layer in layers])
                cells.append(f"{seconds * 1e6:.1f} us, {size / seconds / copy:.0%}")
            rows.append(f"| {scheme.value}, {way} | {' | '.join(cells)} |")
    return [*rows, "", "Shares: bytes of the stored weight a second, of the copy bandwidth."]


def quantized_lines(name: str, label: str, scheme: str, kv_dtype: str, copy: float) -> list[str]:
    """One row: a model of such weights and cache; made and freed here."""
    import torch

    from benchmarks.support import gpu_models
    from lmi_bench.engine.quantization import Scheme

    model = gpu_models.make_model(name, memory_share=0.4, scheme=Scheme(scheme), kv_dtype=getattr(torch, kv_dtype))
    forward = model.forward("triton, graphs")[0]
    cells = []
    for batch, context in (*DECODE[:3], (64, 2000)):
        seconds = gpu_models.decode_step_s(forward, gpu_models.decoding_rows(model, batch, context))
        read = model.bytes_read(batch) + batch * context * model.kv_bytes_per_token
        cells.append(f"{seconds * 1e3:.2f} ms, {read / seconds / copy:.0%}")
    prompt = gpu_models.prompt_rows(model, 1, 1024)
    cells.append(f"{gpu_models.seconds_a_call(partial(forward.logits, prompt), calls=5) * 1e3:.1f}")
    cells.append(f"{model.decoder.held_bytes / 2**30:.2f}")
    head = []
    if label == QUANTIZED[0][0]:
        head = [
            "",
            f"| {name}, weights and cache | 1 x 512 | 1 x 2,000 | 64 x 512 | 64 x 2,000 | "
            "prompt of 1,024, ms | GiB of weights |",
            "|---|---:|---:|---:|---:|---:|---:|",
        ]
    del forward, model
    gc.collect()
    torch.cuda.empty_cache()
    return [*head, f"| {label} | {' | '.join(cells)} |"]


WRONG = "**not the same**"


def same_logits(model: GpuModel, forward: Any, took_s: float) -> list[str]:
    """The largest difference of each captured shape from an eager step over the same context."""
    from lmi_bench.engine.torch_backend.static.forward import compare_steps

    eager = model.forward("torch, eager")[0]
    found = compare_steps(forward, eager)
    worst = max(found, key=lambda each: each.largest / each.spread)
    same = min(each.same_frac for each in found)
    good = worst.largest < worst.spread and same >= 0.5  # random weights have many near ties
    return [
        "",
        f"{len(found)} graphs, ready in {took_s:.1f} s; largest difference of a logit from the "
        f"eager torch step {worst.largest / worst.spread:.3f} of the logits' spread (shape "
        f"{worst.shape}), the same likeliest token in at least {same:.1%} of the rows: "
        + ("as bfloat16 allows." if good else WRONG),
    ]


def at_once_lines(model: GpuModel, forward: Any) -> list[str]:
    requests = [(PEER_TOKENS, PEER_TOKENS)] * PEER_REQUESTS
    speeds = [asyncio.run(all_at_once(model, forward, requests, {})) for _ in range(2)]
    return [
        "",
        f"{PEER_REQUESTS} requests of {PEER_TOKENS}/{PEER_TOKENS} tokens, all at once: "
        f"**{max(speeds):,.0f}** output tok/s (first run {speeds[0]:,.0f}).",
    ]


def level_lines(page: Page, name: str, model: GpuModel, forward: Any, users: int, device: str) -> list[str]:
    level = {
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
    page.levels.append(level)
    keys = ("ttft_ms", "itl_ms", "e2e_ms")
    return ["", f"{users} users: " + ", ".join(f"{key} {level[key]}" for key in keys)]


def mixed_lines(model: GpuModel, forward: Any) -> list[str]:
    """A step of decode rows beside one chunk of a prompt, with the rows apart and together."""
    from benchmarks.support import gpu_models
    from lmi_bench.engine.torch_backend.attention import SequenceRows

    eager = forward._otherwise
    rows = ["", "| mixed step | ms, rows apart | ms, together |", "|---|---:|---:|"]
    for batch, chunk in ((16, 512), (64, 512), (64, 2048)):
        steps = gpu_models.decoding_rows(model, batch, 512)
        last = model.num_blocks - -(-chunk // gpu_models.BLOCK_SIZE)
        steps.append(SequenceRows([7] * chunk, 0, range(last, model.num_blocks), 1))
        apart, together = (
            gpu_models.seconds_a_call(partial(each.likeliest, steps), calls=10) for each in (forward, eager)
        )
        rows.append(f"| {batch} decode rows, {chunk:,} of a prompt | {apart * 1e3:.2f} | {together * 1e3:.2f} |")
    return rows


def kernel_lines(model: GpuModel, forward: Any) -> list[str]:
    """Where a captured step's time goes, by torch's profiler."""
    import torch

    from benchmarks.support import gpu_models

    rows = ["", "| kernel | step | us a step | launches |", "|---|---|---:|---:|"]
    work = {f"{batch} decode rows": gpu_models.decoding_rows(model, batch, 512) for batch in (1, 64)}
    work["a prompt of 1,024"] = gpu_models.prompt_rows(model, 1, 1024)
    for label, steps in work.items():
        for _ in range(3):
            forward.likeliest(steps)
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            for _ in range(5):
                forward.likeliest(steps)
            torch.cuda.synchronize()
        found = sorted(profile.key_averages(), key=lambda e: -e.self_device_time_total)
        rows += [
            f"| `{each.key[:60]}` | {label} | {each.self_device_time_total / 5:.0f} | {each.count / 5:.0f} |"
            for each in found[:9]
        ]
    return rows


def sampling_lines(model: GpuModel) -> list[str]:
    import torch

    from benchmarks.sampling import CASES
    from benchmarks.support import gpu_models
    from lmi_bench.engine.scheduling.sampling import SamplingParams
    from lmi_bench.engine.torch_backend.sampler import RowRequest, choose

    vocab, chance = model.decoder.spec.vocab_size, random.Random(6)
    logits = torch.randn(64, vocab, device="cuda") * 3
    histories = [[chance.randrange(vocab) for _ in range(2048)] for _ in range(64)]
    rows = ["", f"| sampling, 64 rows x {vocab:,} | ms |", "|---|---:|"]
    for label, settings in CASES.items():
        sampling = SamplingParams(**settings)
        requests = [RowRequest(sampling, 2048, history, i, num_generated=1024) for i, history in enumerate(histories)]
        seconds = gpu_models.seconds_a_call(partial(choose, logits, requests), calls=10)
        rows.append(f"| {label} | {seconds * 1e3:.2f} |")
    return rows


def decode_lines(model: GpuModel, captured: Any, copy: float, sheet: float | None) -> list[str]:
    from benchmarks.support import gpu_models
    from lmi_bench.core.errors import EngineError

    rows = [
        "",
        "| decode | batch | context | ms a step | tok/s | of copy bandwidth | of data sheet's |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for variant in gpu_models.VARIANTS:
        try:
            forward = captured if variant == "triton, graphs" else model.forward(variant)[0]
        except (EngineError, RuntimeError) as exc:
            rows.append(f"| {variant} | | | not prepared: {str(exc).splitlines()[0]} | | | |")
            continue
        for batch, context in DECODE if variant == "triton, graphs" else DECODE[::2]:
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
            read = model.bytes_read(batch) + batch * context * model.kv_bytes_per_token
            of_sheet = f"{read / seconds / sheet / 1e12:.1%}" if sheet else ""
            rows.append(
                f"| {variant} | {batch} | {context} | {seconds * 1e3:.2f} | "
                f"{batch / seconds:,.0f} | {read / seconds / copy:.1%} | {of_sheet} |"
            )
        gc.collect()
    return rows


def prefill_lines(model: GpuModel, forward: Any, gemm: float) -> list[str]:
    from benchmarks.support import gpu_models

    spec = model.decoder.spec
    matrices = spec.params_active - 2 * spec.vocab_size * spec.hidden_size
    rows = ["", "| prefill | tokens each | ms | TFLOP/s | of the product's |", "|---|---:|---:|---:|---:|"]
    for prompts, tokens in PROMPTS:
        sequences = gpu_models.prompt_rows(model, prompts, tokens)
        seconds = gpu_models.seconds_a_call(partial(forward.logits, sequences), calls=5)
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


async def all_at_once(model: GpuModel, forward: Any, requests: list[tuple[int, int]], changes: dict[str, Any]) -> float:
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
    return {key: round(1e3 * statistics.fmean(each[i] for each in times), 3) for i, key in enumerate(keys)}


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


def peer_lines(name: str, kind: str) -> list[str]:
    """A peer on the same shape, in its own process."""
    command = [sys.executable, str(Path(__file__)), "--peer", name, "--peer-kind", kind]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PEER_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return ["", f"{kind}: no answer in {PEER_TIMEOUT_S:.0f} s."]
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return ["", f"{kind} did not run: {reason}"]
    return ["", f"{kind}: {json.loads(done.stdout.strip().splitlines()[-1])}"]


def peer_model(name: str) -> Any:
    import torch
    import transformers

    from benchmarks.support.gpu_models import CONFIGS

    given = {k: v for k, v in CONFIGS[name].items() if k != "architectures"}
    config = transformers.AutoConfig.for_model(given.pop("model_type"), **given)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        return transformers.AutoModelForCausalLM.from_config(config).eval()


def compiled_loop(name: str) -> str:
    """One sequence over transformers' static cache, its step compiled with CUDA graphs, as
    gpt-fast's loop is: tokens a second of a context of 512."""
    import torch
    import transformers

    model = peer_model(name)
    cache = transformers.StaticCache(config=model.config, max_cache_len=640)
    tokens = torch.randint(model.config.vocab_size, (1, 512), device="cuda")

    def step(ids: Any, position: Any) -> Any:
        out = model(ids, past_key_values=cache, cache_position=position, use_cache=True)
        return out.logits[:, -1].argmax(-1, keepdim=True)

    with torch.inference_mode():
        current = step(tokens, torch.arange(512, device="cuda"))
        fast = torch.compile(step, mode="reduce-overhead", fullgraph=True)
        position = torch.tensor([512], device="cuda")
        for number in range(64):
            if number == 24:
                torch.cuda.synchronize()
                start = time.perf_counter()
            torch.compiler.cudagraph_mark_step_begin()
            current = fast(current, position).clone()
            position += 1
        torch.cuda.synchronize()
        seconds = (time.perf_counter() - start) / 40
    return f"{seconds * 1e3:.2f} ms a step at batch 1, context 512"


def continuous_batching(name: str) -> str:
    return f"{peer_tokens_per_s(name):,.0f} output tok/s of the same requests, all at once"


def peer_tokens_per_s(name: str) -> float:
    """Once to warm up, once timed."""
    import torch
    import transformers

    model = peer_model(name)
    config = model.config
    chance = random.Random(5)
    inputs = [[chance.randrange(config.vocab_size) for _ in range(PEER_TOKENS)] for _ in range(PEER_REQUESTS)]
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


PEERS: dict[str, Callable[[str], str]] = {
    "transformers' continuous batching": continuous_batching,
    "transformers' compiled step": compiled_loop,
}


if __name__ == "__main__":
    main()
