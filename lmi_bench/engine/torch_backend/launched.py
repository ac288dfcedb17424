"""Ranks started by a launcher such as torchrun, on one or several hosts.

Each process is one rank. Rank 0 serves: it sends every request to the others over
torch.distributed, and all run their part until rank 0 sends a stop. Each rank has a connection to
rank 0 that ends with it: torch.distributed notices an ended rank only when it next waits for it,
which an idle server does not do, and a launcher's agent watches only its own host.

torch.distributed sends pickled values between hosts without authentication: use it, like torchrun
itself, only in a trusted network.
"""

import datetime
import hmac
import os
import secrets
import select
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import distributed

from lmi_bench.core.errors import EngineError, InputError, LmiBenchError
from lmi_bench.engine.torch_backend.collectives import DistributedCollectives, Transport
from lmi_bench.engine.torch_backend.rank import RankAnswer, RankWorker, Request, T
from lmi_bench.engine.torch_backend.weights import Progress

_CONNECT_S: Final = 60.0  # to connect; all ranks connect at the same time
_ENDS_SOON_S: Final = 2.0  # between the failure of a sum and the end of a connection
_SECRET_BYTES: Final = 16
_RANK_BYTES: Final = 4
_KEEP_ALIVE: Final = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""A host that disappears silently is noticed within half a minute."""


class RankWatch:
    """This rank's connections: rank 0 has one to every other rank, the others one to rank 0."""

    def __init__(self, rank: int, degree: int) -> None:
        """Connect; every rank calls this after joining the process group. Raises EngineError if the
        ranks cannot connect."""
        self._degree = degree
        self._to: dict[int, socket.socket] = {}
        try:
            if rank == 0:
                self._await_others()
            else:
                self._to[0] = _connected_to_rank_0(rank)
        except OSError as exc:
            self.close()
            raise EngineError(f"rank {rank} of {degree} cannot reach the others: {exc}") from exc

    @property
    def sentinels(self) -> dict[int, int]:
        """Descriptors that become readable when a rank's process ends, by rank."""
        return {rank: connection.fileno() for rank, connection in self._to.items()}

    def explained(self, failure: RuntimeError) -> EngineError:
        """The cause of a failed step: a rank that has ended, else torch's error."""
        of = {descriptor: rank for rank, descriptor in self.sentinels.items()}
        ended, _, _ = select.select(list(of), [], [], _ENDS_SOON_S)
        if ended:
            return self.end_of(of[ended[0]])
        return EngineError(f"a step over {self._degree} ranks failed: {failure}")

    def end_of(self, rank: int) -> EngineError:
        """The error for a rank that has ended."""
        return EngineError(
            f"rank {rank} of {self._degree} has ended or its host cannot be reached: the engine "
            "cannot go on without it, start all ranks again"
        )

    def close(self) -> None:
        """Close the connections. May be called again."""
        for connection in self._to.values():
            connection.close()
        self._to = {}

    def _await_others(self) -> None:
        with _listener() as listener:
            secret = secrets.token_bytes(_SECRET_BYTES)
            distributed.broadcast_object_list([(listener.getsockname()[1], secret)], src=0)
            while len(self._to) < self._degree - 1:
                connection, _ = listener.accept()
                connection.settimeout(_CONNECT_S)
                with connection.makefile("rb") as file:
                    said = file.read(_SECRET_BYTES + _RANK_BYTES)
                if not hmac.compare_digest(said[:_SECRET_BYTES], secret):
                    connection.close()  # not one of our ranks
                    continue
                self._to[int.from_bytes(said[_SECRET_BYTES:], "big")] = _kept_alive(connection)


def _connected_to_rank_0(rank: int) -> socket.socket:
    """Connect to rank 0 on MASTER_ADDR, as torch.distributed does."""
    message: list[Any] = [None]
    distributed.broadcast_object_list(message, src=0)
    port, secret = message[0]
    connection = socket.create_connection((os.environ["MASTER_ADDR"], port), _CONNECT_S)
    connection.sendall(secret + rank.to_bytes(_RANK_BYTES, "big"))
    return _kept_alive(connection)


def _listener() -> socket.socket:
    if socket.has_dualstack_ipv6():
        listener = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    else:
        listener = socket.create_server(("", 0))
    listener.settimeout(_CONNECT_S)
    return listener


def _kept_alive(connection: socket.socket) -> socket.socket:
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEP_ALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return connection


_PATIENCE: Final = datetime.timedelta(days=365)  # a server may be idle for long


@dataclass(frozen=True, slots=True)
class Launch:
    """Rank of this process, and number of ranks; `local_rank` is its rank on its host."""

    rank: int
    degree: int
    local_rank: int
    local_degree: int


def launch_of(environ: Mapping[str, str]) -> Launch | None:
    """Read torchrun's variables; None without them, or if there is only one rank. Raises InputError
    for values that are not numbers."""
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= environ.keys():
        return None
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    given = (environ["RANK"], environ["WORLD_SIZE"], *(environ.get(n, "0") for n in names[2:]))
    try:
        rank, degree, local_rank, local_degree = map(int, given)
    except ValueError:
        stated = ", ".join(f"{n}={value}" for n, value in zip(names, given, strict=True))
        raise InputError(f"{stated}: these must be numbers, as set by a launcher") from None
    if degree < 2:
        return None
    return Launch(rank, degree, local_rank, max(1, local_degree))


class LaunchedRanks:
    """All ranks as seen by rank 0; same interface as RankGroup.

    transport    how the ranks communicate
    process_ids  empty: the processes belong to the launcher
    """

    process_ids: tuple[int, ...] = ()

    def __init__(self, launch: Launch, device: str, *, threads: int) -> None:
        """threads  total for all ranks on this host"""
        self.degree = launch.degree
        self.transport = _transport(device)
        self._progress: Progress | None = None
        self._worker = _join(launch, device, threads, self._report)
        self._watch = RankWatch(launch.rank, launch.degree)
        self._open = True

    @property
    def sentinels(self) -> dict[int, int]:
        """As RankGroup.sentinels, for the other ranks."""
        return self._watch.sentinels

    def ask(self, request: Request[T]) -> T:
        try:
            _broadcast((request, False))
            return request(self._worker)
        except RuntimeError as exc:
            raise self._watch.explained(exc) from exc

    def ask_each(self, request: Request[T], progress: Progress | None = None) -> list[T]:
        self._progress = progress
        answers: list[Any] = [None] * self.degree
        try:
            _broadcast((request, True))
            distributed.gather_object(_answer(self._worker, request), answers, dst=0)
        except RuntimeError as exc:
            raise self._watch.explained(exc) from exc
        for rank, answer in enumerate(answers):
            answer.check(rank, self.degree)
        return [answer.result for answer in answers]

    def ask_first(self, request: Request[T]) -> T:
        return request(self._worker)

    def end_of(self, rank: int) -> EngineError:
        return self._watch.end_of(rank)

    def _report(self, done_bytes: int, total_bytes: int) -> None:
        if self._progress is not None:
            self._progress(done_bytes, total_bytes)

    def close(self) -> None:
        """Stop the other ranks. May be called again."""
        if not self._open:
            return
        self._open = False
        try:
            if select.select(list(self.sentinels.values()), [], [], 0)[0]:
                return  # torch may wait for ever for a lost rank; others end with this one
            _broadcast((None, False))
        except RuntimeError:  # they have already ended
            return
        finally:
            self._watch.close()
        distributed.destroy_process_group()


def follow(launch: Launch, device: str, *, threads: int) -> None:
    """Serve as a rank other than 0 until rank 0 sends a stop.

    Raises a failed step's error, or EngineError if rank 0 has ended: the process then ends, and
    the launcher ends the others on its host.
    """
    worker = _join(launch, device, threads)
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
        if request is None:
            distributed.destroy_process_group()
            return
        answer = _answer(worker, request)
        if answer_wanted:
            distributed.gather_object(answer, None, dst=0)
        elif answer.error is not None:
            raise answer.error


def _transport(device: str) -> Transport:
    return Transport.NCCL if device.startswith("cuda") else Transport.GLOO


def _join(
    launch: Launch, device: str, threads: int, report: Progress = lambda *_: None
) -> RankWorker:
    """Connect to the other ranks as the launcher's variables specify."""
    torch.set_num_threads(max(1, threads // launch.local_degree))
    backend = "gloo"
    if _transport(device) is Transport.NCCL:
        torch.cuda.set_device(launch.local_rank)
        backend = "cpu:gloo,cuda:nccl"
    distributed.init_process_group(
        backend, init_method="env://", rank=launch.rank, world_size=launch.degree, timeout=_PATIENCE
    )
    worker = RankWorker(launch.rank, launch.degree, launch.local_rank, report)
    worker.use(DistributedCollectives(None, launch.rank, launch.degree))
    return worker


def _broadcast(message: tuple[Request[Any] | None, bool]) -> None:
    distributed.broadcast_object_list([message], src=0)


def _answer(worker: RankWorker, request: Request[Any]) -> RankAnswer:
    try:
        return RankAnswer(request(worker))
    except LmiBenchError as exc:
        return RankAnswer(error=exc)
