"""Receiving on sockets with true times: the loop's selector does the reading itself.

asyncio would wake a task for every token. Here `select()` reads the stream sockets, keeps (time,
kernel time, bytes) and wakes a future only when a response ends, so one ordinary loop on one core
keeps up with some 100,000 token events a second. Times are CLOCK_MONOTONIC nanoseconds, which is
the loop's own clock.

The kernel stamps a packet when it enters the host (SO_TIMESTAMPNS, Linux), so the receive time
stays true however late the process gets to read it. Elsewhere the time of the read counts.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import ctypes
import select
import selectors
import socket
import struct
import sys
import time
from collections.abc import Coroutine
from typing import Any, Protocol, TypeVar

T = TypeVar("T")

SO_TIMESTAMPNS = 35  # asm-generic/socket.h; the socket module does not name it
SAMPLE_EVERY_S = 0.05
MAX_STEP_NS = 50_000
"""Offsets of two neighbouring samples further apart than this: the real-time clock was stepped."""
_PR_SET_TIMERSLACK = 29
_FD_SETSIZE = 1024
_TIMESPEC = struct.Struct("@ll")


class Stream(Protocol):
    """A socket that the loop's selector reads for. Its methods neither block nor raise."""

    @property
    def fd(self) -> int:
        """Its descriptor; -1 when it is closed."""
        ...

    def on_readable(self, bound_ns: int) -> None:
        """Read once. What is read came after `bound_ns`; 0 where that is not known."""
        ...

    def on_writable(self) -> None:
        """Send more; called once after `want_write`."""
        ...


class Receiver(Protocol):
    """Where a stream socket is watched."""

    def add(self, stream: Stream) -> None:
        """Read for this socket from now on."""
        ...

    def remove(self, stream: Stream) -> None:
        """Stop; the socket is about to be closed."""
        ...

    def want_write(self, stream: Stream, wanted: bool) -> None:
        """Tell the stream when it can write again, or stop telling it."""
        ...


if sys.platform == "linux":

    class HarvestSelector(selectors.EpollSelector):
        """An epoll selector that reads the stream sockets inside `select()`.

        It waits with select(2) on the epoll descriptor, in microseconds: epoll's own time-out
        is rounded up to a whole millisecond.
        """

        def __init__(self) -> None:
            super().__init__()
            self._epoll: select.epoll = self._selector  # type: ignore[attr-defined]
            self._epoll_fd = self._epoll.fileno()
            self._streams: dict[int, Stream] = {}
            self._harvested_ns = time.monotonic_ns()

        def add(self, stream: Stream) -> None:
            """Read for this socket from now on."""
            self._streams[stream.fd] = stream
            self._epoll.register(stream.fd, select.EPOLLIN)

        def remove(self, stream: Stream) -> None:
            """Stop; the socket is about to be closed."""
            if self._streams.pop(stream.fd, None) is not None:
                self._epoll.unregister(stream.fd)

        def want_write(self, stream: Stream, wanted: bool) -> None:
            """Tell the stream when it can write again, or stop telling it."""
            if stream.fd in self._streams:
                events = select.EPOLLIN | (select.EPOLLOUT if wanted else 0)
                self._epoll.modify(stream.fd, events)

        def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
            """Read every stream that has something; return what is ready of all others."""
            wait_s = -1.0 if timeout is None else max(0.0, timeout)
            if wait_s and self._epoll_fd < _FD_SETSIZE:
                select.select([self._epoll_fd], [], [], timeout)
                wait_s = 0.0
            # Whatever is read below was not ready when the last poll returned, so it came after
            # that poll began; taken before the poll, the bound holds for what comes during it.
            bound_ns, self._harvested_ns = self._harvested_ns, time.monotonic_ns()
            ready: list[tuple[selectors.SelectorKey, int]] = []
            streams = self._streams
            for fd, event in self._epoll.poll(wait_s, len(streams) + 64):
                stream = streams.get(fd)
                if stream is not None:
                    if event == select.EPOLLIN:
                        stream.on_readable(bound_ns)
                        continue
                    if event & select.EPOLLOUT:
                        stream.on_writable()
                    if event & ~select.EPOLLOUT and stream.fd >= 0:
                        stream.on_readable(bound_ns)
                elif (key := self.get_map().get(fd)) is not None:
                    mask = selectors.EVENT_WRITE if event & ~select.EPOLLIN else 0
                    mask |= selectors.EVENT_READ if event & ~select.EPOLLOUT else 0
                    ready.append((key, mask & key.events))
            return ready


class LoopReceiver:
    """The same service by any selector loop's own readers: user time, without a bound."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def add(self, stream: Stream) -> None:
        """Read for this socket from now on."""
        self._loop.add_reader(stream.fd, stream.on_readable, 0)

    def remove(self, stream: Stream) -> None:
        """Stop; the socket is about to be closed."""
        self._loop.remove_reader(stream.fd)
        self._loop.remove_writer(stream.fd)

    def want_write(self, stream: Stream, wanted: bool) -> None:
        """Tell the stream when it can write again, or stop telling it."""
        if wanted:
            self._loop.add_writer(stream.fd, stream.on_writable)
        else:
            self._loop.remove_writer(stream.fd)


class HarvestLoop(asyncio.SelectorEventLoop):
    """An event loop whose selector does the receiving, where the platform has epoll."""

    def __init__(self) -> None:
        self.receiver: Receiver
        if sys.platform == "linux":
            selector = HarvestSelector()
            self.receiver = selector
            super().__init__(selector)
            _minimise_timer_slack()
        else:
            super().__init__()
            self.receiver = LoopReceiver(self)


def receiver_of(loop: asyncio.AbstractEventLoop) -> Receiver:
    """Who reads stream sockets on this loop."""
    return loop.receiver if isinstance(loop, HarvestLoop) else LoopReceiver(loop)


def run_on_sockets(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on a harvesting loop, like `asyncio.run`."""
    with asyncio.Runner(loop_factory=HarvestLoop) as runner:
        return runner.run(main)


class KernelClock:
    """Turns the kernel's receive times into CLOCK_MONOTONIC.

    The kernel stamps in CLOCK_REALTIME. NTP slewing moves both clocks alike, so their offset only
    moves by a step; it is sampled while a level runs, and a read between two samples that differ
    keeps its user time.
    """

    def __init__(self) -> None:
        self._at_ns: list[int] = []
        self._offset_ns: list[int] = []
        self.steps = 0

    def sample(self) -> None:
        """Take the offset of the two clocks now."""
        at_ns, offset_ns = clock_offset_ns()
        if self._offset_ns and abs(offset_ns - self._offset_ns[-1]) > MAX_STEP_NS:
            self.steps += 1
        self._at_ns.append(at_ns)
        self._offset_ns.append(offset_ns)

    def monotonic_ns(self, control: bytes | None, user_ns: int) -> int | None:
        """The kernel's time of a read that user code saw at `user_ns`; None if it cannot be told.

        control  the read's SO_TIMESTAMPNS message
        """
        if control is None or len(control) != _TIMESPEC.size or not self._at_ns:
            return None
        after = bisect.bisect_right(self._at_ns, user_ns)
        before = max(0, after - 1)
        after = min(after, len(self._at_ns) - 1)
        offset_ns = self._offset_ns[before]
        if abs(self._offset_ns[after] - offset_ns) > MAX_STEP_NS:
            return None
        seconds, nanoseconds = _TIMESPEC.unpack(control)
        kernel_ns: int = seconds * 1_000_000_000 + nanoseconds - offset_ns
        return kernel_ns if kernel_ns <= user_ns else None


def clock_offset_ns() -> tuple[int, int]:
    """(CLOCK_MONOTONIC now, CLOCK_REALTIME - CLOCK_MONOTONIC), from the narrowest of five brackets.

    The width of the bracket bounds the error; it is well under a microsecond.
    """
    best = (1 << 62, 0, 0)
    for _ in range(5):
        before_ns = time.monotonic_ns()
        real_ns = time.time_ns()
        after_ns = time.monotonic_ns()
        middle_ns = (before_ns + after_ns) // 2
        best = min(best, (after_ns - before_ns, middle_ns, real_ns - middle_ns))
    return best[1], best[2]


class KernelStamps:
    """Whether this host stamps received packets; holds a socket open so that it goes on doing so.

    The kernel switches its stamping on with the first socket that asks for it, a little later than
    asked, so it must be on before the first connection that counts.
    """

    def __init__(self) -> None:
        self._probe: socket.socket | None = None
        if sys.platform == "linux":
            with contextlib.suppress(OSError):
                self._probe = _stamping_socket()

    @property
    def available(self) -> bool:
        """Whether a read comes with the kernel's time."""
        return self._probe is not None

    def close(self) -> None:
        """Give the socket back."""
        if self._probe is not None:
            self._probe.close()
            self._probe = None


def _stamping_socket() -> socket.socket | None:
    """A loopback socket on which a stamp was seen; None if none came."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname(), timeout=1.0)
        try:
            client.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
            peer, _ = server.accept()
            with peer:
                for _ in range(20):
                    peer.sendall(b"x")
                    _, control, _, _ = client.recvmsg(1, 64)
                    if control and len(control[0][2]) == _TIMESPEC.size:
                        return client
                    time.sleep(0.001)
        except OSError:
            client.close()
            raise
        client.close()
        return None


def _minimise_timer_slack() -> None:
    """Let short waits end on time: the default slack of a thread's timers is 50 us."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
