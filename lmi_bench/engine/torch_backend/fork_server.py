"""The process from which ranks are forked: it imports torch once, before it has any thread.

This module does not import torch, so the server and this process can import it in parallel.
"""

import multiprocessing
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from typing import Final

_PRELOADED: Final = ["lmi_bench.engine.torch_backend.rank"]


def fork_context() -> ForkServerContext:
    """The context that creates rank processes; starts the server if needed, without waiting."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    forkserver.ensure_running()
    return context
