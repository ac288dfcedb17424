"""Sums and concatenations across the ranks of a tensor-parallel group.

One interface, two implementations: shared memory on one machine, and torch.distributed (NCCL
between GPUs, gloo elsewhere). All ranks make the same calls in the same order. Every rank receives
identical bits, so ranks that run the same steps stay identical without further communication.

Shared memory: every rank has a region in each of two slots. A call writes this rank's part into its
region of the call's slot, sets this rank's flag to the call's number, waits until all flags have
reached it, and reads all regions. A slot is written again two calls later; by then every rank has
set its flag for the call between, so it has read the slot.

    bytes: flags, one cache line a rank | abort flag, one line | slot 0: region 0, 1, .. | slot 1

Other processes must see a flag only after the data stored before it. x86-64 keeps stores in order;
elsewhere `works_here` is false. Waiting spins first, then yields the core, then sleeps: with fewer
free cores than ranks, the rank that the others wait for must get to run.
"""

import datetime
import os
import platform
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from itertools import product
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, distributed

from lmi_bench.core.errors import EngineError

LOOPBACK: Final = "lo0" if sys.platform == "darwin" else "lo"
"""The network interface for gloo between processes of one machine."""

_PATIENCE: Final = datetime.timedelta(minutes=30)  # a dead rank is noticed by its process


class Transport(StrEnum):
    """The means of communication between ranks."""

    SHARED_MEMORY = "shared_memory"
    GLOO = "gloo"
    NCCL = "nccl"


@dataclass(frozen=True, slots=True)
class Meeting:
    """Rendezvous of torch.distributed's ranks: a file that does not exist yet.

    groups  equal groups of neighbours, each with collectives of its own
    """

    transport: Transport
    path: str
    groups: int = 1


class DistributedCollectives:
    """Collectives over torch.distributed, within this rank's group of the meeting."""

    def __init__(self, meeting: Meeting, rank: int, degree: int) -> None:
        """rank and degree: of all processes"""
        self.degree = degree // meeting.groups
        self.rank = rank % self.degree
        self._group: distributed.ProcessGroup | None = None  # all
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
        if meeting.groups > 1:  # every process takes part in making each group
            firsts = range(0, degree, self.degree)
            made = [distributed.new_group(range(n, n + self.degree)) for n in firsts]
            self._group = made[rank // self.degree]

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over the ranks, in place; x is contiguous and has the same shape on every rank."""
        distributed.all_reduce(x, group=self._group)
        return x

    def gather_columns(self, x: Tensor) -> Tensor:
        """Concatenate the ranks' columns: (rows, columns) each to (rows, degree * columns)."""
        parts = [torch.empty_like(x) for _ in range(self.degree)]
        distributed.all_gather(parts, x.contiguous(), group=self._group)
        return torch.cat(parts, dim=1)

    def close(self) -> None:
        distributed.destroy_process_group()


REGION_BYTES: Final = 1 << 20
"""A rank's region of one slot; larger tensors are sent in pieces that stay in the CPU cache."""

_LINE_BYTES: Final = 64
_FLAGS_PER_LINE: Final = _LINE_BYTES // 8
_SPINS: Final = 200  # some 15 us
_YIELDS: Final = 2000
_FIRST_SLEEP_S: Final = 20e-6
_LONGEST_SLEEP_S: Final = 1e-3
_MOUNT: Final = Path("/dev/shm")  # noqa: S108


@dataclass(frozen=True, slots=True)
class Segment:
    """Name and size of a shared-memory segment, as sent to each rank."""

    name: str
    degree: int

    @property
    def header_bytes(self) -> int:
        """Bytes of the ranks' flags and the abort flag."""
        return (self.degree + 1) * _LINE_BYTES

    @property
    def total_bytes(self) -> int:
        """Bytes of the flags and the two slots."""
        return self.header_bytes + 2 * self.degree * REGION_BYTES


def works_here() -> bool:
    """True if this processor keeps stores in order."""
    return platform.machine().lower() in ("x86_64", "amd64")


def room_for(degree: int) -> bool:
    """True if the system's shared memory has room: writing beyond it would kill the process."""
    if not _MOUNT.is_dir():
        return True  # without such a file system (macOS) the segment is ordinary memory
    return shutil.disk_usage(_MOUNT).free >= 2 * Segment("", degree).total_bytes


class SegmentOwner:
    """Creates the segment and can abort the ranks. Call `unlink` once all ranks have mapped it, so
    that nothing remains however the processes end."""

    def __init__(self, degree: int) -> None:
        size = Segment("", degree).total_bytes
        self._memory = SharedMemory(create=True, size=size)
        self.segment = Segment(self._memory.name, degree)
        self._linked = True

    def unlink(self) -> None:
        """Remove the name; existing mappings stay valid."""
        if self._linked:
            self._linked = False
            self._memory.unlink()

    def abort(self) -> None:
        """Make every waiting rank fail."""
        at = self.segment.degree * _LINE_BYTES
        assert self._memory.buf is not None
        self._memory.buf[at : at + 8] = (1).to_bytes(8, "little")

    def close(self) -> None:
        self.unlink()
        self._memory.close()


class SharedMemoryCollectives:
    """One rank's side of a segment.

    orphaned  called regularly while waiting; True if the parent process has ended
    """

    def __init__(self, segment: Segment, rank: int, orphaned: Callable[[], bool]) -> None:
        self.rank, self.degree = rank, segment.degree
        self._orphaned = orphaned
        self._memory = SharedMemory(segment.name)
        assert self._memory.buf is not None
        header = self._memory.buf[: segment.header_bytes]
        self._flags = header.cast("q")
        self._abort_at = self.degree * _FLAGS_PER_LINE
        self._others = [r * _FLAGS_PER_LINE for r in range(self.degree) if r != rank]
        self._slots: list[list[Tensor]] = [
            [
                torch.frombuffer(
                    self._memory.buf,
                    dtype=torch.uint8,
                    count=REGION_BYTES,
                    offset=segment.header_bytes + (slot * self.degree + r) * REGION_BYTES,
                )
                for r in range(self.degree)
            ]
            for slot in range(2)
        ]
        self._typed: dict[torch.dtype, list[list[Tensor]]] = {}
        self._call = 0

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over the ranks, in place; every rank adds in rank order. Raises EngineError if the
        group was aborted."""
        flat = x.view(-1)
        most = REGION_BYTES // x.element_size()
        for start in range(0, flat.shape[0], most):
            piece = flat[start : start + most]
            first, second, *rest = self._exchange(piece)
            torch.add(first, second, out=piece)
            for part in rest:
                piece.add_(part)
        return x

    def gather_columns(self, x: Tensor) -> Tensor:
        """Concatenate the ranks' columns. Raises EngineError if the group was aborted."""
        rows, columns = x.shape
        whole = (rows, self.degree * columns)  # a step with only prompt chunks has no row here
        out = torch.empty((rows, self.degree, columns), dtype=x.dtype)
        most = REGION_BYTES // x.element_size()
        wide, tall = min(columns, most), max(1, most // columns)
        for row, column in product(range(0, rows, tall), range(0, columns, wide)):
            place = (slice(row, row + tall), slice(column, column + wide))
            for rank, part in enumerate(self._exchange(x[place].reshape(-1))):
                out[place[0], rank, place[1]] = part.view(x[place].shape)
        return out.view(whole)

    def close(self) -> None:
        """Unmap the memory; the object must not be used afterwards."""
        self._typed.clear()
        self._slots.clear()
        self._flags.release()
        self._memory.close()

    def _exchange(self, piece: Tensor) -> list[Tensor]:
        """Every rank's 1-D piece; valid until the call after the next."""
        self._call += 1
        regions = self._regions(piece.dtype)[self._call & 1]
        size = piece.shape[0]
        regions[self.rank][:size].copy_(piece)
        self._flags[self.rank * _FLAGS_PER_LINE] = self._call
        self._wait()
        return [region[:size] for region in regions]

    def _regions(self, dtype: torch.dtype) -> list[list[Tensor]]:
        typed = self._typed.get(dtype)
        if typed is None:
            typed = [[region.view(dtype) for region in slot] for slot in self._slots]
            self._typed[dtype] = typed
        return typed

    def _wait(self) -> None:
        """Wait until every rank has written its part of this call."""
        flags, call = self._flags, self._call
        for other in self._others:
            for _ in range(_SPINS):
                if flags[other] >= call:
                    break
            else:
                self._wait_longer(other)

    def _wait_longer(self, other: int) -> None:
        flags, call = self._flags, self._call
        for _ in range(_YIELDS):
            if flags[other] >= call:
                return
            os.sched_yield()
        sleep_s = _FIRST_SLEEP_S
        while flags[other] < call:
            if flags[self._abort_at] or self._orphaned():
                raise EngineError("the tensor-parallel group was aborted")
            time.sleep(sleep_s)
            sleep_s = min(2 * sleep_s, _LONGEST_SLEEP_S)


Collectives = DistributedCollectives | SharedMemoryCollectives
