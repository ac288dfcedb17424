"""Controls this process: torch's spinning threads, a deadline for loading."""

import os
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Final

from lmi_bench.core.clock import alarm
from lmi_bench.core.errors import EXIT_FAILED, InputError

SPIN_COUNT: Final = "3000"
"""Iterations of libgomp's wait loop, about 0.1 to 0.2 ms on x86. Its default of 300,000 is 10 to
20 ms: threads then waste the time slice of the thread that they wait for if it has lost its core to
another process. Two threads, one core busy: demo-15m, 32 sequences, 88 ms a step with the default,
44 with this."""


def wait_briefly() -> None:
    """Limit how long torch's threads spin, unless the user has chosen; call before torch loads."""
    if "torch" not in sys.modules and "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)


def loading_deadline(model: str, limit_s: float | None) -> AbstractContextManager[None]:
    """End the process with one line if the block takes longer than `limit_s`.

    The process exits at once because the threads that read weights cannot be interrupted. Rank
    processes end with it, since their pipes close.
    """
    if limit_s is None:
        return nullcontext()
    if limit_s <= 0:
        raise InputError(f"model_loading_timeout must be above 0 seconds, got {limit_s:g}")

    def give_up() -> None:
        text = f"error: {model} was not loaded within {limit_s:g} s (model_loading_timeout): raise "
        sys.stderr.write(text + "it, or use faster storage\n")
        sys.stderr.flush()
        os._exit(EXIT_FAILED)

    return alarm(limit_s, give_up)
