"""This machine as an instance named `local`: cores, free memory, read bandwidth, matmul peak.

Measured with numpy in about a second, at the best of several tries, since a probe that is disturbed
is only ever too slow. The figures take the place of a data sheet's; a calibration on a sweep of the
bundled engine corrects what engine and machine make of them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from lmi_bench.analysis.model.local_machine import LOCAL_NAME, MeasuredMachine
from lmi_bench.catalog.instances import Instance
from lmi_bench.core.host import usable_cores

__all__ = ["LOCAL_NAME", "probe_local_instance", "probe_machine"]

_READ_BYTES = 128 * 2**20  # well beyond the caches
_MATMUL_SIZE = 1024
_PROBE_S = 0.5
_MEMINFO = Path("/proc/meminfo")
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


def probe_machine() -> MeasuredMachine:
    """This machine's figures, measured now."""
    cores = usable_cores()
    return MeasuredMachine(
        cores=cores,
        memory_bytes=available_memory_bytes(),
        bandwidth_bytes_per_s=read_bandwidth_bytes_per_s(cores),
        fp32_flop_per_s=matmul_flop_per_s(),
        measured_date=datetime.now(UTC).date().isoformat(),
    )


def probe_local_instance(*, price_usd_per_hour: float | None = None) -> Instance:
    """This machine as an instance with one accelerator, its processor, measured now.

    price_usd_per_hour  as its owner states it; None: unknown
    """
    return probe_machine().instance(price_usd_per_hour=price_usd_per_hour)


def available_memory_bytes(meminfo: Path = _MEMINFO, cgroup_limit: Path = _CGROUP_LIMIT) -> int:
    """Memory that may still be taken: the kernel's estimate, within a container's limit.

    Half of the machine's memory where the system does not say (macOS).
    """
    bounds: list[int] = []
    if meminfo.is_file():
        lines = meminfo.read_text(encoding="ascii").splitlines()
        bounds += [
            int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")
        ]
    if cgroup_limit.is_file():
        text = cgroup_limit.read_text(encoding="ascii").strip()
        if text.isdigit():
            bounds.append(int(text))
    if not bounds:
        bounds.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2)
    return min(bounds)


def read_bandwidth_bytes_per_s(cores: int) -> float:
    """Bytes that all cores together read from memory in a second."""
    values = np.ones(_READ_BYTES // 4, dtype=np.float32)
    parts = np.array_split(values, cores)
    with ThreadPoolExecutor(cores) as pool:
        return _READ_BYTES / _best_s(lambda: list(pool.map(np.max, parts)))


def matmul_flop_per_s() -> float:
    """Operations a second of a 32-bit matrix product on all cores."""
    size = _MATMUL_SIZE
    left = np.ones((size, size), dtype=np.float32)
    product = np.empty_like(left)
    return 2 * size**3 / _best_s(lambda: np.matmul(left, left, out=product))


def _best_s(work: Callable[[], object]) -> float:
    """Seconds of the fastest try within the probe's time, after one to warm up."""
    work()
    best_s = float("inf")
    stop_s = time.perf_counter() + _PROBE_S
    while True:
        start_s = time.perf_counter()
        work()
        end_s = time.perf_counter()
        best_s = min(best_s, end_s - start_s)
        if end_s >= stop_s:
            return best_s
