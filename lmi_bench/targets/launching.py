"""What a launcher such as torchrun has decided before this process began."""

from __future__ import annotations

import os
import signal

from lmi_bench.core.errors import InputError
from lmi_bench.core.host import usable_cores
from lmi_bench.core.scenario import EngineSection


def launched_degree(settings: EngineSection) -> int | None:
    """Ranks that a launcher has started for this one copy; None where none has.

    Raises InputError where the settings ask for another number of them.
    """
    from lmi_bench.engine.torch_backend.launched import launch_of

    launch = launch_of(os.environ)
    if launch is None:
        return None
    if settings.tensor_parallel not in ("max", launch.degree) or settings.replicas > 1:
        raise InputError(
            f"the launcher has started {launch.degree} ranks of one copy: give --tp "
            f"{launch.degree} or --tp max, and no --replicas"
        )
    return launch.degree


def refuse_to_follow() -> None:
    """InputError in a process that a launcher has started as a rank other than 0: only a command
    that calls `follow_launcher` first has work for it, any other would wait for itself."""
    if os.environ.get("RANK", "0") == "0":
        return
    from lmi_bench.engine.torch_backend.launched import launch_of

    launch = launch_of(os.environ)
    if launch is not None and launch.rank > 0:
        raise InputError(
            f"the launcher has started this process as rank {launch.rank}: only `serve` and "
            "`generate` run over ranks of a launcher; start this command by itself, with --tp"
        )


def follow_launcher(settings: EngineSection) -> bool:
    """Be one of the ranks that a launcher such as torchrun has started, until rank 0 ends.

    False at once where this process is in charge itself.
    """
    if os.environ.get("RANK", "0") == "0":
        return False
    from lmi_bench.engine.torch_backend.launched import follow, launch_of

    launch = launch_of(os.environ)
    if launch is None or launch.rank == 0:
        return False
    device = "cuda" if settings.backend == "triton" else settings.device or "cpu"
    for each in (signal.SIGINT, signal.SIGTERM):  # rank 0 hears them too, and then says stop
        signal.signal(each, signal.SIG_IGN)
    follow(launch, device, threads=settings.threads or usable_cores())
    return True
