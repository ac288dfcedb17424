"""Power and energy of this machine's NVIDIA GPUs during a level, through NVML.

Energy comes from the driver's own counter if the GPU has one (Volta and later), else from power
samples by the trapezoidal rule. It includes what other programs used on these GPUs.
"""

import importlib
import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
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
            mean_power_w=energy_j / span_s if span_s > 0 else None,
            gpu_use_frac=float(use_frac.mean()),
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
