"""SIGTERM ends a sweep as Ctrl-C does: what is finished is kept and shown.

That is how job schedulers, containers and `timeout` end a program, which else dies in silence.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def termination_as_interrupt() -> Iterator[Callable[[], bool]]:
    """Within it SIGTERM becomes SIGINT; gives what tells whether that has happened.

    Whoever ignores or handles SIGTERM already is left alone, and so is every thread but the main
    one, where Python lets no handler be set.
    """
    came = False

    def on_term(_number: int, _frame: FrameType | None) -> None:
        nonlocal came
        came = True
        signal.raise_signal(signal.SIGINT)

    ours = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    )
    if ours:
        signal.signal(signal.SIGTERM, on_term)
    try:
        yield lambda: came
    finally:
        if ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
