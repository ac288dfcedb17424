"""Number formats of the weights, the cache and the arithmetic.

bfloat16 halves the storage. Whether it also speeds up the arithmetic depends on the processor: one
without bfloat16 instructions multiplies bfloat16 matrices several times slower than float32 ones
(4 to 5 times on an AVX-512 Xeon without avx512_bf16). There, weights are rounded to bfloat16 but
stored as float32, and only the cache stays 2 bytes wide. float16 arithmetic is for GPUs: on any CPU
such weights are stored as float32.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch

from lmi_bench.core.errors import InputError
from lmi_bench.engine.torch_backend.layers import make_linear
from lmi_bench.engine.torch_backend.memory import free_memory_bytes

DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_PROBE_ROWS: Final = 64
_PROBE_SIZE: Final = 1024
_PROBE_REPEATS: Final = 9  # the shortest one counts: others may use the cores
_SLOW_RATIO: Final = 1.5


@dataclass(frozen=True, slots=True)
class Precision:
    """stored: format of rounded parameters and of the cache; compute: format of products."""

    stored: torch.dtype
    compute: torch.dtype

    def __str__(self) -> str:
        stored, compute = dtype_name(self.stored), dtype_name(self.compute)
        return f"{stored}, computed in {compute}" if compute != stored else stored


def choose_precision(dtype: str, device: torch.device, *, parameters: int) -> Precision:
    """The formats for weights of type `dtype`. On a CPU float16 is always widened, bfloat16 if that
    is faster and fits. Raises InputError for an unknown dtype.
    """
    stored = torch_dtype(dtype)
    widen = device.type == "cpu" and stored == torch.float16
    if device.type == "cpu" and stored == torch.bfloat16:
        widen = parameters * 4 < free_memory_bytes(device) // 2 and bfloat16_is_slow()
    return Precision(stored, torch.float32 if widen else stored)


def torch_dtype(name: str) -> torch.dtype:
    """The number format with this name; raises InputError if it is unknown."""
    if name not in DTYPES:
        raise InputError(f"dtype {name!r} is unknown; the torch back end has: {', '.join(DTYPES)}")
    return DTYPES[name]


def dtype_name(dtype: torch.dtype) -> str:
    """The name without `torch.`, such as bfloat16; the one kind of float8 alone."""
    return str(dtype).removeprefix("torch.").removesuffix("_e4m3fn")


def bfloat16_is_slow() -> bool:
    """True if this processor multiplies bfloat16 matrices clearly slower than float32 ones.
    Measured (takes milliseconds), because a virtual machine's flags may hide features."""
    return _matmul_time_s(torch.bfloat16) > _SLOW_RATIO * _matmul_time_s(torch.float32)


def _matmul_time_s(dtype: torch.dtype) -> float:
    """Shortest time of a few products of 64 rows with a 1024 x 1024 weight."""
    linear = make_linear(torch.ones(_PROBE_SIZE, _PROBE_SIZE, dtype=dtype))
    rows = torch.ones(_PROBE_ROWS, _PROBE_SIZE, dtype=dtype)
    linear(rows)
    return min(time_s(lambda: linear(rows)) for _ in range(_PROBE_REPEATS))


def time_s(work: Callable[[], object], device: torch.device | None = None) -> float:
    """Seconds that the work takes, to its end on a GPU."""
    is_gpu = device is not None and device.type == "cuda"
    if is_gpu:
        torch.cuda.synchronize(device)
    start_s = time.perf_counter()
    work()
    if is_gpu:
        torch.cuda.synchronize(device)
    return time.perf_counter() - start_s
