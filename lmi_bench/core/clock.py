"""Virtual time: an asyncio loop whose selector jumps to the next timer instead of waiting.

Code that takes the time from its running loop and waits with asyncio runs unchanged, and an hour
of load takes as long as its callbacks. Only for programs whose every wait is a timer: nothing may
arrive from a socket, a thread or a process, so a jump past a real event cannot happen; a loop that
would wait for ever raises instead of hanging.
"""

import asyncio
import contextlib
import math
import selectors
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

from lmi_bench.core.errors import InputError, LmiBenchError
from lmi_bench.core.lengths import MOST_TIME_S

T = TypeVar("T")


class _JumpingSelector(selectors.SelectSelector):
    """A selector that turns every wait into a jump of the clock."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.idle: list[asyncio.Future[None]] = []

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is not None and timeout <= 0:
            return []
        if self.idle:  # nothing else is ready at this instant: settle before the clock moves
            waiting, self.idle = self.idle, []
            for future in waiting:
                if not future.done():
                    future.set_result(None)
            return []
        if timeout is None:
            raise LmiBenchError("virtual time cannot go on: every task waits for something that no timer ends")
        self.now_s += timeout
        if self.now_s > MOST_TIME_S:
            raise InputError("the simulated level takes more than 30 years: raise its rate")
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose `time()` is virtual: seconds since the loop was made."""

    def __init__(self) -> None:
        self.virtual = _JumpingSelector()
        super().__init__(self.virtual)

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self.virtual.now_s

    # asyncio runs the timers due before time() + resolution: the smallest step above the present
    # instant runs what is due now and nothing later, however far the clock has come.
    @property
    def _clock_resolution(self) -> float:
        return 2 * math.ulp(self.virtual.now_s)

    @_clock_resolution.setter
    def _clock_resolution(self, value: float) -> None:
        """asyncio sets the real clock's resolution, which means nothing here."""


async def settle() -> None:
    """Let everything that is due at this instant happen first.

    In virtual time it returns when no callback is left at the present instant, so arrivals that
    coincide with the end of a step are seen by the next plan. In real time nothing coincides:
    it yields once.
    """
    loop = asyncio.get_running_loop()
    if isinstance(loop, VirtualLoop):
        future: asyncio.Future[None] = loop.create_future()
        loop.virtual.idle.append(future)
        await future
    else:
        await asyncio.sleep(0)


def loop_time_s() -> float:
    """The running loop's time, virtual or not; the monotonic clock without a running loop."""
    try:
        return asyncio.get_running_loop().time()
    except RuntimeError:
        return time.monotonic()


def is_virtual() -> bool:
    """Whether the running loop's time is virtual."""
    return isinstance(asyncio.get_running_loop(), VirtualLoop)


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end in virtual time, like `asyncio.run`."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


@contextlib.contextmanager
def alarm(limit_s: float, act: Callable[[], object]) -> Iterator[None]:
    """Call `act` in a thread of its own if the block takes longer."""
    timer = threading.Timer(limit_s, act)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
