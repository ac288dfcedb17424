"""Ranks that a launcher such as torchrun has started, on one host or on several.

Each process is one rank. Rank 0 serves: it does its own part of every request and sends the
request to the others over torch.distributed, which they follow until told to stop. Where one dies
the launcher ends those of its host, and rank 0 hears of it wherever it is (`launched_watch`).

torch.distributed sends pickled values between hosts and asks nobody who they are: use it within a
network that is yours alone, as with torchrun itself.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import distributed

from lmi_bench.core.errors import EngineError, InputError, LmiBenchError
from lmi_bench.engine.torch_backend.collectives import DistributedCollectives, Transport
from lmi_bench.engine.torch_backend.launched_watch import RankWatch
from lmi_bench.engine.torch_backend.rank import Answer, RankWorker, Stop
from lmi_bench.engine.torch_backend.weights import Progress

_PATIENCE: Final = datetime.timedelta(days=365)  # a server may be idle for long


@dataclass(frozen=True, slots=True)
class Launch:
    """Which of how many ranks this process is; `local_rank` among those of its host."""

    rank: int
    degree: int
    local_rank: int
    local_degree: int


def launch_of(environ: Mapping[str, str]) -> Launch | None:
    """What torchrun's variables say; None without them, or where there is but one rank.

    Raises InputError for values that are no numbers.
    """
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= environ.keys():
        return None
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    given = (environ["RANK"], environ["WORLD_SIZE"], *(environ.get(n, "0") for n in names[2:]))
    try:
        rank, degree, local_rank, local_degree = map(int, given)
    except ValueError:
        stated = ", ".join(f"{n}={value}" for n, value in zip(names, given, strict=True))
        raise InputError(f"{stated}: a launcher sets numbers there") from None
    if degree < 2:
        return None
    return Launch(rank, degree, local_rank, max(1, local_degree))


class _Hearer:
    """Passes on how far rank 0 has come with loading."""

    def __init__(self) -> None:
        self.progress: Progress | None = None

    def send(self, answer: Answer, /) -> None:
        if self.progress is not None and answer.progress is not None:
            self.progress(*answer.progress)

    def recv(self) -> Any:
        raise EngineError("a launched rank is asked over torch.distributed")

    def poll(self) -> bool:
        return False


class LaunchedRanks:
    """All ranks as rank 0 sees them; as RankGroup.

    transport    what their sums go through
    process_ids  none: they are the launcher's
    """

    process_ids: tuple[int, ...] = ()

    def __init__(self, launch: Launch, device: str, *, threads: int) -> None:
        """threads  of all ranks of this host together"""
        self.degree = launch.degree
        self.transport = _transport(device)
        self._hearer = _Hearer()
        self._worker = _join(launch, device, self._hearer, threads)
        self._watch = RankWatch(launch.rank, launch.degree)
        self._open = True

    @property
    def sentinels(self) -> dict[int, int]:
        """As RankGroup.sentinels, of the other ranks."""
        return self._watch.sentinels

    def ask(self, request: object) -> Any:
        """Have every rank do it; rank 0's answer. Raises EngineError where a rank has ended."""
        try:
            _tell((request, False))
            return self._worker.do(request)
        except RuntimeError as exc:
            raise self._watch.explained(exc) from exc

    def ask_each(self, request: object, progress: Progress | None = None) -> list[Any]:
        """Have every rank do it; the answers of all, in the order of the ranks."""
        self._hearer.progress = progress
        answers: list[Any] = [None] * self.degree
        try:
            _tell((request, True))
            distributed.gather_object(_answer(self._worker, request), answers, dst=0)
        except RuntimeError as exc:
            raise self._watch.explained(exc) from exc
        for rank, answer in enumerate(answers):
            if isinstance(answer.error, InputError):
                raise answer.error
            if answer.error is not None:
                raise EngineError(f"rank {rank} of {self.degree}: {answer.error}")
        return [answer.result for answer in answers]

    def ask_first(self, request: object) -> Any:
        """Have rank 0 alone do it."""
        return self._worker.do(request)

    def end_of(self, rank: int) -> EngineError:
        """What is said of a rank that has ended."""
        return self._watch.end_of(rank)

    def close(self) -> None:
        """Let the other ranks end. May be called again."""
        if not self._open:
            return
        self._open = False
        try:
            _tell((Stop(), False))
        except RuntimeError:  # they are gone already, and the launcher knows
            return
        finally:
            self._watch.close()
        distributed.destroy_process_group()


def follow(launch: Launch, device: str, *, threads: int) -> None:
    """Be a rank other than 0 until rank 0 says stop.

    Raises what a step fails with, EngineError where rank 0 has ended: the process then ends, and
    the launcher ends the others of its host.
    """
    worker = _join(launch, device, _Hearer(), threads)
    watch = RankWatch(launch.rank, launch.degree)
    try:
        _follow(worker)
    except RuntimeError as exc:
        raise watch.explained(exc) from exc
    finally:
        watch.close()


def _follow(worker: RankWorker) -> None:
    while True:
        message: list[Any] = [None]
        distributed.broadcast_object_list(message, src=0)
        request, answer_wanted = message[0]
        if isinstance(request, Stop):
            distributed.destroy_process_group()
            return
        answer = _answer(worker, request)
        if answer_wanted:
            distributed.gather_object(answer, None, dst=0)
        elif answer.error is not None:
            raise answer.error


def _transport(device: str) -> Transport:
    return Transport.NCCL if device.startswith("cuda") else Transport.GLOO


def _join(launch: Launch, device: str, hearer: _Hearer, threads: int) -> RankWorker:
    """Meet the other ranks where the launcher's variables say."""
    torch.set_num_threads(max(1, threads // launch.local_degree))
    backend = "gloo"
    if _transport(device) is Transport.NCCL:
        torch.cuda.set_device(launch.local_rank)
        backend = "cpu:gloo,cuda:nccl"
    distributed.init_process_group(
        backend,
        init_method="env://",
        rank=launch.rank,
        world_size=launch.degree,
        timeout=_PATIENCE,
    )
    worker = RankWorker(launch.rank, launch.degree, hearer, device_number=launch.local_rank)
    worker.use(DistributedCollectives(None, launch.rank, launch.degree))
    return worker


def _tell(message: tuple[object, bool]) -> None:
    distributed.broadcast_object_list([message], src=0)


def _answer(worker: RankWorker, request: object) -> Answer:
    try:
        return Answer(worker.do(request))
    except LmiBenchError as exc:
        return Answer(error=exc)
