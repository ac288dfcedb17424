"""How the ranks of a tensor-parallel group add and join their parts.

Two ways behind one interface: memory that the ranks of one machine share, and torch.distributed
(NCCL between GPUs, gloo elsewhere). Every rank gets the same bits back, so ranks that take the same
steps stay the same without another word.
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
    """What carries the ranks' parts."""

    SHARED_MEMORY = "shared_memory"
    GLOO = "gloo"
    NCCL = "nccl"


class Collectives(Protocol):
    """What one rank does together with all others; each calls the same in the same order."""

    @property
    def rank(self) -> int:
        """This rank, from 0."""
        ...

    @property
    def degree(self) -> int:
        """Ranks of the group."""
        ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over the ranks, in place; x is contiguous and of one shape everywhere."""
        ...

    def gather_columns(self, x: Tensor) -> Tensor:
        """The ranks' columns side by side: (rows, columns) each to (rows, degree * columns)."""
        ...

    def close(self) -> None:
        """Let go of what connects the ranks."""
        ...


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where torch.distributed's ranks find each other: a file that does not exist yet."""

    transport: Transport
    path: str


class DistributedCollectives:
    """Over torch.distributed, one process group a process."""

    def __init__(self, meeting: Meeting | None, rank: int, degree: int) -> None:
        """meeting  None: the process has joined its group already"""
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
        """Ranks of the group."""
        return self._degree

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over the ranks, in place."""
        distributed.all_reduce(x)
        return x

    def gather_columns(self, x: Tensor) -> Tensor:
        """The ranks' columns side by side."""
        parts = [torch.empty_like(x) for _ in range(self._degree)]
        distributed.all_gather(parts, x.contiguous())
        return torch.cat(parts, dim=1)

    def close(self) -> None:
        """Leave the group."""
        distributed.destroy_process_group()


def loopback_interface() -> str:
    """The network interface that gloo is to use between processes of one machine."""
    return _LOOPBACK
