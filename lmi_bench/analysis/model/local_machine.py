"""This machine's measured figures, and the instance `local` that they make.

A fit knows an engine's shares only relative to these figures, so a profile that was fitted here
keeps them: predictions for `local` then rest on the figures of the fit and not on another probe.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass, fields

from lmi_bench.catalog.accelerators import NO_LINK, Accelerator
from lmi_bench.catalog.instances import Instance
from lmi_bench.core.errors import InputError

LOCAL_NAME = "local"
CPU_VENDOR = "cpu"
_BF16_OVER_FP32 = 2.0


@dataclass(frozen=True, slots=True)
class MeasuredMachine:
    """What a probe found of the machine that it ran on.

    memory_bytes            that may still be taken
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
        """The machine as an instance with one accelerator, its processor.

        price_usd_per_hour  as its owner states it; None: unknown

        The 16-bit peak is taken as twice the measured 32-bit one, what processors with 16-bit dot
        products reach; on others the calibrated share comes out lower.
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
                fp16_flop_per_s=_BF16_OVER_FP32 * self.fp32_flop_per_s,
                bf16_flop_per_s=_BF16_OVER_FP32 * self.fp32_flop_per_s,
                fp8_flop_per_s=None,
                int8_op_per_s=None,
                device_link=NO_LINK,
                pcie_link=NO_LINK,
                source=source,
                fp32_flop_per_s=self.fp32_flop_per_s,
                notes=f"{platform.machine()}, {self.cores} cores",
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
