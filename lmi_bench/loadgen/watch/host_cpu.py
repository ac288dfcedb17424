"""CPU time of this machine that neither the server under test nor the load generator got.

For a server on this machine (Linux). What the hypervisor took always counts; what other programs
used counts only where they left no core idle, since it was then missing.
"""

import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_STAT = _PROC / "stat"
_FEW_IDLE = 0.1  # share of the CPU time below which programs wait for each other
_LISTENS = "0A"  # the state of a listening socket in /proc/net/tcp
_FORWARDERS = ("docker-proxy", "kubectl", "rootlessport", "socat", "ssh")


@dataclass(frozen=True, slots=True)
class CpuReading:
    """CPU time since boot in ticks: all, idle, stolen, and of the server and this program."""

    total: int
    idle: int
    stolen: int
    ours: int


class HostCpu:
    """The share of the CPU time that others took between the first and the last reading.

    port  on which the server listens here
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self.reset()

    def reset(self) -> None:
        """Drop all readings and find the server's process, which may be a new one."""
        server = listening_process(self._port)
        self._known = server is not None
        self._roots = {os.getpid()} | ({server} if server else set())
        self._first = self._last = _reading(self._roots) if _STAT.exists() else None

    def read(self) -> None:
        if self._first is not None:
            self._last = _reading(self._roots)

    def taken_frac(self) -> float | None:
        """Share of the CPU time that others took, 0 to 1; None without two readings."""
        if self._first is None or self._last is None:
            return None
        return taken_frac(self._first, self._last, counts_others=self._known)


def taken_frac(first: CpuReading, last: CpuReading, *, counts_others: bool) -> float | None:
    """Share of the CPU time between two readings that others took; None without time.

    counts_others  the server's processes are among `ours`
    """
    total = last.total - first.total
    if total <= 0:
        return None
    idle, stolen = last.idle - first.idle, last.stolen - first.stolen
    others = max(0, total - idle - stolen - (last.ours - first.ours))
    is_full = idle < _FEW_IDLE * total
    return (stolen + (others if counts_others and is_full else 0)) / total


def _reading(roots: Collection[int]) -> CpuReading:
    # user, nice, system, idle, iowait, irq, softirq, steal
    ticks = [int(each) for each in _STAT.read_text().split("\n", 1)[0].split()[1:9]]
    parents, used = {}, {}
    for pid, fields in _processes():
        parents[pid] = int(fields[1])
        used[pid] = sum(int(each) for each in fields[11:15])  # with the children that have ended
    ours = sum(ticks for pid, ticks in used.items() if _descends(pid, roots, parents))
    return CpuReading(sum(ticks), ticks[3] + ticks[4], ticks[7], ours)


def _descends(pid: int, roots: Collection[int], parents: dict[int, int]) -> bool:
    while pid > 1 and pid not in roots:
        pid = parents.get(pid, 0)
    return pid in roots


def _processes() -> Iterator[tuple[int, list[str]]]:
    """Each process and the fields of /proc/PID/stat after its name."""
    for folder in _PROC.glob("[0-9]*"):
        try:
            yield int(folder.name), (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue


def listening_process(port: int) -> int | None:
    """The process that listens on the port; None if it cannot be seen or only forwards."""
    inodes = set()
    for name in ("tcp", "tcp6"):
        try:
            lines = (_PROC / "net" / name).read_text().splitlines()[1:]
        except OSError:
            continue
        rows = [line.split() for line in lines]
        inodes |= {
            r[9] for r in rows if r[3] == _LISTENS and int(r[1].rpartition(":")[2], 16) == port
        }
    wanted = {f"socket:[{inode}]" for inode in inodes}
    holders = []
    for pid, _ in _processes() if wanted else ():
        try:
            opened = (_PROC / str(pid) / "fd").iterdir()
            if any(str(each.readlink()) in wanted for each in opened):
                holders.append(pid)
        except OSError:  # another user's, or ended
            continue
    if not holders:
        return None
    first = min(holders)  # workers that share the socket come after their parent
    return None if (_PROC / str(first) / "comm").read_text().strip() in _FORWARDERS else first
