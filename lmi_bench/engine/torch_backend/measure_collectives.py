"""Times all-reduces between processes of this machine, without a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from lmi_bench.core.errors import InputError
from lmi_bench.engine.torch_backend.collectives import Transport
from lmi_bench.engine.torch_backend.rank import TimeAllReduce
from lmi_bench.engine.torch_backend.rank_group import RankGroup
from lmi_bench.engine.torch_backend.shared_memory import room_for, works_here

_BYTES_A_ROUND: Final = 32 << 20
_MOST_CALLS: Final = 100


def measure_all_reduces(
    ranks: int, transport: str, sizes_bytes: Sequence[int], *, rounds: int
) -> list[float]:
    """Seconds of one all-reduce for each size, the median over `rounds` rounds of up to 100 calls.

    Raises InputError if shared memory does not work here, or there are too few GPUs.
    """
    device = "cpu"
    if transport == Transport.NCCL:
        device = "cuda"
        if torch.cuda.device_count() < ranks:
            raise InputError(
                f"--transport nccl: {ranks} ranks need as many GPUs; "
                f"{torch.cuda.device_count()} are here"
            )
    if transport == Transport.SHARED_MEMORY:
        if not works_here():
            raise InputError("shared memory needs an x86-64 processor here: use --transport gloo")
        if not room_for(ranks):
            raise InputError(
                f"the system's shared memory (/dev/shm) has no room for {ranks} ranks: enlarge it, "
                "or use --transport gloo"
            )
    group = RankGroup(ranks, Transport(transport), threads=1)
    try:
        calls = tuple(max(1, min(_MOST_CALLS, _BYTES_A_ROUND // size)) for size in sizes_bytes)
        times_s: list[float] = group.ask(TimeAllReduce(tuple(sizes_bytes), calls, rounds, device))
        return times_s
    finally:
        group.close()
