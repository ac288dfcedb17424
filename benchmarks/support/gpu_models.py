"""Random-weight models of published shapes, made on the GPU, and steps of them to time."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lmi_bench.engine.quantization import QuantizeSettings, Scheme
from lmi_bench.engine.torch_backend.attention import SequenceRows
from lmi_bench.engine.torch_backend.executor import ModelNumbers, TorchExecutor
from lmi_bench.engine.torch_backend.kv_cache import KvCache, KvLayoutShape
from lmi_bench.engine.torch_backend.layers import Linear, PlainLinear
from lmi_bench.engine.torch_backend.loading import WeightLoader
from lmi_bench.engine.torch_backend.memory import free_memory_bytes
from lmi_bench.engine.torch_backend.models.decoder import Decoder
from lmi_bench.engine.torch_backend.models.families import build_with
from lmi_bench.engine.torch_backend.precision import Precision
from lmi_bench.engine.torch_backend.quantization.kernels import choose_kernels
from lmi_bench.engine.torch_backend.quantization.rounding import round_weight
from lmi_bench.engine.torch_backend.rank import RankWorker
from lmi_bench.engine.torch_backend.runner import Forward, ModelRunner, TorchForward
from lmi_bench.engine.torch_backend.static.artefact import StaticShape
from lmi_bench.engine.torch_backend.static.build import SPARE_BLOCKS, PreparedSteps, StepSettings, with_prepared_steps
from lmi_bench.engine.triton_backend.step import TritonStep
from lmi_bench.models.hf_config import spec_from_hf_config

CONFIGS: dict[str, dict[str, Any]] = {
    "llama-2-7b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    },
    "mistral-7b-v0.1": {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 32768,
        "sliding_window": 4096,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    },
}
CONFIGS["qwen3-8b"] = CONFIGS["mistral-7b-v0.1"] | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "sliding_window": None,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
}
CONFIGS["qwen3-30b-a3b"] = CONFIGS["qwen3-8b"] | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
}
DEVICE = torch.device("cuda", 0)
PRECISION = Precision(torch.bfloat16, torch.bfloat16)
BLOCK_SIZE = 64
MAX_TOKENS = 2048
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
VARIANTS = ("triton, graphs", "torch, graphs", "torch, eager")


class RandomCheckpoint:
    """Gives a random tensor of any name and shape: 1 and small noise for norms."""

    def tensor(self, name: str, *shape: int) -> torch.Tensor:
        noise = torch.randn(shape, device=DEVICE, dtype=torch.bfloat16).mul_(0.02)
        return noise.add_(1.0) if len(shape) == 1 else noise

    def unread(self) -> str:
        return ""


@dataclass(frozen=True)
class GpuModel:
    """A model with a cache that fills what memory is left."""

    decoder: Decoder
    cache: KvCache
    num_blocks: int

    def bytes_read(self, rows: int) -> float:
        """Of weights that a decode step reads: of the embedding a row each, of experts those that
        are chosen, evenly."""
        spec = self.decoder.spec
        whole = self.decoder.held_bytes - 2 * spec.vocab_size * spec.hidden_size
        if not spec.experts:
            return whole
        left_out = 1 - spec.experts_per_token / spec.experts  # of one row
        experts = 2 * (spec.params_total - spec.params_active) / left_out
        return whole - experts * left_out**rows

    @property
    def kv_bytes_per_token(self) -> int:
        return self.cache.shape.bytes_per_block // BLOCK_SIZE

    def forward(self, variant: str) -> tuple[Forward, PreparedSteps | None]:
        """One of VARIANTS."""
        eager = TorchForward(self.decoder, self.cache, num_blocks=self.num_blocks)
        if variant == "torch, eager":
            return eager, None
        triton = variant.startswith("triton")
        settings = StepSettings(
            captured="graphs" in variant,
            kernels=TritonStep if triton else None,
            shapes=tuple(StaticShape(batch, MAX_TOKENS) for batch in BATCHES),
        )
        made = with_prepared_steps(eager, settings)
        return made.forward, made.prepared

    def executor(self, forward: Forward) -> TorchExecutor:
        """For an engine; its close leaves the model as it is."""
        numbers = ModelNumbers(
            model_shape=self.decoder.shape,
            block_size=BLOCK_SIZE,
            num_blocks=self.num_blocks,
            free_memory_bytes=0,
            kv_cache_bytes=self.cache.nbytes,
            kv_dtype="bfloat16",
            weights_description=str(PRECISION),
            weight_bytes=self.decoder.held_bytes,
        )
        rank = RankWorker(runner=ModelRunner(forward, sampling_seed=0))
        return TorchExecutor(numbers, rank, ThreadPoolExecutor(1))


def linear_of(weight: torch.Tensor, bias: torch.Tensor | None, scheme: Scheme) -> Linear:
    """A layer with this weight, rounded by the scheme, with the kernels that the engine takes."""
    if scheme is Scheme.NONE:
        return PlainLinear(weight, bias)
    settings = QuantizeSettings(scheme)
    rounded = round_weight(weight.float(), settings, 128)
    return choose_kernels(settings, PRECISION, DEVICE).make(rounded, bias)


class RoundingLoader(WeightLoader):
    """As WeightLoader, with matrices rounded by `scheme`."""

    scheme = Scheme.NONE

    def matrix(self, parts: Any, columns: int, bias: Any, joined: Any) -> Linear:
        before = self.held_bytes
        layer = super().matrix(parts, columns, bias, joined)
        assert isinstance(layer, PlainLinear)
        layer = linear_of(layer.weight, layer.bias, self.scheme)
        self.held_bytes = before + getattr(layer, "nbytes", self.held_bytes - before)
        return layer


def make_model(
    name: str, *, memory_share: float = 0.8, scheme: Scheme = Scheme.NONE, kv_dtype: torch.dtype = torch.bfloat16
) -> GpuModel:
    spec = spec_from_hf_config(name, CONFIGS[name])
    torch.manual_seed(0)
    load = RoundingLoader(spec, RandomCheckpoint(), PRECISION, DEVICE)  # type: ignore[arg-type]
    load.scheme = scheme
    decoder = build_with(load, Path(name))
    layout = KvLayoutShape(spec.num_layers, spec.num_kv_heads, spec.head_dim, BLOCK_SIZE, kv_dtype)
    gc.collect()
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()
    free = free_memory_bytes(DEVICE)
    blocks = min(int(free * memory_share) // layout.bytes_per_block, 256 * MAX_TOKENS // BLOCK_SIZE)
    cache = KvCache(layout, blocks + SPARE_BLOCKS, DEVICE)
    for pages in (*cache.keys, *cache.values):  # never zeros: they read and multiply faster
        for block in pages:
            block.copy_(torch.randn(block.shape, device=DEVICE).mul_(0.5))
    return GpuModel(decoder, cache, blocks)


def decoding_rows(model: GpuModel, batch: int, context: int) -> list[SequenceRows]:
    """One row a sequence at the end of a context, each with blocks of its own."""
    pages = -(-context // BLOCK_SIZE)
    chance = random.Random(1)
    blocks = list(range(model.num_blocks))
    chance.shuffle(blocks)
    return [
        SequenceRows(
            [chance.randrange(model.decoder.spec.vocab_size)], context - 1, blocks[i * pages : (i + 1) * pages], 1
        )
        for i in range(batch)
    ]


def prompt_rows(model: GpuModel, prompts: int, tokens: int) -> list[SequenceRows]:
    pages = -(-tokens // BLOCK_SIZE)
    chance = random.Random(2)
    vocab = model.decoder.spec.vocab_size
    return [
        SequenceRows([chance.randrange(vocab) for _ in range(tokens)], 0, range(i * pages, (i + 1) * pages), 1)
        for i in range(prompts)
    ]


def wait() -> None:
    """Until the device is idle."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def seconds_a_call(call: Callable[[], object], *, calls: int = 20, warm_ups: int = 3) -> float:
    """The median; each call ends with the device idle."""
    for _ in range(warm_ups):
        call()
    times = []
    for _ in range(calls):
        wait()
        start = time.perf_counter()
        call()
        wait()
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2]


def captured_s(calls: Sequence[Callable[[], object]], *, rounds: int = 5) -> float:
    """Seconds of one of the calls, which run one behind the other in one CUDA graph."""
    for call in calls:
        call()
    wait()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    return seconds_a_call(graph.replay) / (rounds * len(calls))


def copy_bytes_per_s() -> float:
    """Reads and writes of a device copy, both counted."""
    source = torch.empty(2 << 30, dtype=torch.uint8, device=DEVICE).random_(0, 255)
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds_a_call(lambda: target.copy_(source))


def gemm_flop_per_s() -> float:
    """bfloat16 products of random 8192 x 8192 matrices."""
    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    return float(2 * 8192**3 / seconds_a_call(lambda: a @ b))


def decode_step_s(forward: Forward, rows: Sequence[SequenceRows]) -> float:
    """From known tokens to the next ones on the host."""
    return seconds_a_call(lambda: forward.likeliest(rows))
