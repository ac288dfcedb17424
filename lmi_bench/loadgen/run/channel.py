"""Messages between a sweep and its workers, over a pipe or TCP: authenticated, never pickled.

Each side greets with its version and a random number; the key of the connection follows from the
numbers and a shared secret, which each proves to know by its first message. A message is its MAC
(HMAC-SHA256), its class and JSON. The MAC is also over the direction and the count of the message,
so none can be changed, replayed, left out or sent back. Nothing is encrypted: a secret is only sent
through a pipe, and nothing but the two processes at its ends can read or write there, so its key
needs no secret.
"""

import asyncio
import contextlib
import hmac
import itertools
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Literal, TypeVar, get_args

from lmi_bench import __version__
from lmi_bench.core.errors import EXIT_BAD_INPUT, EXIT_FAILED, InputError, LmiBenchError
from lmi_bench.core.records import RequestRecord
from lmi_bench.core.typed_json import decode, encode
from lmi_bench.loadgen.http.answer import NS_PER_S
from lmi_bench.loadgen.http.kernel_time import KernelClock
from lmi_bench.loadgen.run.level_parts import LevelPart
from lmi_bench.loadgen.run.level_runner import LevelOrder, Progress

_MARK = "lmi-bench {} greets\n"
_MAC_BYTES = 32
_FIRST_BYTES = 2**12  # of a message, until the other side has shown the secret
_PRINTED_BYTES = 100_000  # what a login script may print before a worker greets


@dataclass(frozen=True, slots=True)
class Ready:
    """What comes next may be sent; first of all by a worker with its own number, if it has one."""

    number: int | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """What a worker opens.

    scenario  with the protocol, model and lengths that the sweep has found
    asked     the answers to the sweep's test requests (`Bench.asked`), so that none is repeated
    headers   of every request; their values are not sent over TCP
    sample    the worker's prompts and files must have the same (`jobs.worker.sample_of`)
    """

    scenario: Mapping[str, Any]
    asked: Mapping[str, Any]
    sample: str
    salt: str = ""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class Start:
    """The level begins at this time of the worker's own CLOCK_MONOTONIC, seconds."""

    at_s: float


@dataclass(frozen=True, slots=True)
class Stop:
    """Another worker has reached a stop rule's limit, or enough is known: send nothing more."""

    reason: str


@dataclass(frozen=True, slots=True)
class Ping:
    """Asks for the time at `sent_s` of the sweep, and answers with `at_s` of the worker.

    arrived_s  when the question reached the worker's host (`Channel.heard_s`), by the same clock
    late_frac  share of the last second that the worker's loop was late
    fault      of its level so far, such as a late start
    """

    sent_s: float
    at_s: float = 0.0
    arrived_s: float = 0.0
    late_frac: float = 0.0
    fault: str | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """The worker cannot go on."""

    message: str
    exit_code: int = EXIT_FAILED


News = Progress | RequestRecord
"""What a worker tells while it sends; a record, its times its own, of a request that ended."""
Message = Job | LevelOrder | Start | Stop | Ping | Ready | News | LevelPart | Failed
Role = Literal["sweep", "worker"]
_OTHER: dict[Role, Role] = {"sweep": "worker", "worker": "sweep"}
_KINDS: dict[bytes, type[Message]] = {kind.__name__.encode(): kind for kind in get_args(Message)}
M = TypeVar("M", bound=Message)


class ClosedError(InputError):
    """The other side has closed the connection; the user may mend what ended it."""


class Channel:
    """One connection. It waits for messages until `listen`, then it is called by the loop.

    source, sink  of bytes, which it owns
    name          of the other side, for messages
    role          of this side
    stamped       the connection, if its kernel was asked for the times at which packets arrive
    heard_s       CLOCK_MONOTONIC when the last message that was listened to reached this host, by
                  the kernel where it says so: a busy loop reads later
    """

    def __init__(
        self, source: Connection, sink: Connection, name: str, role: Role, stamped: socket.socket | None = None
    ) -> None:
        self.name, self.heard_s = name, 0.0
        self._stamped, self._kernel = stamped, KernelClock()
        self._kernel.sample()
        self._source, self._sink = source, sink
        self._key = b""
        self._role, self._other = role, _OTHER[role]
        self._sent, self._received = _numbered(role), _numbered(self._other)
        self._most_bytes: int | None = _FIRST_BYTES
        self._loop: asyncio.AbstractEventLoop | None = None

    def greet(self, secret: str, ready: Ready = Ready()) -> Ready:
        """Exchange versions and first messages; gives the other side's.

        Raises InputError for another version or secret, ClosedError if the other side ends.
        """
        number = secrets.token_hex(32)
        with contextlib.suppress(OSError):
            os.write(self._sink.fileno(), _MARK.format(self._role).encode())
        self._write(f"{__version__} {number}".encode())
        self._skip_to_mark()
        version, _, theirs = self._read().decode("ascii", "replace").partition(" ")
        if version != __version__:
            raise InputError(f"{self.name} has lmi-bench {version}, this is {__version__}: install the same one")
        numbers = number + theirs if self._role == "sweep" else theirs + number
        self._key = hmac.digest(secret.encode(), numbers.encode(), "sha256")
        self.send(ready)
        found = self.receive(Ready)
        self._most_bytes = None
        return found

    def send(self, message: Message) -> None:
        """Send a message; nothing happens if the other side is gone, which `receive` tells."""
        text = f"{type(message).__name__} ".encode() + encode(message)
        self._write(self._mac(next(self._sent), text) + text)

    def receive(self, kind: type[M]) -> M:
        """Wait for a message of this class."""
        found = self._next()
        if not isinstance(found, kind):
            raise LmiBenchError(f"{self.name} sent {type(found).__name__}, not {kind.__name__}")
        return found

    def listen(self, on_message: Callable[[Message | LmiBenchError], None]) -> None:
        """Have the running loop call this with each message, and with the error that ends it."""

        def readable() -> None:
            self.heard_s = self._arrived_s()
            try:
                on_message(self._next())
            except LmiBenchError as exc:
                self._stop_listening()
                on_message(exc)

        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._source.fileno(), readable)

    def close(self) -> None:
        """Close the connection, which ends the other side."""
        self._stop_listening()
        for each in (self._source, self._sink, self._stamped):
            if each is not None:
                each.close()

    def why_ended(self) -> str:
        """Why the other side has closed the connection."""
        return f"{self.name} has closed the connection"

    def _stop_listening(self) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._source.fileno())
        self._loop = None

    def _arrived_s(self) -> float:
        """When what can be read now reached this host: never too early, by CLOCK_MONOTONIC."""
        now_ns, control = time.monotonic_ns(), None
        if self._stamped is not None:
            with contextlib.suppress(OSError):
                _, messages, _, _ = self._stamped.recvmsg(1, 64, socket.MSG_PEEK | socket.MSG_DONTWAIT)
                control = messages[0][2] if messages else None
            self._kernel.reach(now_ns)  # a step of the clock since the last message would show
        stamp_ns = self._kernel.monotonic_ns(control, now_ns)
        return (now_ns if stamp_ns is None else stamp_ns + self._kernel.error_bound_ns) / NS_PER_S

    def _next(self) -> Message:
        """The next message. Raises InputError for a wrong MAC, ClosedError at the end, and for a
        Failed its error."""
        data = self._read()
        mac, text = data[:_MAC_BYTES], data[_MAC_BYTES:]
        if not hmac.compare_digest(self._mac(next(self._received), text), mac):
            raise InputError(
                f"{self.name}: a message was not made with this secret, so the "
                "connection is closed: set the same LMI_BENCH_SECRET on both sides"
            )
        name, _, content = text.partition(b" ")
        try:
            found: Message = decode(_KINDS[name], content)
        except (KeyError, ValueError) as exc:
            raise LmiBenchError(f"{self.name} sent a damaged {name!r}: {exc}") from exc
        if isinstance(found, Failed):
            kind = InputError if found.exit_code == EXIT_BAD_INPUT else LmiBenchError
            raise kind(f"{self.name}: {found.message}")
        return found

    def _mac(self, place: bytes, text: bytes) -> bytes:
        return hmac.digest(self._key, place + text, "sha256")

    def _skip_to_mark(self) -> None:
        """Read up to the end of the other side's mark; raises InputError if it does not come."""
        mark, seen = _MARK.format(self._other).encode(), b""
        for _ in range(_PRINTED_BYTES):
            byte = b""
            with contextlib.suppress(OSError):
                byte = os.read(self._source.fileno(), 1)
            if not byte:
                raise ClosedError(self.why_ended())
            seen = (seen + byte)[-len(mark) :]
            if seen == mark:
                return
        raise InputError(f"{self.name}: it is no lmi-bench {self._other}")

    def _read(self) -> bytes:
        try:
            return self._source.recv_bytes(self._most_bytes)
        except (EOFError, OSError) as exc:  # an end, a reset, or a message that is too long
            raise ClosedError(self.why_ended()) from exc

    def _write(self, data: bytes) -> None:
        with contextlib.suppress(OSError):
            self._sink.send_bytes(data)


def _numbered(role: Role) -> Iterator[bytes]:
    """The places of one side's messages, which their MACs are over."""
    return (f"{role} {count} ".encode() for count in itertools.count())
