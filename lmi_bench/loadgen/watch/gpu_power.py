"""Power and energy of this machine's NVIDIA GPUs during a level, through NVML.

Energy comes from the driver's own counter if the GPU has one (Volta and later), else from power
samples by the trapezoidal rule. It includes what other programs used on these GPUs.
"""

import importlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lmi_bench.core.server_metrics import Power

MIN_SPAN_S = 5.0  # minimum level length: the driver averages power over up to a second
_J_PER_MJ = 1e-3
_W_PER_MW = 1e-3


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
        self._times_s: list[float] = []
        self._power_w: list[float] = []
        self._use_frac: list[float] = []
        self._energy_j: list[float] | None = []

    def read(self) -> None:
        nvml = self.nvml
        try:
            power_w = sum(nvml.nvmlDeviceGetPowerUsage(h) for h in self.handles) * _W_PER_MW
            use = [nvml.nvmlDeviceGetUtilizationRates(h).gpu / 100 for h in self.handles]
        except nvml.NVMLError:
            return
        self._times_s.append(self.clock())
        self._power_w.append(power_w)
        self._use_frac.append(sum(use) / len(use))
        if self._energy_j is not None:
            try:
                total_mj = sum(nvml.nvmlDeviceGetTotalEnergyConsumption(h) for h in self.handles)
                self._energy_j.append(total_mj * _J_PER_MJ)
            except nvml.NVMLError:
                self._energy_j = None

    def summary(self, output_tokens: int) -> Power:
        """Energy between the first and the last reading, and joules for each output token.

        `valid` is False if the level was too short or had too few readings; with less than two, the
        file has no figures either.
        """
        times_s, power_w = self._times_s, self._power_w
        if len(times_s) < 2:
            return Power.from_json({"gpus": len(self.handles), "valid": False})
        span_s = times_s[-1] - times_s[0]
        if self._energy_j is not None:
            energy_j = self._energy_j[-1] - self._energy_j[0]
        else:
            energy_j = float(np.trapezoid(power_w, times_s))
        return Power(
            gpus=len(self.handles),
            energy_j=energy_j,
            mean_power_w=energy_j / span_s if span_s > 0 else None,
            gpu_use_frac=sum(self._use_frac) / len(self._use_frac),
            joules_per_output_token=energy_j / output_tokens if output_tokens else None,
            source="power samples" if self._energy_j is None else "energy counter",
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
