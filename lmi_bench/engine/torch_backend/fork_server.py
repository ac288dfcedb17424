"""The process from which ranks are forked: it imports torch once, before it has any thread.

Imports no torch itself, so that the server can be importing while this process does the same.
"""

from __future__ import annotations

import multiprocessing
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from typing import Final

_PRELOADED: Final = ["lmi_bench.engine.torch_backend.rank"]


def fork_context() -> ForkServerContext:
    """What rank processes are made with; starts the server if there is none and waits for
    nothing."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    forkserver.ensure_running()
    return context
