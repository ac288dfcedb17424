"""Receiving on sockets with exact times: the loop's selector does the reading itself.

asyncio would wake a task for every token. Here `select()` reads the stream sockets, keeps (time,
kernel time, bytes) and wakes a future only when a response ends, so one ordinary loop on one core
keeps up with tens of thousands of token events a second in Python, and with more where the native
receiver (`native_harvest`) reads in its place. Times are CLOCK_MONOTONIC nanoseconds, which is the
loop's own clock.

Whose time counts, the read's or the kernel's, is the matter of `kernel_time`.
"""

import asyncio
import contextlib
import ctypes
import os
import select
import selectors
import ssl
import sys
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, Protocol, TypeAlias, TypeVar

from lmi_bench.loadgen.http import native_harvest, native_tls
from lmi_bench.loadgen.http.native_harvest import KeptStream, NativeHarvester

T = TypeVar("T")

_PR_SET_TIMERSLACK = 29
_FD_SETSIZE = 1024
_READABLE = getattr(select, "EPOLLIN", 1)


class Stream(Protocol):
    """A socket that the loop's selector watches. Its methods neither block nor raise."""

    @property
    def fd(self) -> int:
        """Its descriptor; -1 when it is closed."""

    def on_readable(self, bound_ns: int) -> None:
        """Read once. The bytes arrived after `bound_ns`; 0: unknown."""

    def on_writable(self) -> None:
        """Send more; called once after `want_write`."""

    def on_woken(self, kind: int, error: int) -> None:
        """Look at what the native receiver kept; kind is one of `native_harvest`'s, `error` the
        errno of FAILED or OpenSSL's code of TLS_FAILED."""


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
            self._native: NativeHarvester | None = None
            self._kept: dict[int, Stream] = {}
            self._harvested_ns = time.monotonic_ns()
            self._tick_s: float | None = None

        def look_every(self, tick_s: float | None) -> None:
            """Look for data at least this often, so that what is read arrived within the tick."""
            self._tick_s = tick_s

        def add(self, stream: Stream, session: ssl.SSLObject | None = None) -> KeptStream | None:
            """Read this socket, or its TLS session, from now on. Gives what is kept if that is done
            natively, else None. The caller holds the session until `remove`."""
            if self._native is None or (session is not None and native_tls.why_not()):
                self._streams[stream.fd] = stream
                self._epoll.register(stream.fd, select.EPOLLIN)
                return None
            kept = self._native.add(stream.fd, session)
            self._kept[stream.fd] = stream
            self._epoll.register(stream.fd, native_harvest.WATCHED)
            return kept

        def remove(self, stream: Stream) -> None:
            """Stop; the socket is about to be closed."""
            fd = stream.fd
            if self._streams.pop(fd, None) is not None:
                self._epoll.unregister(fd)
            elif self._native is not None and self._kept.pop(fd, None) is not None:
                self._epoll.unregister(fd)
                self._native.remove(fd)

        def use_native(self, library: Path) -> None:
            """Let the native receiver read for the streams that are added from now on."""
            if self._native is None:
                self._native = NativeHarvester(library, self._epoll_fd)

        def want_write(self, stream: Stream, wanted: bool) -> None:
            """Call `on_writable` when the stream can write again, or stop doing so."""
            events = select.EPOLLOUT if wanted else 0
            if stream.fd in self._streams:
                self._epoll.modify(stream.fd, events | select.EPOLLIN)
            elif stream.fd in self._kept:
                self._epoll.modify(stream.fd, events | native_harvest.WATCHED)

        def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
            """Read every stream that has data; return the other descriptors that are ready."""
            if self._native is not None and self._kept:
                return self._select_natively(self._native, timeout)
            wait_s = -1.0 if timeout is None else max(0.0, timeout)
            if wait_s and self._epoll_fd < _FD_SETSIZE:
                if self._tick_s is None:
                    select.select([self._epoll_fd], [], [], timeout)
                else:
                    self._wait_in_ticks(self._tick_s, timeout)
                wait_s = 0.0
            # Whatever is read below was not ready when the last poll returned, so it came after
            # that poll began; taken before the poll, the bound holds for what comes during it.
            bound_ns, self._harvested_ns = self._harvested_ns, time.monotonic_ns()
            ready: list[tuple[selectors.SelectorKey, int]] = []
            streams = self._streams
            for fd, event in self._epoll.poll(wait_s, len(streams) + 64):
                stream = streams.get(fd)
                if stream is not None and event == _READABLE:
                    stream.on_readable(bound_ns)
                else:
                    self._serve(fd, event, bound_ns, ready)
            return ready

        def close(self) -> None:
            """Close the epoll and free the native receiver."""
            if self._native is not None:
                self._native.close()
                self._native = None
            super().close()

        def _serve(self, fd: int, event: int, bound_ns: int, ready: list[tuple[selectors.SelectorKey, int]]) -> None:
            """Let a stream read and write, or note that another descriptor is ready."""
            stream = self._streams.get(fd)
            if stream is not None:
                if event & select.EPOLLOUT:
                    stream.on_writable()
                if event & ~select.EPOLLOUT and stream.fd >= 0:
                    stream.on_readable(bound_ns)
            elif (key := self.get_map().get(fd)) is not None:
                mask = selectors.EVENT_WRITE if event & ~select.EPOLLIN else 0
                mask |= selectors.EVENT_READ if event & ~select.EPOLLOUT else 0
                ready.append((key, mask & key.events))

        def _select_natively(
            self, native: NativeHarvester, timeout: float | None
        ) -> list[tuple[selectors.SelectorKey, int]]:
            """The same; kept streams are read without Python until one may have ended."""
            ready: list[tuple[selectors.SelectorKey, int]] = []
            kept = self._kept
            watched = len(self.get_map()) + len(self._streams) + len(kept)
            for fd, kind, event, error in native.wait(timeout, self._tick_s, watched):
                if kind == native_harvest.NO_STREAM:
                    self._serve(fd, event, 0, ready)  # no bound is known to Python here
                elif (stream := kept.get(fd)) is None:
                    continue  # closed by what another stream's end set off
                elif kind == native_harvest.WRITABLE:
                    stream.on_writable()
                else:
                    stream.on_woken(kind, error)
            return ready

        def _wait_in_ticks(self, tick_s: float, timeout: float | None) -> None:
            """Wait until a descriptor is ready; each empty look in between is a time bound."""
            now_ns = time.monotonic_ns()
            end_ns = None if timeout is None else now_ns + int(timeout * 1e9)
            while end_ns is None or now_ns < end_ns:
                if end_ns is not None:
                    tick_s = min(tick_s, (end_ns - now_ns) / 1e9)
                if select.select([self._epoll_fd], [], [], tick_s)[0]:
                    return
                self._harvested_ns = now_ns  # nothing was ready when this wait began, nor later
                now_ns = time.monotonic_ns()


class LoopReceiver:
    """A receiver over any selector loop's own readers: user time, without a bound."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def add(self, stream: Stream, session: ssl.SSLObject | None = None) -> None:
        """Read this socket from now on."""
        self._loop.add_reader(stream.fd, stream.on_readable, 0)

    def remove(self, stream: Stream) -> None:
        """Stop; the socket is about to be closed."""
        self._loop.remove_reader(stream.fd)
        self._loop.remove_writer(stream.fd)

    def want_write(self, stream: Stream, wanted: bool) -> None:
        """Call `on_writable` when the stream can write again, or stop doing so."""
        if wanted:
            self._loop.add_writer(stream.fd, stream.on_writable)
        else:
            self._loop.remove_writer(stream.fd)

    def use_native(self, library: Path) -> None:
        """Nothing: the native receiver needs a selector of its own."""

    def look_every(self, tick_s: float | None) -> None:
        """Nothing: the loop looks when it likes."""


Receiver: TypeAlias = "HarvestSelector | LoopReceiver"  # type: ignore[name-defined,unused-ignore]
"""Watches stream sockets and calls their streams; natively and with a bound where it can."""


class HarvestLoop(asyncio.SelectorEventLoop):
    """An event loop whose selector receives, on platforms with epoll."""

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
    """The receiver of this loop's stream sockets."""
    return loop.receiver if isinstance(loop, HarvestLoop) else LoopReceiver(loop)


def run_on_sockets(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on a harvesting loop, like `asyncio.run`."""
    with asyncio.Runner(loop_factory=HarvestLoop) as runner:
        return runner.run(main)


@contextlib.contextmanager
def priority_asked(wanted: bool) -> Iterator[str]:
    """The priority of this thread within the block: the highest that is granted, if wanted.

    One that the user has given the process (`chrt`) stays.
    """
    if sys.platform != "linux" or not wanted:
        yield "normal"
        return
    nice, forked = os.getpriority(os.PRIO_PROCESS, 0), os.SCHED_RESET_ON_FORK
    if os.sched_getscheduler(0) & ~forked != os.SCHED_OTHER:
        yield "as the process has it"
        return
    try:
        try:
            os.sched_setscheduler(0, os.SCHED_FIFO | forked, os.sched_param(1))
            got = "SCHED_FIFO 1"
        except OSError:
            os.setpriority(os.PRIO_PROCESS, 0, -10)
            got = "nice -10"
    except OSError:
        got = "normal: not permitted"
    try:
        yield got
    finally:
        with contextlib.suppress(OSError):  # the flag is not anyone's to take back
            os.setpriority(os.PRIO_PROCESS, 0, nice)
            os.sched_setscheduler(0, os.SCHED_OTHER | forked, os.sched_param(0))


def _minimise_timer_slack() -> None:
    """Let short waits end on time: the default slack of a thread's timers is 50 us."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
