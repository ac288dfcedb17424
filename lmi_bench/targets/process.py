"""Controls this process: torch's spinning threads, a launcher's ranks, a deadline for loading."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from lmi_bench.core.errors import EXIT_FAILED, InputError
from lmi_bench.core.host import usable_cores
from lmi_bench.core.scenario import EngineSection
from lmi_bench.targets.applies import runs_on_gpu

if TYPE_CHECKING:
    from lmi_bench.engine.torch_backend.launched import Launch

SPIN_COUNT: Final = "3000"
"""Iterations of libgomp's wait loop, about 0.1 to 0.2 ms on x86. Its default of 300,000 is 10 to
20 ms: threads then waste the time slice of the thread that they wait for if it has lost its core to
another process. Two threads, one core busy: demo-15m, 32 sequences, 88 ms a step with the default,
44 with this."""


def wait_briefly() -> None:
    """Limit how long torch's threads spin, unless the user has chosen; call before torch loads."""
    if "torch" not in sys.modules and "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)


def launched_degree(settings: EngineSection) -> int | None:
    """Number of ranks that a launcher such as torchrun has started for one copy, or None. Raises
    InputError if the settings ask for another number."""
    launch = _launch()
    if launch is None:
        return None
    if (settings.tensor_parallel or 1) not in ("max", launch.degree) or settings.replicas > 1:
        raise InputError(
            f"the launcher has started {launch.degree} ranks of one copy: give --tp "
            f"{launch.degree} or --tp max, and no --replicas"
        )
    return launch.degree


def refuse_to_follow() -> None:
    """Raise InputError in a process that a launcher has started as a rank other than 0. Only
    commands that call `follow_launcher` first use such ranks; others would wait forever."""
    launch = _launch_of_further_rank()
    if launch is not None:
        raise InputError(
            f"the launcher has started this process as rank {launch.rank}: only `serve` and "
            "`generate` run over ranks of a launcher; start this command by itself, with --tp"
        )


def follow_launcher(settings: EngineSection) -> bool:
    """Serve as a further rank until rank 0 ends; False at once if this process is not one."""
    launch = _launch_of_further_rank()
    if launch is None:
        return False
    from lmi_bench.engine.torch_backend.launched import follow

    device = "cuda" if runs_on_gpu(settings) else "cpu"
    for each in (signal.SIGINT, signal.SIGTERM):  # rank 0 receives them, too, and ends this rank
        signal.signal(each, signal.SIG_IGN)
    follow(launch, device, threads=settings.threads or usable_cores())
    return True


def _launch() -> "Launch | None":
    from lmi_bench.engine.torch_backend.launched import launch_of

    return launch_of(os.environ)


def _launch_of_further_rank() -> "Launch | None":
    if os.environ.get("RANK", "0") == "0":
        return None  # without loading the back end
    launch = _launch()
    return None if launch is None or launch.rank == 0 else launch


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
        text = f"error: {model} was not loaded within {limit_s:g} s (model_loading_timeout): raise "
        sys.stderr.write(text + "it, or use faster storage\n")
        sys.stderr.flush()
        os._exit(EXIT_FAILED)

    timer = threading.Timer(limit_s, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
