"""Free memory, whether weights fit into it, and CPU memory in large pages.

All sizes are in bytes.
"""

import mmap
from typing import Final

import torch
from torch import Tensor

from lmi_bench.core.errors import CapacityError
from lmi_bench.core.host import available_memory_bytes
from lmi_bench.core.units import bytes_to_gib


def free_memory_bytes(device: torch.device) -> int:
    """Memory that can still be allocated on `device`: by the driver of a GPU, else by the host."""
    if device.type != "cuda":
        return available_memory_bytes()
    free, _total = torch.cuda.mem_get_info(device)
    return int(free)


def check_weights_fit(name: str, weight_bytes: int, device: torch.device) -> None:
    """Raise CapacityError if the weights exceed the device's free memory, before minutes of
    loading, or before the system kills the process."""
    free_bytes = free_memory_bytes(device)
    if weight_bytes > free_bytes:
        raise CapacityError(
            f"the weights of {name} take {bytes_to_gib(weight_bytes):.1f} GiB and "
            f"{bytes_to_gib(free_bytes):.1f} GiB are free on {device}: free memory, use --dtype "
            "bfloat16 or --quantize, more devices with --tp, or a smaller model"
        )


LARGE_PAGE: Final = 2 << 20  # bytes


def zeroed_bytes(size_bytes: int) -> Tensor:
    """Zeroed bytes that the system commits when written, in large pages if possible: a sequential
    read stalls at the end of each small page. Sizes below a quarter of a large page use small ones.

    Raises CapacityError if the system has no room for them.
    """
    try:
        if size_bytes < LARGE_PAGE // 4 or not hasattr(mmap, "MADV_HUGEPAGE"):
            small = mmap.mmap(-1, max(1, size_bytes))
            return torch.frombuffer(small, dtype=torch.uint8)[:size_bytes]
        # private: Linux gives no large pages to memory that can be shared
        memory = mmap.mmap(-1, size_bytes + LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)
    except (OSError, OverflowError) as exc:
        raise CapacityError(
            f"{size_bytes:,} bytes cannot be allocated: {exc}; lower --num-blocks or --memory-share"
        ) from exc
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    start = -whole.data_ptr() % LARGE_PAGE
    return whole[start : start + size_bytes]
