"""Sums and concatenations across the ranks of a tensor-parallel group.

One interface, two implementations: shared memory on one machine, and torch.distributed (NCCL
between GPUs, gloo elsewhere). Every rank receives identical bits, so ranks that run the same steps
stay identical without further communication.
"""

from __future__ import annotations

import datetime
import sys
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, Protocol

import torch
from torch import Tensor, distributed

_LOOPBACK: Final = "lo0" if sys.platform == "darwin" else "lo"
_PATIENCE: Final = datetime.timedelta(minutes=30)  # a dead rank is noticed by its process


class Transport(StrEnum):
    """The means of communication between ranks."""

    SHARED_MEMORY = "shared_memory"
    GLOO = "gloo"
    NCCL = "nccl"


class Collectives(Protocol):
    """Collective operations; all ranks make the same calls in the same order."""

    @property
    def rank(self) -> int:
        """This rank, from 0."""
        ...

    @property
    def degree(self) -> int:
        """Number of ranks in the group."""
        ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over the ranks, in place; x is contiguous and has the same shape on every rank."""
        ...

    def gather_columns(self, x: Tensor) -> Tensor:
        """Concatenate the ranks' columns: (rows, columns) each to (rows, degree * columns)."""
        ...

    def close(self) -> None:
        """Release the connection between the ranks."""
        ...


@dataclass(frozen=True, slots=True)
class Meeting:
    """Rendezvous of torch.distributed's ranks: a file that does not exist yet."""

    transport: Transport
    path: str


class DistributedCollectives:
    """Collectives over torch.distributed, one process group per process."""

    def __init__(self, meeting: Meeting | None, rank: int, degree: int) -> None:
        """meeting  None: the process has already joined its group"""
        self._rank = rank
        self._degree = degree
        if meeting is None:
            return
        options: dict[str, Any] = {}
        if meeting.transport is Transport.NCCL:
            options["device_id"] = torch.device("cuda", torch.cuda.current_device())
        distributed.init_process_group(
            meeting.transport.value,
            init_method=f"file://{meeting.path}",
            rank=rank,
            world_size=degree,
            timeout=_PATIENCE,
            **options,
        )

    @property
    def rank(self) -> int:
        """This rank, from 0."""
        return self._rank

    @property
    def degree(self) -> int:
        """Number of ranks in the group."""
        return self._degree

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over the ranks, in place."""
        distributed.all_reduce(x)
        return x

    def gather_columns(self, x: Tensor) -> Tensor:
        """Concatenate the ranks' columns."""
        parts = [torch.empty_like(x) for _ in range(self._degree)]
        distributed.all_gather(parts, x.contiguous())
        return torch.cat(parts, dim=1)

    def close(self) -> None:
        """Leave the group."""
        distributed.destroy_process_group()


def loopback_interface() -> str:
    """The network interface for gloo between processes of one machine."""
    return _LOOPBACK
