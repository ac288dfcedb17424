"""Workers of a Ray cluster: one process a node, which dials in as `worker --connect` does.

Ray only places and starts them (STRICT_SPREAD). No request, time or result goes through it: the
event loop of an actor would be what is measured.
"""

import importlib
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lmi_bench.core.errors import InputError
from lmi_bench.core.texts import say
from lmi_bench.loadgen.run.hosts import SECRET, parse_address, read_secret

_CONNECT_S, _PLACE_S = 10.0, 60.0  # to the cluster; for a free core on every node


@contextmanager
def ray_workers(address: str, connect: str) -> Iterator[tuple[int, Callable[[], None]]]:
    """A worker on every node, ended with the block; gives their number, and a check of them that
    raises InputError with the last words of one that has ended.

    address  of the cluster, or auto; connect: that of this sweep, which listens
    Raises InputError without Ray, a cluster at the address, or a free core on each node. Where
    LMI_BENCH_SECRET is not set, the workers get one that is made here.
    """
    try:
        ray: Any = importlib.import_module("ray")
    except ImportError as exc:
        raise InputError("--ray needs Ray: pip install 'lmi-bench[distributed]'") from exc
    os.environ.setdefault(SECRET, secrets.token_hex(16))
    try:
        if address != "auto":  # Ray would try for minutes, then end the process
            place = parse_address(address.removeprefix("ray://"), "--ray")
            socket.create_connection(place, _CONNECT_S).close()
        ray.init(address=address, logging_level="ERROR", log_to_driver=False)
    except (OSError, RuntimeError, ValueError) as exc:
        raise InputError(f"--ray {address}: {_last_line(str(exc))}") from exc
    tasks = []
    try:
        nodes = sum(node["Alive"] for node in ray.nodes())
        group = ray.util.placement_group([{"CPU": 1}] * nodes, strategy="STRICT_SPREAD")
        if not group.wait(_PLACE_S):
            raise InputError(say("ray no core", address=address, nodes=nodes, place_s=_PLACE_S))
        placed = importlib.import_module("ray.util.scheduling_strategies")
        for node in range(nodes):
            place = placed.PlacementGroupSchedulingStrategy(group, node)
            start = ray.remote(num_cpus=1, max_retries=0, scheduling_strategy=place)(_work)
            tasks.append(start.remote(connect, read_secret()))

        def check() -> None:
            for task in ray.wait(tasks, num_returns=len(tasks), timeout=0)[0]:
                try:
                    why = ray.get(task)
                except ray.exceptions.RayError as exc:  # such as a node without lmi_bench
                    why = _last_line(str(exc))
                raise InputError(f"--ray {address}: a worker ended: {why}")

        yield nodes, check
    finally:
        for task in tasks:
            ray.cancel(task)
        ray.shutdown()


def _work(connect: str, secret: str) -> str:
    """On a node: one worker, to its end; returns the node, its exit code and its last words."""
    done = subprocess.run(  # noqa: S603 - our own program
        [sys.executable, "-m", "lmi_bench", "worker", "--connect", connect],
        env=os.environ | {SECRET: secret},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return f"{os.uname().nodename}, exit code {done.returncode}: {_last_line(done.stdout)}"


def _last_line(text: str) -> str:
    return next(reversed(text.strip().splitlines()), "it said nothing")
