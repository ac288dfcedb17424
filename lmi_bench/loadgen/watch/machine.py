"""Meters of this machine during a level: its NVIDIA GPUs, and its CPUs.

GPUs, through NVML: energy comes from the driver's own counter if the GPU has one (Volta and later),
else from power samples by the trapezoidal rule. It includes what other programs used on these GPUs.

CPU time that neither the server under test nor the load generator got, for a server on this machine
(Linux). What the hypervisor took always counts; what other programs used counts only where they
left no core idle, since it was then missing.
"""

import importlib
import math
import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lmi_bench.core.server_metrics import Power

MIN_SPAN_S = 5.0  # minimum level length: the driver averages power over up to a second
_J_PER_MJ = 1e-3
_W_PER_MW = 1e-3
_PROC = Path("/proc")
_STAT = _PROC / "stat"
_FEW_IDLE = 0.1  # share of the CPU time below which programs wait for each other
_LISTENS = "0A"  # the state of a listening socket in /proc/net/tcp
_FORWARDERS = ("docker-proxy", "kubectl", "rootlessport", "socat", "ssh")


@dataclass(eq=False)
class GpuPower:
    """Energy and use of the given GPUs.

    nvml   the pynvml module, initialised
    clock  seconds
    """

    nvml: Any
    handles: Sequence[Any]
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._readings: list[tuple[float, float, float, float]] = []  # s, W, use, J or NaN

    def read(self) -> None:
        nvml = self.nvml
        try:
            power_w = sum(nvml.nvmlDeviceGetPowerUsage(h) for h in self.handles) * _W_PER_MW
            use = [nvml.nvmlDeviceGetUtilizationRates(h).gpu / 100 for h in self.handles]
        except nvml.NVMLError:
            return
        energy_j = math.nan
        with suppress(nvml.NVMLError):
            total_mj = sum(nvml.nvmlDeviceGetTotalEnergyConsumption(h) for h in self.handles)
            energy_j = total_mj * _J_PER_MJ
        self._readings.append((self.clock(), power_w, sum(use) / len(use), energy_j))

    def summary(self, output_tokens: int) -> Power:
        """Energy between the first and the last reading, and joules for each output token.

        `valid` is False if the level was too short or had too few readings; with less than two, the
        file has no figures either.
        """
        if len(self._readings) < 2:
            return Power.from_json({"gpus": len(self.handles), "valid": False})
        times_s, power_w, use_frac, counted_j = np.array(self._readings).T
        span_s = float(times_s[-1] - times_s[0])
        is_counted = not np.isnan(counted_j).any()
        used_j = counted_j[-1] - counted_j[0] if is_counted else np.trapezoid(power_w, times_s)
        energy_j = float(used_j)
        return Power(
            gpus=len(self.handles),
            energy_j=energy_j,
            gpu_use_frac=float(use_frac.mean()),
            mean_power_w=energy_j / span_s if span_s > 0 else None,
            joules_per_output_token=energy_j / output_tokens if output_tokens else None,
            source="energy counter" if is_counted else "power samples",
            valid=span_s >= MIN_SPAN_S and len(times_s) >= 5,
        )


def open_gpu_power() -> GpuPower | None:
    """The GPUs of this machine; None without GPUs or without pynvml."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
    except nvml.NVMLError:
        return None
    return GpuPower(nvml, handles) if handles else None


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
        inodes |= {r[9] for r in rows if r[3] == _LISTENS and int(r[1].rpartition(":")[2], 16) == port}
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
