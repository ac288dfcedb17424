"""CPU memory in large pages, for data that is read sequentially."""

from __future__ import annotations

import mmap
from typing import Final

import torch
from torch import Tensor

from lmi_bench.core.errors import CapacityError

LARGE_PAGE: Final = 2 << 20  # bytes


def zeroed_bytes(size_bytes: int) -> Tensor:
    """Zeroed bytes that the system commits when written, in large pages if possible: a sequential
    read stalls at the end of each small page. Sizes below a quarter of a large page use small ones.

    Raises CapacityError if the system has no room for them.
    """
    try:
        return _zeroed_bytes(size_bytes)
    except (OSError, OverflowError) as exc:
        raise CapacityError(
            f"{size_bytes:,} bytes cannot be allocated: {exc}; lower --num-blocks or --memory-share"
        ) from exc


def _zeroed_bytes(size_bytes: int) -> Tensor:
    if size_bytes < LARGE_PAGE // 4 or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.frombuffer(mmap.mmap(-1, max(1, size_bytes)), dtype=torch.uint8)[:size_bytes]
    # private: Linux gives no large pages to memory that can be shared
    memory = mmap.mmap(-1, size_bytes + LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    start = -whole.data_ptr() % LARGE_PAGE
    return whole[start : start + size_bytes]
