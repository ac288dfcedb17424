"""Measures this machine as the instance `local`: cores, free memory, read bandwidth, matmul peak.

It takes numpy about a second; the best of several tries counts, since disturbances only slow a
probe. A fitted profile keeps the figures of its machine: its shares are relative to them.
"""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from datetime import UTC, datetime

import numpy as np

from lmi_bench.catalog.accelerators import NO_LINK, Accelerator
from lmi_bench.catalog.instances import Instance
from lmi_bench.core.errors import InputError
from lmi_bench.core.host import available_memory_bytes, usable_cores

LOCAL_NAME = "local"
CPU_VENDOR = "cpu"
_BF16_OVER_FP32 = 2.0
_READ_BYTES = 128 * 2**20  # well beyond the caches
_MATMUL_SIZE = 1024
_PROBE_S = 0.5


@dataclass(frozen=True, slots=True)
class MeasuredMachine:
    """The figures that a probe measured.

    memory_bytes            available memory
    bandwidth_bytes_per_s   read by all cores together; fp32_flop_per_s: of a matrix product
    measured_date           ISO date
    """

    cores: int
    memory_bytes: int
    bandwidth_bytes_per_s: float
    fp32_flop_per_s: float
    measured_date: str

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name != "measured_date" and not value > 0:
                raise InputError(f"measured machine: {item.name} must be above 0, got {value:g}")

    def instance(self, *, price_usd_per_hour: float | None = None) -> Instance:
        """The machine as an instance whose accelerator is its processor; price None: unknown.

        The 16-bit peak is twice the measured 32-bit one, as with 16-bit dot products; on other
        processors the calibrated share is lower.
        """
        source = f"measured on this machine, {self.measured_date}"
        priced = price_usd_per_hour is not None
        return Instance(
            instance_type=LOCAL_NAME,
            accelerator=Accelerator(
                name=LOCAL_NAME,
                vendor=CPU_VENDOR,
                memory_bytes=self.memory_bytes,
                bandwidth_bytes_per_s=self.bandwidth_bytes_per_s,
                float16_flop_per_s=_BF16_OVER_FP32 * self.fp32_flop_per_s,
                bfloat16_flop_per_s=_BF16_OVER_FP32 * self.fp32_flop_per_s,
                float8_flop_per_s=None,
                device_link=NO_LINK,
                pcie_link=NO_LINK,
                source=source,
                float32_flop_per_s=self.fp32_flop_per_s,
            ),
            num_accelerators=1,
            link=NO_LINK,
            vcpus=self.cores,
            host_memory_bytes=self.memory_bytes,
            price_usd_per_hour=price_usd_per_hour,
            price_region=LOCAL_NAME if priced else "",
            price_date=self.measured_date if priced else "",
            price_source="given by the user" if priced else "",
            source=source,
        )


def probe_machine() -> MeasuredMachine:
    """This machine's figures, measured now: reads and a 32-bit matrix product on all cores."""
    cores, memory_bytes = usable_cores(), available_memory_bytes()
    parts = np.array_split(np.ones(_READ_BYTES // 4, dtype=np.float32), cores)
    with ThreadPoolExecutor(cores) as pool:
        read_s = _best_s(lambda: list(pool.map(np.max, parts)))
    left = np.ones((_MATMUL_SIZE, _MATMUL_SIZE), dtype=np.float32)
    product = np.empty_like(left)
    product_s = _best_s(lambda: np.matmul(left, left, out=product))
    return MeasuredMachine(
        cores=cores,
        memory_bytes=memory_bytes,
        bandwidth_bytes_per_s=_READ_BYTES / read_s,
        fp32_flop_per_s=2 * _MATMUL_SIZE**3 / product_s,
        measured_date=datetime.now(UTC).date().isoformat(),
    )


def _best_s(work: Callable[[], object]) -> float:
    """Seconds of the fastest try within the probe's time, after a warm-up."""
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
