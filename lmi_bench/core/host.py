"""Facts about this machine and its software that affect a measurement."""

import ctypes
import gc
import importlib.metadata
import os
import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_CPU_INFO, _MEMORY_INFO = Path("/proc/cpuinfo"), Path("/proc/meminfo")
_CGROUPS = Path("/sys/fs/cgroup")
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
# of cgroups 2 and 1: the limit, its use, and what the kernel can reclaim of that, with its file
_MEMORY_LIMITS = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
)
_PACKAGES = ("lmi-bench", "numpy", "httptools", "orjson", "aiohttp", "boto3", "torch")


def host_facts() -> dict[str, Any]:
    """Facts about this machine that affect a measurement."""
    return {
        "system": platform.system(),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "cpu": cpu_info("model name") or platform.processor(),
        "cpus": os.cpu_count(),
        "memory_bytes": memory_bytes(),
        "python": platform.python_version(),
    }


def usable_cores(cgroup: Path = _CGROUPS) -> int:
    """Cores that this process can use: its CPU affinity or its container's CPU quota, whichever is
    lower; at least 1."""
    if hasattr(os, "sched_getaffinity"):
        allowed = len(os.sched_getaffinity(0))
    else:
        allowed = os.cpu_count() or 1
    quota = _cpu_quota(cgroup)
    return allowed if quota is None else max(1, min(allowed, int(quota)))


def _cpu_quota(cgroup: Path) -> float | None:
    """CPU quota in cores, from cgroup 2's cpu.max or cgroup 1's two files."""
    try:
        limit, period = (cgroup / "cpu.max").read_text(encoding="utf-8").split()
    except (OSError, ValueError):
        try:
            limit, period = (
                (cgroup / "cpu" / f"cpu.cfs_{part}_us").read_text(encoding="utf-8").strip()
                for part in ("quota", "period")
            )
        except OSError:
            return None
    if not limit.isdecimal() or not period.isdecimal() or int(period) == 0:  # "max", or -1
        return None
    return int(limit) / int(period)


def installed_versions(names: Sequence[str] = _PACKAGES) -> dict[str, str]:
    """Versions of lmi-bench and the packages it depends on, or of others; imports none."""
    versions = {}
    for name in names:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def cpu_info(*names: str) -> str:
    """The first core's value under one of these names; empty where the system does not list it."""
    try:
        lines = _CPU_INFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(names)), "")


def instruction_sets() -> str:
    """Instruction sets of the first core, in the order of the alphabet; empty if not listed."""
    return " ".join(sorted(cpu_info("flags", "Features").split()))


@contextmanager
def without_collection() -> Iterator[None]:
    """Pause this process's garbage collector."""
    is_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_on:
            gc.enable()


def return_large_allocations(from_bytes: int) -> None:
    """Have memory of `from_bytes` and more at once returned to the system when it is freed.

    glibc raises this limit to the largest memory freed, up to 32 MiB, and then keeps what lies
    below anything still in use. Other C libraries have no such setting; nothing happens there.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(_M_MMAP_THRESHOLD, from_bytes)
        set_option(_M_TRIM_THRESHOLD, 2 * from_bytes)  # else 128 KiB: a system call at each step


def memory_bytes() -> int:
    """All memory of this machine, ignoring a container's limit."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def available_memory_bytes(meminfo: Path = _MEMORY_INFO, cgroups: Path = _CGROUPS) -> int:
    """Memory that can still be allocated.

    The lower of the kernel's estimate (MemAvailable) and the rest of a container's limit; without
    either file (macOS), half of the machine's memory.
    """
    kib = _entry(meminfo, "MemAvailable:")
    known = [] if kib is None else [kib * 1024]
    for limit, used, statistics, reclaimable in _MEMORY_LIMITS:
        if (cgroups / limit).is_file() and (cgroups / used).is_file():
            most, in_use = ((cgroups / name).read_text("ascii").strip() for name in (limit, used))
            if most != "max":
                cached = _entry(cgroups / statistics, reclaimable) or 0
                known.append(int(most) - int(in_use) + cached)
    return max(0, min(known)) if known else memory_bytes() // 2


def _entry(file: Path, name: str) -> int | None:
    """The number after a name at the start of a line; None without such a line or file."""
    lines = file.read_text(encoding="ascii").splitlines() if file.is_file() else []
    return next((int(line.split()[1]) for line in lines if line.split()[:1] == [name]), None)
