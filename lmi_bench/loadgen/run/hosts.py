"""Where workers run, and how they are started: a process here, over ssh, or one that dials in.

Ray only places and starts workers that dial in, one a node (STRICT_SPREAD). No request, time or
result goes through it: the event loop of an actor would be what is measured.
"""

import contextlib
import importlib
import os
import re
import secrets
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from lmi_bench.core.clock import alarm
from lmi_bench.core.errors import InputError, LmiBenchError
from lmi_bench.core.listener import Listener
from lmi_bench.loadgen.http.kernel_time import SO_TIMESTAMPNS
from lmi_bench.loadgen.run.channel import Channel, Role

SECRET = "LMI_BENCH_SECRET"  # noqa: S105 - the variable's name
LEAST_SECRET = 16  # characters: who listens to a greeting may try shorter ones one by one
PIPE_SECRET = ""  # nobody else has access to a pipe
_SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=5")
_HOST = re.compile(r"((?:[^-:*@]+@)?\[[\w:.%]+\]|[^-:*[][^:*[]*)(?::([^:*][^*]*))?(?:\*([1-9]\d*))?")
_ALL_ADDRESSES = ("0.0.0.0", "::")  # noqa: S104 - to listen on, but none to dial
_HOME = re.compile(r"~[\w.-]*")  # which the shell there has to see unquoted
_WHY = {127: "lmi-bench is not found: install it, or write HOST:PATH", 255: "ssh does not get there without a question"}
"""By the exit code: of the shell there, and of ssh."""
_GREETING_S = 10.0  # time limit of a worker that has dialled in
_DIAL_S = 300.0  # a cluster may start the sweep after its workers
_END_S = 1.0
_CHECK_EVERY_S = 0.5
_CONNECT_S, _PLACE_S = 10.0, 60.0  # to the cluster; for a free core on every node


@dataclass(frozen=True, slots=True)
class Host:
    """One worker's place; without a command its worker dials in with `worker --connect`."""

    name: str
    command: tuple[str, ...] = ()


_PROGRAM = f"import sys; sys.path = {sys.path!r}; from lmi_bench.cli.main import main; main()"
LOCAL = Host("local", (sys.executable, "-c", _PROGRAM, "worker"))
"""It imports from where this process does, not from the working directory."""
JOIN = Host("join")


def parse_hosts(text: str) -> tuple[Host, ...]:
    """The hosts of a comma list: local, join, or [USER@]HOST[:PATH of lmi-bench there], an IPv6
    address in brackets; each may be repeated, as join*4. Raises InputError.

    >>> [host.name for host in parse_hosts("local*2,ada@gpu1:/opt/bin/lmi-bench")]
    ['local', 'local', 'ada@gpu1']
    """
    found: list[Host] = []
    for each in text.split(","):
        word = _HOST.fullmatch(each.strip())
        name, path, count = word.groups() if word else ("", None, None)
        here = {"local": LOCAL, "join": JOIN}.get(name)
        if not name or (here and path):
            raise InputError(
                f"--hosts {text}: write local, join, HOST or USER@HOST with commas "
                "between them, HOST:PATH for lmi-bench's place there, and NAME*4 for four workers there"
            )
        home, slash, rest = (path or "lmi-bench").partition("/")
        program = f"{home}/{shlex.quote(rest)}" if slash and _HOME.fullmatch(home) else shlex.quote(path or home)
        ssh = (*_SSH, "--", name.replace("[", "").replace("]", ""), f"{program} worker")
        found += [here or Host(name, ssh)] * int(count or 1)
    return tuple(found)


def parse_address(text: str, option: str) -> tuple[str, int]:
    """Host and port of `HOST:PORT`; raises InputError that names the option."""
    host, _, port = text.rpartition(":")
    if not host.strip("[]") or not port.isdecimal() or int(port) >= 2**16:
        raise InputError(f"{option} {text}: write HOST:PORT, such as 127.0.0.1:7711")
    return host.strip("[]"), int(port)


def read_secret() -> str:
    """The secret that workers which dial in share with the sweep; raises InputError."""
    secret = os.environ.get(SECRET, "").strip()
    if len(secret) < LEAST_SECRET:
        raise InputError(
            f"set the variable {SECRET} to the same {LEAST_SECRET} characters or "
            "more for the sweep and its workers, such as those of: openssl rand "
            "-hex 16"
        )
    return secret


class Launched(Channel):
    """A worker that is started here or over ssh."""

    def __init__(self, host: Host, name: str) -> None:
        if shutil.which(host.command[0]) is None:
            raise InputError(f"{name}: {host.command[0]} is not found here")
        ours, theirs = socket.socketpair()
        both = Connection(ours.detach())
        super().__init__(both, both, name, "sweep")
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - until `end`
        with theirs:
            self.process = subprocess.Popen(  # noqa: S603 - our own program, or ssh
                host.command,
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=self._said.fileno(),
                start_new_session=True,
            )

    def why_ended(self) -> str:
        """Its exit code and its last words."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(2 * _END_S)
        code = self.process.returncode
        self._said.seek(0)
        lines = self._said.read().decode("utf-8", "replace").strip().splitlines()
        words = f": {lines[-1]}" if lines else ""
        why = f": {_WHY[code]}" if code in _WHY else f" died (exit code {code})"
        return f"{self.name}{why}{words}"

    def end(self) -> None:
        """Wait for its exit after `close`; end one that does not exit."""
        try:
            self.process.wait(_END_S)
        except subprocess.TimeoutExpired:  # such as one that is stopped
            self.process.kill()
            self.process.wait()
        self._said.close()


def let_in(
    address: tuple[str, int], numbers: Collection[int], listener: Listener, check: Callable[[], None] = lambda: None
) -> Iterator[tuple[int, Channel]]:
    """Each worker that dials in and has the secret, with its number, until all have come.

    numbers   of the workers that are awaited; one that has a number of its own, as the pods of an
              Indexed Job do, is the so-manieth of them
    listener  hears where, and of each connection that is refused
    check     called twice a second; raises if no worker can come any more
    """
    if not numbers:
        return
    secret, free, places = read_secret(), set(numbers), dict(enumerate(sorted(numbers)))
    try:
        both = address[0] == "::" and socket.has_dualstack_ipv6()
        if address[0] == "::" and not both:  # every address, and all are IPv4's
            address = ("0.0.0.0", address[1])  # noqa: S104
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        door = socket.create_server(address, family=family, dualstack_ipv6=both)
    except OSError as exc:
        raise InputError(f"--listen {shown(address)}: {exc.strerror or exc}") from exc
    with door:
        door.settimeout(_CHECK_EVERY_S)
        at = shown(door.getsockname())
        while free:
            listener.note(f"waiting for {len(free)} worker(s): lmi-bench worker --connect {at}")
            peer, place = _accept(door, check)
            channel = _over(peer, shown(place), "sweep")
            try:
                with peer, alarm(_GREETING_S, partial(peer.shutdown, socket.SHUT_RDWR)):
                    own = channel.greet(secret).number
                number = min(free) if own is None else places.get(own, -1)
                if number not in free:
                    raise InputError(f"{channel.name}: there is no free place for number {own}")
            except LmiBenchError as exc:
                listener.warn(f"a worker is refused: {exc}")
                channel.close()
                continue
            free.remove(number)
            channel.name = f"worker {number} ({channel.name})"
            yield number, channel


def _accept(door: socket.socket, check: Callable[[], None]) -> tuple[socket.socket, Any]:
    while True:
        with contextlib.suppress(TimeoutError):
            return door.accept()
        check()


def dial(address: str, tell: Callable[[str], None]) -> Channel:
    """Connect to a sweep that listens, now or within a few minutes. Raises InputError."""
    place = parse_address(address, "--connect")
    end_s = time.monotonic() + _DIAL_S
    tell(f"connecting to the sweep at {address}")
    while True:
        try:
            with socket.create_connection(place, timeout=_GREETING_S) as peer:
                peer.setblocking(True)
                return _over(peer, f"the sweep at {address}", "worker")
        except OSError as exc:
            if time.monotonic() > end_s:
                raise InputError(f"--connect {address}: {exc.strerror or exc}") from exc
        time.sleep(1.0)


def _over(peer: socket.socket, name: str, role: Role) -> Channel:
    """A channel that sends small messages at once, and notices within half a minute that the other
    host is gone; while something is on its way there, the pings of a level do. Linux notes when each
    message arrives."""
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option, seconds in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, option):
            peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), seconds)
    if stamps := sys.platform == "linux":
        peer.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
    both = Connection(os.dup(peer.fileno()))
    return Channel(both, both, name, role, peer.dup() if stamps else None)


def shown(place: tuple[Any, ...]) -> str:
    """HOST:PORT of a socket's address."""
    host = place[0].removeprefix("::ffff:")  # an IPv4 address at a door for both kinds
    return f"[{host}]:{place[1]}" if ":" in host else f"{host}:{place[1]}"


@contextlib.contextmanager
def ray_workers(address: str, listen: tuple[str, int]) -> Iterator[tuple[int, Callable[[], None]]]:
    """A worker on every node that has a core (often the head has none to give), ended with the
    block; gives their number, and a check of them that raises InputError with the last words of one
    that has ended.

    address  of the cluster, or auto; listen: where this sweep does, on one address or on all
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
        host = ray.util.get_node_ip_address() if listen[0] in _ALL_ADDRESSES else listen[0]
        nodes = sum(node["Alive"] and node["Resources"].get("CPU", 0) >= 1 for node in ray.nodes())
        if not nodes:
            raise InputError(f"--ray {address}: none of its nodes has a core")
        group = ray.util.placement_group([{"CPU": 1}] * nodes, strategy="STRICT_SPREAD")
        if not group.wait(_PLACE_S):
            raise InputError(f"--ray {address}: not each of its {nodes} nodes has a free core within {_PLACE_S:.0f} s")
        placed = importlib.import_module("ray.util.scheduling_strategies")
        for node in range(nodes):
            place = placed.PlacementGroupSchedulingStrategy(group, node)
            start = ray.remote(num_cpus=1, max_retries=0, scheduling_strategy=place)(_work)
            tasks.append(start.remote(shown((host, listen[1])), read_secret()))

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
