"""The native receiver `harvest.c`: built if needed, attached to a loop's epoll; its kept reads.

Python sees a stream again when its response may have ended; each token event costs one recvmsg and
two copies of its bytes, without the interpreter.
"""

import ctypes
import math
import os
import select
import ssl
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, overload

from lmi_bench.core.errors import InputError
from lmi_bench.core.native_build import RECEIVER, NativeUnavailableError
from lmi_bench.core.native_build import library as build_library
from lmi_bench.loadgen.http import native_tls
from lmi_bench.loadgen.http.answer import Read

Receive = Literal["auto", "native", "python"]

_ROW = struct.Struct("@qqq16s")
_NO_STAMP = struct.pack("@qq", -1, -1)
NO_STREAM, MAY_HAVE_ENDED, CLOSED, FAILED, WRITABLE, TLS_FAILED = range(6)
"""Why Python is woken: `enum wake_kind` of `harvest.c`."""
WATCHED: Final = sum(getattr(select, f"EPOLL{name}", 0) for name in ("IN", "RDHUP", "ET"))
"""How a kept stream is added to the epoll; see `harvester_add`."""
_WAKE_INTS = 4
_WAKES_PER_DESCRIPTOR = 2
_SPARE_DESCRIPTORS = 64
_LONGEST_WAIT_S = 0.1
"""After which Python looks for a signal: one that comes just before the wait, or to another thread,
does not end it."""


@dataclass(frozen=True, slots=True)
class ReceiveChoice:
    """The reader of the sockets: the native receiver or Python.

    library  the compiled receiver; None: Python reads
    """

    library: Path | None
    why: str | None = None

    @property
    def note(self) -> str:
        """One line for the run's files."""
        if self.library is not None:
            return "native"
        return "python" if self.why is None else f"python; not native, because {self.why}"


def choose_receive(wanted: Receive, *, tls: bool = False, tell: Callable[[str], None] | None = None) -> ReceiveChoice:
    """The native receiver if available, built first if necessary (under a second).

    tls   the endpoint's connections are encrypted

    Raises InputError if it is required and not available.
    """
    if wanted == "python":
        return ReceiveChoice(None)
    try:
        if sys.platform != "linux":
            raise NativeUnavailableError(f"it needs epoll, which {sys.platform} does not have")
        if tls and (missing := native_tls.why_not()):
            raise NativeUnavailableError(missing)
        return ReceiveChoice(build_library(RECEIVER, tell=tell))
    except NativeUnavailableError as exc:
        if wanted == "native":
            raise InputError(
                f"the native receiver cannot be used, because {exc}: use --receive auto or python"
            ) from exc
        return ReceiveChoice(None, str(exc))


class _Stream(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("num_bytes", ctypes.c_int64),
        ("rows", ctypes.c_void_p),
        ("num_rows", ctypes.c_int64),
        ("limit_bytes", ctypes.c_int64),
        ("chunked", ctypes.c_int64),
    )


class KeptReads(Sequence[Read]):
    """The reads of a response as the native receiver kept them, unpacked when they are asked for.

    data  the response's bytes; rows: struct row of `harvest.c`, one a read
    """

    def __init__(self, data: bytes, rows: bytes) -> None:
        self._data = data
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows) // _ROW.size

    def __iter__(self) -> Iterator[Read]:
        begin = 0
        data = self._data
        for user_ns, bound_ns, end, control in _ROW.iter_unpack(self._rows):
            yield user_ns, None if control == _NO_STAMP else control, data[begin:end], bound_ns
            begin = end

    @overload
    def __getitem__(self, index: int) -> Read: ...
    @overload
    def __getitem__(self, index: slice) -> list[Read]: ...
    def __getitem__(self, index: int | slice) -> Read | list[Read]:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        place = index + len(self) if index < 0 else index
        if not 0 <= place < len(self):
            raise IndexError(index)
        size = _ROW.size
        begin = _ROW.unpack_from(self._rows, (place - 1) * size)[2] if place else 0
        user_ns, bound_ns, end, control = _ROW.unpack_from(self._rows, place * size)
        stamp = None if control == _NO_STAMP else control
        return user_ns, stamp, self._data[begin:end], bound_ns


class KeptStream:
    """One socket's buffer in the native receiver; empty after its removal."""

    def __init__(self, library: "_Library", address: int) -> None:
        self._library = library
        self._address: int | None = address
        self._stream = _Stream.from_address(address)

    def restart(self, limit_bytes: int) -> None:
        """Drop the received bytes; each read beyond the limit will wake Python."""
        if self._address is not None:
            self._library.restart(self._address, limit_bytes)

    def detach(self) -> None:
        """The buffer is about to be freed."""
        self._address = None
        self._stream = _Stream()

    def body_is_chunked(self) -> None:
        """From now on a read that ends a chunk of events does not wake the loop."""
        self._stream.chunked = 1

    @property
    def num_bytes(self) -> int:
        """Bytes received since the restart."""
        return int(self._stream.num_bytes)

    def since(self, begin: int) -> bytes:
        """The received bytes from this index on."""
        stream = self._stream
        if stream.num_bytes <= begin:
            return b""
        return ctypes.string_at(stream.data + begin, stream.num_bytes - begin)

    def reads(self) -> KeptReads:
        """A copy of all received bytes, read by read."""
        stream = self._stream
        rows = ctypes.string_at(stream.rows, stream.num_rows * _ROW.size) if stream.rows else b""
        return KeptReads(self.since(0), rows)


class _Library:
    """The C interface. Only the function that waits releases the interpreter lock."""

    def __init__(self, path: Path) -> None:
        waiting, brief = ctypes.CDLL(str(path), use_errno=True), ctypes.PyDLL(str(path))
        self.wait = waiting.harvester_wait
        self.wait.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int)
        self.new = brief.harvester_new
        self.new.argtypes, self.new.restype = (ctypes.c_int,), ctypes.c_void_p
        self.free = brief.harvester_free
        self.free.argtypes, self.free.restype = (ctypes.c_void_p,), None
        self.add = brief.harvester_add
        self.add.argtypes, self.add.restype = (ctypes.c_void_p, ctypes.c_int), ctypes.c_void_p
        self.decrypt = brief.harvester_decrypt
        self.decrypt.argtypes, self.decrypt.restype = (ctypes.c_void_p,) * 5, None
        self.remove = brief.harvester_remove
        self.remove.argtypes, self.remove.restype = (ctypes.c_void_p, ctypes.c_int), None
        self.restart = brief.stream_restart
        self.restart.argtypes, self.restart.restype = (ctypes.c_void_p, ctypes.c_int64), None


class NativeHarvester:
    """The native receiver on one epoll; one thread uses it."""

    def __init__(self, library: Path, epoll_fd: int) -> None:
        self._library = _Library(library)
        self._harvester = self._library.new(epoll_fd)
        if not self._harvester:
            raise MemoryError("no memory for the native receiver")
        self._streams: dict[int, KeptStream] = {}
        self._buffer: ctypes.Array[ctypes.c_int32] = (ctypes.c_int32 * 0)()
        self._wakes = memoryview(b"")

    def add(self, fd: int, session: ssl.SSLObject | None = None) -> KeptStream:
        """Keep what this descriptor reads, decrypted if it carries a TLS session; the caller adds it
        to the epoll and holds the session until `remove`."""
        self.remove(fd)
        address = self._library.add(self._harvester, fd)
        if not address:
            raise MemoryError("no memory for another stream")
        if session is not None:
            self._library.decrypt(self._harvester, address, *native_tls.addresses(session))
        stream = self._streams[fd] = KeptStream(self._library, address)
        return stream

    def remove(self, fd: int) -> None:
        """Forget a stream; the caller takes it from the epoll."""
        stream = self._streams.pop(fd, None)
        if stream is not None:
            stream.detach()
            self._library.remove(self._harvester, fd)

    def wait(
        self, timeout_s: float | None, tick_s: float | None, num_descriptors: int
    ) -> Iterator[tuple[int, int, int, int]]:
        """Read until the loop must act: (descriptor, kind, epoll events, errno) of each event.

        Returns without events after `timeout_s`, or sooner, so that Python can handle signals.

        num_descriptors  of the epoll
        """
        capacity = _WAKES_PER_DESCRIPTOR * (num_descriptors + _SPARE_DESCRIPTORS)
        if len(self._wakes) < _WAKE_INTS * capacity:
            self._buffer = (ctypes.c_int32 * (2 * _WAKE_INTS * capacity))()
            self._wakes = memoryview(self._buffer).cast("B").cast("i")
        wait_s = _LONGEST_WAIT_S if timeout_s is None else min(timeout_s, _LONGEST_WAIT_S)
        count = self._library.wait(
            self._harvester,
            math.ceil(1e9 * max(0.0, wait_s)),
            0 if tick_s is None else int(tick_s * 1e9),
            ctypes.addressof(self._buffer),
            capacity,
        )
        if count < 0:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))
        wakes = self._wakes
        for at in range(0, _WAKE_INTS * count, _WAKE_INTS):
            yield wakes[at], wakes[at + 1], wakes[at + 2], wakes[at + 3]

    def close(self) -> None:
        """Free everything, streams too."""
        for fd in list(self._streams):
            self.remove(fd)
        harvester, self._harvester = self._harvester, None
        if harvester:
            self._library.free(harvester)
