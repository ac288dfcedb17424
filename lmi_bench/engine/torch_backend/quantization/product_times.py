"""Times the matrix products of a decode step, to see whether quantized weights are faster.

Weights that are unpacked at every step read less memory and compute more; comparing the products'
time with the baseline's shows the net effect, independent of the rest of a step.
"""

from __future__ import annotations

import statistics
import time
from typing import Final

import torch

from lmi_bench.engine.torch_backend.models.decoder import Decoder

_ROUNDS: Final = 3


@torch.inference_mode()
def product_time_s(model: Decoder, rows: int) -> float:
    """Seconds of all products in attention and MLPs for `rows` sequences: the median of 3 rounds
    after a warm-up. Excludes embedding, head, norms and attention itself."""
    spec = model.spec
    like = model.norm.tensors[0]
    x = torch.randn(rows, spec.hidden_size, device=like.device).to(like.dtype)
    attended = torch.randn(rows, spec.num_heads * spec.head_dim, device=like.device).to(like.dtype)

    def products() -> None:
        for layer in model.layers:
            layer.attention.qkv(x)
            layer.attention.out.add(attended, x)
            layer.mlp.add(x, x)
        if like.is_cuda:
            torch.cuda.synchronize(like.device)

    products()
    times_s = []
    for _ in range(_ROUNDS):
        start_s = time.perf_counter()
        products()
        times_s.append(time.perf_counter() - start_s)
    return statistics.median(times_s)
