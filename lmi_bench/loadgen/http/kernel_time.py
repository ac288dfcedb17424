"""The kernel's receive times, turned into the clock of everything else.

The kernel stamps a packet when it enters the host (SO_TIMESTAMPNS, Linux), so the receive time
stays correct even if the process reads late. Other hosts use the time of the read.
"""

import bisect
import contextlib
import socket
import struct
import sys
import time

SO_TIMESTAMPNS = 35  # asm-generic/socket.h; the socket module does not name it
SAMPLE_EVERY_S = 0.05
MAX_STEP_NS = 50_000
"""Offsets of two neighbouring samples further apart than this: the real-time clock was stepped."""
MAX_DRIFT_NS = 1_000
"""Offsets of a level that differ by no more are one offset, within the stated error."""
_STAMP_TRIES = 500  # a millisecond apart: a busy machine's kernel starts to stamp late
_TIMESPEC = struct.Struct("@ll")
_TIMESPEC_BYTES = _TIMESPEC.size
_unpack_timespec = _TIMESPEC.unpack


class KernelClock:
    """Turns the kernel's receive times into CLOCK_MONOTONIC.

    The kernel stamps in CLOCK_REALTIME. NTP slewing moves both clocks alike, so their offset only
    moves by a step; it is sampled while a level runs, and a read between two samples that differ
    keeps its user time.
    """

    def __init__(self) -> None:
        self._at_ns: list[int] = []
        self._offset_ns: list[int] = []
        self._steady_ns: int | None = None
        self._lowest_ns = self._highest_ns = self._width_ns = 0
        self.steps = 0

    @property
    def error_bound_ns(self) -> int:
        """By how much a converted time may be off: width of the brackets, and their movement.

        Where the clock was stepped user time is taken, so a step is no part of it.
        """
        return self._width_ns + min(self._highest_ns - self._lowest_ns, MAX_STEP_NS)

    def sample(self) -> None:
        """Take the offset of the two clocks now."""
        at_ns, offset_ns, width_ns = clock_offset_ns()
        self._width_ns = max(self._width_ns, width_ns)
        if not self._offset_ns:
            self._steady_ns = self._lowest_ns = self._highest_ns = offset_ns
        self._lowest_ns = min(self._lowest_ns, offset_ns)
        self._highest_ns = max(self._highest_ns, offset_ns)
        if self._highest_ns - self._lowest_ns > MAX_DRIFT_NS:
            self._steady_ns = None
        if self._offset_ns and abs(offset_ns - self._offset_ns[-1]) > MAX_STEP_NS:
            self.steps += 1
        self._at_ns.append(at_ns)
        self._offset_ns.append(offset_ns)

    def reach(self, until_ns: int) -> None:
        """Sample if that has not been done since this time: a step since then would go unseen."""
        if not self._at_ns or self._at_ns[-1] < until_ns:
            self.sample()

    def monotonic_ns(self, control: bytes | None, user_ns: int) -> int | None:
        """The kernel's time of a read that user code saw at `user_ns`; None if unknown.

        control  the read's SO_TIMESTAMPNS message
        """
        if control is None or len(control) != _TIMESPEC_BYTES:
            return None
        offset_ns = self._steady_ns
        if offset_ns is None and (offset_ns := self._offset_at(user_ns)) is None:
            return None
        seconds, nanoseconds = _unpack_timespec(control)
        kernel_ns: int = seconds * 1_000_000_000 + nanoseconds - offset_ns
        return kernel_ns if kernel_ns <= user_ns else None

    def _offset_at(self, user_ns: int) -> int | None:
        """The offset of the interval between two samples; None if the clock was stepped in it."""
        if not self._at_ns:
            return None
        after = bisect.bisect_right(self._at_ns, user_ns)
        before = max(0, after - 1)
        after = min(after, len(self._at_ns) - 1)
        offset_ns = self._offset_ns[before]
        if abs(self._offset_ns[after] - offset_ns) > MAX_STEP_NS:
            return None
        return offset_ns


def clock_offset_ns() -> tuple[int, int, int]:
    """(CLOCK_MONOTONIC now, CLOCK_REALTIME - CLOCK_MONOTONIC, error bound), all in ns.

    From the narrowest of five brackets, whose width is the bound: well under a microsecond.
    """
    best = (1 << 62, 0, 0)
    for _ in range(5):
        before_ns = time.monotonic_ns()
        real_ns = time.time_ns()
        after_ns = time.monotonic_ns()
        middle_ns = (before_ns + after_ns) // 2
        best = min(best, (after_ns - before_ns, middle_ns, real_ns - middle_ns))
    return best[1], best[2], best[0]


def stamping_socket() -> socket.socket | None:
    """A loopback socket on which the kernel's stamp was seen; None if this host gives none.

    Keep it open: the kernel starts to stamp shortly after the first socket requests it, so the
    request must come before the first connection that counts.
    """
    if sys.platform != "linux":
        return None
    with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname(), timeout=1.0)
        try:
            client.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
            peer, _ = server.accept()
            with peer:
                for _ in range(_STAMP_TRIES):
                    peer.sendall(b"x")
                    _, control, _, _ = client.recvmsg(1, 64)
                    if control and len(control[0][2]) == _TIMESPEC_BYTES:
                        return client
                    time.sleep(0.001)
        except OSError:
            client.close()
            raise
        client.close()
    return None
