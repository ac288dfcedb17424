"""This machine as an instance named `local`: cores, free memory, read bandwidth, matmul peak.

Measured with numpy in about a second, at the best of several tries, since a probe that is disturbed
is only ever too slow. The figures take the place of a data sheet's; a calibration on a sweep of the
bundled engine corrects what engine and machine make of them.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from lmi_bench.catalog.accelerators import NO_LINK, Accelerator
from lmi_bench.catalog.instances import Instance

LOCAL_NAME = "local"
_READ_BYTES = 128 * 2**20  # well beyond the caches
_MATMUL_SIZE = 1024
_PROBE_S = 0.5
_MEMINFO = Path("/proc/meminfo")
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
_BF16_OVER_FP32 = 2.0


def probe_local_instance(*, price_usd_per_hour: float | None = None) -> Instance:
    """This machine as an instance with one accelerator, its processor.

    price_usd_per_hour  as its owner states it; None: unknown

    The 16-bit peak is taken as twice the measured 32-bit one, what processors with 16-bit dot
    products reach; on others the calibrated share comes out lower.
    """
    cores = usable_cores()
    memory_bytes = available_memory_bytes()
    bandwidth = read_bandwidth_bytes_per_s(cores)
    fp32 = matmul_flop_per_s()
    today = datetime.now(UTC).date().isoformat()
    source = f"measured on this machine, {today}"
    return Instance(
        instance_type=LOCAL_NAME,
        accelerator=Accelerator(
            name=LOCAL_NAME,
            vendor="cpu",
            memory_bytes=memory_bytes,
            bandwidth_bytes_per_s=bandwidth,
            fp16_flop_per_s=_BF16_OVER_FP32 * fp32,
            bf16_flop_per_s=_BF16_OVER_FP32 * fp32,
            fp8_flop_per_s=None,
            int8_op_per_s=None,
            device_link=NO_LINK,
            pcie_link=NO_LINK,
            source=source,
            fp32_flop_per_s=fp32,
            notes=f"{platform.machine()}, {cores} cores",
        ),
        num_accelerators=1,
        link=NO_LINK,
        vcpus=cores,
        host_memory_bytes=memory_bytes,
        price_usd_per_hour=price_usd_per_hour,
        price_region="" if price_usd_per_hour is None else LOCAL_NAME,
        price_date="" if price_usd_per_hour is None else today,
        price_source="" if price_usd_per_hour is None else "given by the user",
        source=source,
    )


def usable_cores() -> int:
    """Cores that this process may run on."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


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
