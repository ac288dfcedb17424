"""A time limit for loading a model, so that a server that never becomes ready says why."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from lmi_bench.core.errors import EXIT_FAILED, InputError


@contextmanager
def loading_deadline(model: str, limit_s: float | None) -> Iterator[None]:
    """End the process with one line if the block takes longer than `limit_s`.

    The process exits at once because the threads that read weights cannot be interrupted. Rank
    processes end with it, since their pipes close.
    """
    if limit_s is None:
        yield
        return
    if limit_s <= 0:
        raise InputError(f"model_loading_timeout must be above 0 seconds, got {limit_s:g}")

    def give_up() -> None:
        text = (
            f"error: {model} was not loaded within {limit_s:g} s (model_loading_timeout): raise "
            "it, or use faster storage\n"
        )
        sys.stderr.write(text)
        sys.stderr.flush()
        os._exit(EXIT_FAILED)

    timer = threading.Timer(limit_s, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
