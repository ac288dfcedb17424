"""Load settings of the bundled engine's executors, except the simulated one."""

from dataclasses import dataclass, field
from typing import Final

import torch

from lmi_bench.core.errors import CapacityError
from lmi_bench.core.host import usable_cores
from lmi_bench.engine.quantization import NOT_QUANTIZED, QuantizeSettings
from lmi_bench.engine.torch_backend.kv_cache import FLOAT8
from lmi_bench.engine.torch_backend.precision import torch_dtype
from lmi_bench.engine.torch_backend.static.build import NOTHING_PREPARED, StepSettings

DEFAULT_BLOCK_SIZE: Final = 64
"""Tokens per page: long enough that a matrix product over one is worth its call."""

DEFAULT_MEMORY_SHARE: Final = 0.5
"""Share of the free memory for the cache: other programs usually need CPU memory too, and further
copies and drafts that a GPU's; one that a model has to itself gives more, and tokens unbounded."""
GPU_MEMORY_SHARE: Final = 0.9

DEFAULT_MOST_CACHE_TOKENS: Final = 1 << 18


def place_of(device: str, number: int) -> torch.device:
    """The CPU, or the GPU with this number."""
    return torch.device("cuda", number) if device == "cuda" else torch.device(device)


@dataclass(frozen=True, slots=True)
class LoadSettings:
    """Settings for loading a model.

    dtype              a name of DTYPES, for weights and cache
    kv_dtype           the same for cached keys and values, or float8; None: `dtype`
    num_blocks         cache blocks of `block_size` tokens; None: `memory_share` (0 to 1) of the
                       memory free after loading, at most `most_cache_tokens` tokens
    threads            CPU threads of a step, over all ranks
    device             "cpu", or "cuda": with ranks, rank r uses device `first_device` + r
    first_device       GPU of this copy of the model, or of its rank 0
    sampling_seed      seed for requests without one
    quantize           quantization of weights while loading
    steps              decode steps to compile or capture at start
    group_query_attention  how KV heads go to ranks
    """

    dtype: str = "bfloat16"
    kv_dtype: str | None = None
    num_blocks: int | None = None
    block_size: int = DEFAULT_BLOCK_SIZE
    memory_share: float = DEFAULT_MEMORY_SHARE
    most_cache_tokens: int = DEFAULT_MOST_CACHE_TOKENS
    threads: int = field(default_factory=usable_cores)
    device: str = "cpu"
    first_device: int = 0
    sampling_seed: int = 0
    quantize: QuantizeSettings = NOT_QUANTIZED
    steps: StepSettings = NOTHING_PREPARED
    group_query_attention: str | None = None

    def cache_dtype(self, stored: torch.dtype) -> torch.dtype:
        """Number format of the cache, for weights stored as `stored`."""
        if self.kv_dtype == "float8":
            return FLOAT8
        return stored if self.kv_dtype is None else torch_dtype(self.kv_dtype)

    def blocks_in(self, free_bytes: int, bytes_per_block: int) -> int:
        """Cache blocks to allocate from this free memory. Raises CapacityError if none fits."""
        if self.num_blocks:
            return self.num_blocks
        blocks = int(free_bytes * self.memory_share) // bytes_per_block
        if blocks < 1:
            raise CapacityError(
                f"{self.memory_share * 100:.3g}% of the {free_bytes:,} bytes free after loading is "
                f"less than one KV-cache block of {bytes_per_block:,} bytes: free memory, raise "
                "--memory-share, or use a smaller model or block size"
            )
        return min(blocks, max(1, self.most_cache_tokens // self.block_size))
