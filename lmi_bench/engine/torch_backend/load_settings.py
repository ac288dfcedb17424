"""How an executor of the bundled engine loads a model: the same for every one that computes."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Final

import torch

from lmi_bench.core.errors import InputError
from lmi_bench.core.host import usable_cores
from lmi_bench.engine.quantization import NOT_QUANTIZED, QuantizeSettings
from lmi_bench.engine.torch_backend.memory import blocks_that_fit
from lmi_bench.engine.torch_backend.precision import torch_dtype
from lmi_bench.engine.torch_backend.static.build import NOTHING_PREPARED, StepSettings

DEFAULT_BLOCK_SIZE: Final = 64
"""Tokens of a page: long enough that the matrix product over one is worth its call."""

DEFAULT_MEMORY_SHARE: Final = 0.5
"""Share of the free memory that the cache may take: a machine's CPU memory is rarely ours alone."""

DEFAULT_MOST_CACHE_TOKENS: Final = 1 << 18


@dataclass(frozen=True, slots=True)
class LoadSettings:
    """What may be chosen when a model is loaded.

    dtype              a name of DTYPES: weights, and cache unless `kv_dtype` differs
    kv_dtype           likewise of cached keys and values; None: as the weights
    num_blocks         cache blocks of `block_size` tokens; None: as `memory_share` (0 to 1) of the
                       memory that is free after loading allows, at most `most_cache_tokens` tokens
    threads            CPU threads of a step, over all ranks; None: the cores that this process may
                       use
    device             "cpu", or "cuda": over ranks, rank r on device `first_device` + r
    first_device       which GPU this copy of the model has, or its rank 0
    sampling_seed      of requests without a seed; None: another one at each start
    quantize           how weights are rounded as they are loaded
    steps              which decode steps are compiled or captured at start

    Raises InputError for a count below one.
    """

    dtype: str = "bfloat16"
    kv_dtype: str | None = None
    num_blocks: int | None = None
    block_size: int = DEFAULT_BLOCK_SIZE
    memory_share: float = DEFAULT_MEMORY_SHARE
    most_cache_tokens: int = DEFAULT_MOST_CACHE_TOKENS
    threads: int | None = None
    device: str = "cpu"
    first_device: int = 0
    sampling_seed: int | None = None
    quantize: QuantizeSettings = NOT_QUANTIZED
    steps: StepSettings = NOTHING_PREPARED

    def __post_init__(self) -> None:
        for name in ("block_size", "num_blocks", "threads"):
            count = getattr(self, name)
            if count is not None and count < 1:
                raise InputError(f"{name} must be at least 1, got {count}")

    @property
    def place(self) -> torch.device:
        """Where a copy on one device is."""
        if self.device != "cuda":
            return torch.device(self.device)
        return torch.device("cuda", self.first_device)

    def cache_dtype(self, stored: torch.dtype) -> torch.dtype:
        """Number format of the cache, beside weights stored as `stored`."""
        return stored if self.kv_dtype is None else torch_dtype(self.kv_dtype)

    @property
    def threads_in_use(self) -> int:
        """CPU threads of a step."""
        return self.threads or usable_cores()

    def blocks_in(self, free_bytes: int, bytes_per_block: int) -> int:
        """Cache blocks to take of so much free memory. Raises CapacityError where none fits."""
        return self.num_blocks or blocks_that_fit(
            free_bytes,
            self.memory_share,
            bytes_per_block,
            most=max(1, self.most_cache_tokens // self.block_size),
        )

    def seed(self) -> int:
        """Of requests that bring none; a new one at each call unless it is set."""
        return secrets.randbits(62) if self.sampling_seed is None else self.sampling_seed


DEFAULT_LOAD: Final = LoadSettings()
