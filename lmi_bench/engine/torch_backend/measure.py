"""Times attention in two ways, and the matrix products of a decode step.

A prompt's attention runs with the whole score matrix in memory, or in tiles, as the engine does
(torch's FlashAttention kernel). Both do the same arithmetic; the whole one also writes and reads
rows * keys scores per head, which Dao et al. 2022 (FlashAttention, section 3) avoid.

The products show whether quantized weights are faster: unpacked at every step, they read less
memory and compute more.
"""

import math
import statistics
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from lmi_bench.engine.torch_backend.models.decoder import Decoder, LatentBlock
from lmi_bench.engine.torch_backend.precision import time_s


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """One layer's attention over a prompt, causal."""

    tokens: int
    heads: int
    head_dim: int

    @property
    def flop(self) -> float:
        """2 products of 2 * head_dim operations for each score; half of the scores are masked."""
        return 4 * self.head_dim * self.heads * self.tokens * (self.tokens + 1) / 2

    def tiled_bytes(self, itemsize: int) -> int:
        """Minimum traffic: read queries, keys and values once, write the result."""
        return 4 * self.tokens * self.heads * self.head_dim * itemsize

    def score_bytes(self, itemsize: int) -> int:
        """The score matrix of all heads."""
        return self.heads * self.tokens**2 * itemsize

    def whole_bytes(self, itemsize: int) -> int:
        """The tiled traffic, plus scores written and read before and after the softmax."""
        return self.tiled_bytes(itemsize) + 4 * self.score_bytes(itemsize)


@dataclass(frozen=True, slots=True)
class AttentionTimes:
    """Median times, and the maximum difference between the two results."""

    whole_s: float
    tiled_s: float
    worst_difference: float


def measure_attention(shape: AttentionShape, *, rounds: int, threads: int) -> AttentionTimes:
    """Time both ways alternately on random float32 values."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        generator = torch.Generator().manual_seed(shape.tokens)
        size = (1, shape.heads, shape.tokens, shape.head_dim)
        q, k, v = (torch.randn(size, generator=generator) for _ in range(3))
        masked = torch.ones(shape.tokens, shape.tokens, dtype=torch.bool).triu(1)
        whole, tiled = attend_whole(q, k, v, masked), attend_in_tiles(q, k, v)
        ways = (lambda: attend_whole(q, k, v, masked), lambda: attend_in_tiles(q, k, v))
        times_s = [[time_s(way) for way in ways] for _ in range(rounds)]
        whole_s, tiled_s = (statistics.median(each) for each in zip(*times_s, strict=True))
        return AttentionTimes(whole_s, tiled_s, float((whole - tiled).abs().max()))
    finally:
        torch.set_num_threads(before)


def attend_whole(q: Tensor, k: Tensor, v: Tensor, masked: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(d)) v with the matrix of scores; shapes (1, heads, tokens, head_dim)."""
    scores = torch.matmul(q, k.transpose(2, 3)).mul_(1 / math.sqrt(q.shape[3]))
    return torch.matmul(torch.softmax(scores.masked_fill_(masked, -math.inf), dim=3), v)


def attend_in_tiles(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same without the score matrix; raises RuntimeError if torch lacks the kernel."""
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


_ROUNDS: Final = 3


@torch.inference_mode()
def product_time_s(model: Decoder, rows: int) -> float:
    """Seconds of all products in attention and MLPs for `rows` sequences: the median of 3 rounds
    after a warm-up. Excludes embedding, head, norms and attention itself."""
    spec = model.spec
    like = model.norm.tensors[0]
    x = torch.randn(rows, spec.hidden_size, device=like.device).to(like.dtype)
    size = spec.value_dim or spec.head_dim
    attended = torch.randn(rows, spec.num_heads * size, device=like.device).to(like.dtype)
    turn = model.rotary.at(*[torch.zeros(rows, dtype=torch.int64, device=like.device)] * 2)

    def products() -> None:
        for layer in model.layers:
            if isinstance(layer.attention, LatentBlock):
                layer.attention.attend(0, x, turn, lambda _index, q, _key, _value: q.flatten(1))
            else:
                layer.attention.qkv(x)
            layer.attention.out.add(attended, x)
            layer.mlp.add(x, x)

    products()
    return statistics.median(time_s(products, like.device) for _ in range(_ROUNDS))
