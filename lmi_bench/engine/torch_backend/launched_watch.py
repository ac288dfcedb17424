"""Detects ended ranks of a launcher: each rank has a connection to rank 0 that ends with it.

torch.distributed notices only when it next waits for a rank, which an idle server does not do; and
a launcher's agent watches only its own host.
"""

from __future__ import annotations

import hmac
import os
import secrets
import select
import socket
from typing import Any, Final

from torch import distributed

from lmi_bench.core.errors import EngineError

_PATIENCE_S: Final = 60.0  # to connect; all ranks connect at the same time
_ENDS_SOON_S: Final = 2.0  # between the failure of a sum and the end of a connection
_SECRET_BYTES: Final = 16
_RANK_BYTES: Final = 4
_KEEP_ALIVE: Final = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""A host that disappears silently is noticed within half a minute."""


class RankWatch:
    """This rank's connections: rank 0 has one to every other rank, the others one to rank 0."""

    def __init__(self, rank: int, degree: int) -> None:
        """Connect; every rank calls this after joining the process group.

        Raises EngineError if the ranks cannot connect.
        """
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
                connection.settimeout(_PATIENCE_S)
                said = _read_exactly(connection, _SECRET_BYTES + _RANK_BYTES)
                if not hmac.compare_digest(said[:_SECRET_BYTES], secret):
                    connection.close()  # not one of our ranks
                    continue
                self._to[int.from_bytes(said[_SECRET_BYTES:], "big")] = _kept_alive(connection)


def _connected_to_rank_0(rank: int) -> socket.socket:
    """Connect to rank 0 on MASTER_ADDR, as torch.distributed does."""
    message: list[Any] = [None]
    distributed.broadcast_object_list(message, src=0)
    port, secret = message[0]
    connection = socket.create_connection((os.environ["MASTER_ADDR"], port), _PATIENCE_S)
    connection.sendall(secret + rank.to_bytes(_RANK_BYTES, "big"))
    return _kept_alive(connection)


def _listener() -> socket.socket:
    if socket.has_dualstack_ipv6():
        listener = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    else:
        listener = socket.create_server(("", 0))
    listener.settimeout(_PATIENCE_S)
    return listener


def _read_exactly(connection: socket.socket, count: int) -> bytes:
    """Read `count` bytes, or fewer if the other side closes."""
    read = b""
    while len(read) < count and (part := connection.recv(count - len(read))):
        read += part
    return read


def _kept_alive(connection: socket.socket) -> socket.socket:
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEP_ALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return connection
